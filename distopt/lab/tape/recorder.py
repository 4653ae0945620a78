"""A recorder of one rank's gradients, which are written to files on their way from the loss to the collector.

``RANK.bytes`` has them in the order of their arrival; ``RANK.steps`` has one JSON text per line: first the rank's
head with its parameters in plan order, then, for each step that all ranks agreed on, where its gradients lie.  A line
without an end was not finished, and bytes that no line names belong to no step: a rank may be killed at any time.
``RANK.others`` is there if another optimizer wanted to be recorded too.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distopt import device
from distopt.checks import check_int
from distopt.engine.hooks import RECORD
from distopt.engine.parameters import PARAMETERS, GradientCollector


def request(folder: Path, steps: int, every: int) -> dict[str, str]:
    """Return the environment variable that makes ranks record ``steps`` steps: 0, ``every``, 2 ``every`` ..."""
    return {RECORD: f"{check_int('steps', steps, least=1)}:{check_int('every', every, least=1)}:{folder.absolute()}"}


def recorder(rank: int, size: int, environ: Mapping[str, str] = os.environ) -> "TapeRecorder | None":
    """Return the recorder of a rank, None if the environment asks for none; ValueError for a malformed request."""
    asked = environ.get(RECORD)
    if not asked:
        return None
    steps, _, rest = asked.partition(":")
    every, _, folder = rest.partition(":")
    if not (steps.isdecimal() and every.isdecimal() and int(steps) and int(every) and folder):
        raise ValueError(f"{RECORD} must be STEPS:EVERY:FOLDER, as distopt record sets it, got {asked!r}")
    return TapeRecorder(Path(folder), rank, size, int(steps), int(every))


class TapeRecorder:
    """A recorder of one rank's steps, one of ``every`` up to ``steps`` of them; ``over``: nothing is left to do.

    Of several optimizers the first that makes a step is recorded.
    """

    def __init__(self, folder: Path, rank: int, size: int, steps: int, every: int):
        self._place, self._size, self._left, self._every = folder / str(rank), size, steps, every
        self._count = 0  # steps that all ranks agreed on
        self._end = 0  # of their gradients, in bytes
        self._bytes = -1  # file descriptor, -1 before the first write
        self._arrived: list[tuple[Any, int | None]] | None = None  # of a step: (parameter, offset)
        self.over = False

    def watch(self, pairs: Iterable[Any]) -> Iterable[Any]:
        """Return the pairs of a loss unchanged; each gradient is written before anybody else sees it."""
        self._arrived = []
        if self._bytes < 0:
            try:  # make this rank's file, or leave a note if another optimizer has it
                self._bytes = os.open(self._place.with_suffix(".bytes"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                self._place.with_suffix(".others").touch()
                self.over = True
        return pairs if self.over or self._count % self._every else self._written(pairs, self._arrived)

    def keep(self, collector: GradientCollector, optimizer: Any) -> None:
        """Count what was watched as a step, since all ranks have agreed on it.  Raises OSError."""
        arrived, self._arrived = self._arrived, None
        if arrived is None or self.over:
            return
        if self._count % self._every == 0:
            offsets = {collector.identify(param)[0]: offset for param, offset in arrived}
            if self._count == 0:
                order = [[n, list(known.value.shape), str(known.value.dtype)] for n, known in collector.order.items()]
                self._say({"ranks": self._size, "optimizer": repr(optimizer), "order": order})
            self._say({"step": self._count, "at": [offsets.get(name) for name in collector.order]})
            self._end += sum(known.value.nbytes for n, known in collector.order.items() if offsets.get(n) is not None)
            self._left -= 1
        self._count += 1
        if not self._left:
            os.close(self._bytes)
            self.over = True

    def _written(self, pairs: Iterable[Any], arrived: list[tuple[Any, int | None]]) -> Iterator[Any]:
        """Yield the pairs, and write their gradients; malformed pairs are left to the collector to refuse."""
        offset = self._end
        for pair in pairs:
            if isinstance(pair, tuple | list) and len(pair) == 2:
                param, grad = pair
                data = _data(grad)
                arrived.append((param, None if data is None else offset))
                while data:
                    count = os.pwrite(self._bytes, data, offset)
                    data, offset = data[count:], offset + count
            yield pair

    def _say(self, entry: dict[str, Any]) -> None:
        """Append a line of JSON, which is in the file when this returns, whatever becomes of the process."""
        with self._place.with_suffix(".steps").open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _data(grad: Any) -> memoryview | None:
    """Return the bytes of a gradient in C order; None for what is no gradient."""
    if not (device.is_array(grad) or isinstance(grad, np.generic)) or grad.dtype not in PARAMETERS:
        return None
    local = device.host_copy(device.contiguous(grad)) if device.on_gpu(grad) else np.ascontiguousarray(grad)
    return local.reshape(-1).view(np.uint8).data
