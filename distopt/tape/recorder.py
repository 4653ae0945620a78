"""One rank's gradients, on their way from the loss to the collector, written to files as they come.

``RANK.bytes`` has them in the order of their arrival; ``RANK.steps`` has one JSON text per line: who this is and its
parameters in plan order, then, for each step that all ranks agreed on, where its gradients lie.  A line without an end
was not finished, and bytes that no line speaks of belong to no step: a rank may be killed at any time.
``RANK.others`` is there if another optimizer wanted to be recorded too.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distopt import device
from distopt.gradients import PARAMETERS, Collector
from distopt.numbers import whole

VARIABLE = "DISTOPT_RECORD"  # how many steps, of how many one, and the folder: "10:1:/path"


def request(folder: Path, steps: int, every: int) -> dict[str, str]:
    """The environment of ranks that shall record: steps 0, ``every``, 2 ``every`` ..., so many of them.

    Raises ValueError for numbers below 1.
    """
    return {VARIABLE: f"{whole('steps', steps, least=1)}:{whole('every', every, least=1)}:{folder.absolute()}"}


def recorder(rank: int, size: int, environ: Mapping[str, str] = os.environ) -> "Recorder | None":
    """What records a rank of ``size``; None if nobody asked for it, ValueError for what is no request."""
    asked = environ.get(VARIABLE)
    if not asked:
        return None
    steps, _, rest = asked.partition(":")
    every, _, folder = rest.partition(":")
    if not (steps.isdecimal() and every.isdecimal() and int(steps) and int(every) and folder):
        raise ValueError(f"{VARIABLE} must be STEPS:EVERY:FOLDER, as distopt record sets it, got {asked!r}")
    return Recorder(Path(folder), rank, size, int(steps), int(every))


class Recorder:
    """The steps of one optimizer on one rank: of several in a process, the first that makes a step is recorded.

    ``over``: there is nothing more to do.
    """

    def __init__(self, folder: Path, rank: int, size: int, steps: int, every: int):
        self._place, self._size, self._left, self._every = folder / str(rank), size, steps, every
        self._count = 0  # steps that all ranks agreed on
        self._end = 0  # of what belongs to them, in bytes
        self._bytes = -1  # a file, once there is something to write
        self._arrived: list[tuple[Any, int | None]] | None = None  # parameters of a step, and where their gradients lie
        self.over = False

    def watch(self, pairs: Iterable[Any]) -> Iterable[Any]:
        """The same pairs of a loss; gradients are written before anybody else sees them."""
        self._arrived = []
        if self._bytes < 0 and not self._claim():
            self.over = True
        return pairs if self.over or self._count % self._every else self._written(pairs, self._arrived)

    def keep(self, collector: Collector, optimizer: Any) -> None:
        """The ranks have agreed on what was watched: it is a step.  Raises OSError."""
        arrived, self._arrived = self._arrived, None
        if arrived is None or self.over:
            return
        if self._count % self._every == 0:
            places = {collector.identify(param)[0]: at for param, at in arrived}
            if self._count == 0:
                self._say(self._head(collector, optimizer))
            self._say({"step": self._count, "at": [places.get(name) for name in collector.order]})
            self._end += sum(known.value.nbytes for n, known in collector.order.items() if places.get(n) is not None)
            self._left -= 1
        self._count += 1
        if not self._left:
            os.close(self._bytes)
            self.over = True

    def _claim(self) -> bool:
        """Make this rank's file; False if another optimizer has it, which is noted."""
        try:
            self._bytes = os.open(self._place.with_suffix(".bytes"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            self._place.with_suffix(".others").touch()
            return False
        return True

    def _written(self, pairs: Iterable[Any], arrived: list[tuple[Any, int | None]]) -> Iterator[Any]:
        """The pairs; what is no pair, or no gradient, is for the collector to refuse."""
        at = self._end
        for pair in pairs:
            if isinstance(pair, tuple | list) and len(pair) == 2:
                param, grad = pair
                data = _data(grad)
                arrived.append((param, None if data is None else at))
                at = at if data is None else self._write(data, at)
            yield pair

    def _write(self, data: memoryview, at: int) -> int:
        """Bytes at a place; returns their end."""
        while data:
            count = os.pwrite(self._bytes, data, at)
            data, at = data[count:], at + count
        return at

    def _head(self, collector: Collector, optimizer: Any) -> dict[str, Any]:
        order = [[n, list(known.value.shape), str(known.value.dtype)] for n, known in collector.order.items()]
        return {"ranks": self._size, "optimizer": repr(optimizer), "order": order}

    def _say(self, entry: dict[str, Any]) -> None:
        """One more line, which is there when this returns, whatever becomes of the process."""
        with self._place.with_suffix(".steps").open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _data(grad: Any) -> memoryview | None:
    """The bytes of a gradient in C order; None for what is none."""
    if not (device.is_array(grad) or isinstance(grad, np.generic)) or grad.dtype not in PARAMETERS:
        return None
    here = device.host_copy(device.contiguous(grad)) if device.on_gpu(grad) else np.ascontiguousarray(grad)
    return here.reshape(-1).view(np.uint8).data
