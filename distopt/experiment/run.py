"""Record a run in a file."""

import datetime
import math
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from distopt import plain
from distopt.checkpoint import pending
from distopt.experiment import record
from distopt.monitor.callback import checked
from distopt.numbers import figure, whole
from distopt.version import __version__


class Experiment:
    """The record of one run, written when it ends; one rank has one, and ``read`` gives it back.

    It is a context manager and a callback (``distopt.monitor``)::

        mine = Experiment("dgc.json", "dgc", seed=1, ranks=world.size, density=0.001) if world.rank == 0 else None
        with mine or contextlib.nullcontext():
            ...
            if mine:
                mine.log(step, loss=loss, wire=world.ledger.total_of_steps()["sent"])
            ...
            if mine:
                mine.finish(totals=world.report(), accuracy=accuracy)

    ``mode`` is how gradients are exchanged: ``distopt compare`` takes the runs of one mode, number of ranks and
    settings for repetitions.  ``settings`` are texts, numbers, flags, None, and lists and dicts of these; a tuple
    comes back as a list.  If the block raises, what there is gets written, with the exception's name, or the exception
    gets a note that says why not.
    Raises TypeError or ValueError for a wrong argument, OSError at once if the file cannot be written, or if it is
    there and is no record.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: str,
        seed: int | None = None,
        *,
        ranks: int | None = None,
        hosts: int | None = None,
        **settings: Any,
    ):
        if not isinstance(mode, str):
            raise TypeError(f"mode must be a text, got {mode!r:.60}")
        if not mode:
            raise ValueError("mode must not be empty")
        self.path = Path(path)
        pending.check_place(self.path, "record", record.read)
        pending.Pending(self.path).discard()  # what cannot be written fails now, and not after hours
        self._began, self._finished = _now(), False
        self._about = {
            "mode": plain.plain("mode", mode),
            "seed": plain.plain("seed", None if seed is None else whole("seed", seed, 0)),
            "settings": plain.plain("settings", settings),
            "topology": {
                "ranks": None if ranks is None else whole("ranks", ranks, 1),
                "hosts": None if hosts is None else whole("hosts", hosts, 1),
            },
        }
        self._curves: dict[str, dict[str, list[Any]]] = {}

    def log(self, step: int, /, **numbers: float) -> None:
        """Append a point to each of the curves that are named; ``step`` is the number of updates done so far.

        ``payload`` and ``wire`` are bytes since the start: ``payload`` and ``sent`` of ``Ledger.total_of_steps()``.
        Raises ValueError for a step that a curve has already passed and for bytes that fall, RuntimeError after
        ``finish``; nothing is logged then.
        """
        self(step, numbers)

    def __call__(self, step: int, numbers: Mapping[str, float], /) -> None:
        """Log numbers whose names are no Python words: ``run(step, {"loss/test": 0.5})``."""
        self._must_go_on()
        points = checked(step, numbers)
        at = plain.plain("step", points.pop("step"))
        for name, value in points.items():
            curve = self._curves.get(name)
            if curve and at <= curve["steps"][-1]:
                raise ValueError(f"step must be above {curve['steps'][-1]}, the last of curve {name!r}, got {at}")
            if name in record.COUNTS and not (curve["values"][-1] if curve else 0) <= value < math.inf:
                raise ValueError(f"{name} must be the bytes since the start, which never fall, got {value}")
        for name, value in points.items():
            curve = self._curves.setdefault(name, {"steps": [], "values": []})
            curve["steps"].append(at)
            curve["values"].append(value)

    def finish(self, totals: Mapping[str, Any] | None = None, steps: int | None = None, **results: float) -> None:
        """Write the record, whole or not at all.

        ``totals`` is what ``report()`` of a ``Metered`` or a ``Simulation`` returns: calls and bytes, in a line for
        each verb of steps, and in lines of their own what was sent outside of them.  ``steps`` are the updates done, by
        default the last step that was logged.  ``results`` are final numbers: accuracy, loss.  Raises OSError, and
        RuntimeError the second time.  Something that is no record and has come to its place meanwhile stays there; the
        record is beside it then, and FileExistsError says where.
        """
        self._must_go_on()
        done = self._last_step()
        found = {
            "steps": done if steps is None else plain.plain("steps", whole("steps", steps, done)),
            "totals": None if totals is None else _counts(totals),
            "results": {name: figure(name, value) for name, value in results.items()},
        }
        self._write(found, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not self._finished:
            try:
                self._write({"steps": self._last_step(), "totals": None, "results": {}}, kind.__name__)
            except OSError as failed:  # what was raised is worth more
                if error:
                    error.add_note(f"and the record was not written: {failed}")
        elif not self._finished:
            self.finish()

    def _write(self, found: dict[str, Any], raised: str | None) -> None:
        times = {"started": self._began, "ended": _now(), "raised": raised}
        try:
            record.write(self.path, self._about | times | _surroundings() | found | {"curves": self._curves})
        except FileExistsError:  # it is beside, once
            self._finished = True
            raise
        self._finished = True

    def _last_step(self) -> int:
        return max((curve["steps"][-1] for curve in self._curves.values()), default=0)

    def _must_go_on(self) -> None:
        if self._finished:
            raise RuntimeError(f"this experiment is finished: {self.path} is written")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _surroundings() -> dict[str, Any]:
    mpi = sys.modules.get("mpi4py.MPI")  # a run without it does not start it
    vendor, version = mpi.get_vendor() if mpi else (None, ())
    versions = {"distopt": __version__, "python": platform.python_version(), "numpy": np.__version__}
    cores = len(os.sched_getaffinity(0))
    return {
        "versions": versions | {"mpi": mpi and f"{vendor} {'.'.join(map(str, version))}"},
        "machine": {"cores": cores, "platform": platform.platform()},
    }


def _counts(totals: Mapping[str, Any]) -> Any:
    """A copy of totals; TypeError or ValueError that names what is no whole number of at least 0."""
    if not isinstance(totals, Mapping):
        raise TypeError(f"totals must have counts by name, got {totals!r:.60}")
    found = plain.plain("totals", totals)
    _check_counts("totals", found)
    return found


def _check_counts(name: str, given: Any) -> None:
    if isinstance(given, dict):
        for key, value in given.items():
            _check_counts(f"{name}.{key}", value)
    else:
        whole(name, given, 0)
