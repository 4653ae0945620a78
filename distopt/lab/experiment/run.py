"""Recording a run in a file."""

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

from distopt.checks import check_int, check_number
from distopt.comm.ledger import Report
from distopt.io import pending, strict_json
from distopt.lab.experiment import record
from distopt.lab.experiment.callbacks import checked
from distopt.version import __version__


class Experiment:
    """The record of one run, written when it ends; one rank keeps it, and ``read`` returns it.

    It is a context manager and a callback (``distopt.experiment``)::

        mine = Experiment("dgc.json", "dgc", seed=1, ranks=world.size, density=0.001) if world.rank == 0 else None
        with mine or contextlib.nullcontext():
            ...
            if mine:
                mine.log(step, loss=loss, wire=world.ledger.total_of_steps()["sent"])
            ...
            if mine:
                mine.finish(totals=world.report(), accuracy=accuracy)

    If the block raises, the record is written as it is, with the exception's name; if that fails, the exception gets a
    note that says why.

    Args:
        path: the file; it may hold an older record, which is replaced.
        mode: how gradients are exchanged; ``distopt compare`` takes the runs of one mode, number of ranks and settings
            for repetitions.
        seed: the seed of the run.
        ranks: the number of ranks.
        hosts: the number of hosts.
        settings: texts, numbers, flags, None, and lists and dicts of these; a tuple comes back as a list.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
        OSError: at once, if the file cannot be written, or holds something that is no record.

    Example:
        >>> import pathlib, tempfile
        >>> from distopt.experiment import Experiment, read
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     experiment = Experiment(pathlib.Path(folder) / "dgc.json", "dgc", seed=1, ranks=4, density=0.001)
        ...     experiment.log(1, loss=0.5)
        ...     experiment.finish(accuracy=0.9)
        ...     record = read(experiment.path)
        >>> record["settings"], record["results"]
        ({'density': 0.001}, {'accuracy': 0.9})
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
        pending.check_replaceable(self.path, "record", record.read)
        pending.Pending(self.path).discard()  # an unwritable path fails now, not after hours
        self._began, self._finished = _now(), False
        self._about = {
            "mode": strict_json.plain("mode", mode),
            "seed": strict_json.plain("seed", None if seed is None else check_int("seed", seed, 0)),
            "settings": strict_json.plain("settings", settings),
            "topology": {
                "ranks": None if ranks is None else check_int("ranks", ranks, 1),
                "hosts": None if hosts is None else check_int("hosts", hosts, 1),
            },
        }
        self._curves: dict[str, dict[str, list[Any]]] = {}

    def log(self, step: int, /, **numbers: float) -> None:
        """Append a point to each of the curves that are named.

        Args:
            step: the number of updates done so far.
            numbers: a value by the name of its curve.  ``payload`` and ``wire`` are bytes since the start: ``payload``
                and ``sent`` of ``Ledger.total_of_steps()``.

        Raises:
            ValueError: a curve has passed this step already, or bytes fall; nothing is logged then.
            RuntimeError: the experiment is finished.
        """
        self(step, numbers)

    def __call__(self, step: int, numbers: Mapping[str, float], /) -> None:
        """Log numbers whose names are no Python identifiers: ``run(step, {"loss/test": 0.5})``."""
        self._check_not_finished()
        points = checked(step, numbers)
        at = strict_json.plain("step", points.pop("step"))
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
        """Write the record, all or nothing.

        Args:
            totals: the result of ``report()`` of a ``Metered`` or a ``Simulation``: calls and bytes, in a line for each
                verb of steps, and in lines of their own for what was sent outside of steps.  It also knows from which
                step on they are counted, in a run that went on from a checkpoint.
            steps: the number of updates done; by default the last step that was logged.
            results: final numbers by name: accuracy, loss.

        Raises:
            RuntimeError: the experiment is finished already.
            FileExistsError: something that is no record has come to its place; it stays, and the record is beside it.
            OSError: the file cannot be written.
        """
        self._check_not_finished()
        last = self._last_step()
        done = last if steps is None else strict_json.plain("steps", check_int("steps", steps, last))
        counted_from = None  # steps that were made before the first one that totals have bytes of, if they tell
        if isinstance(totals, Report) and totals.steps is not None:
            first, last = totals.steps
            counted_from = round(done * (first - 1) / last)  # a script may count steps in another unit, as in epochs
        outcome = {
            "steps": done,
            "counted_from": counted_from,
            "totals": None if totals is None else _counts(totals),
            "results": {name: check_number(name, value) for name, value in results.items()},
        }
        self._write(outcome, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not self._finished:
            try:
                steps = self._last_step()
                self._write({"steps": steps, "counted_from": None, "totals": None, "results": {}}, kind.__name__)
            except OSError as failed:  # the block's exception matters more
                if error:
                    error.add_note(f"and the record was not written: {failed}")
        elif not self._finished:
            self.finish()

    def _write(self, outcome: dict[str, Any], raised: str | None) -> None:
        times = {"started": self._began, "ended": _now(), "raised": raised}
        mpi = sys.modules.get("mpi4py.MPI")  # only looked up: importing it would start MPI
        vendor, version = mpi.get_vendor() if mpi else (None, ())
        versions = {"distopt": __version__, "python": platform.python_version(), "numpy": np.__version__}
        about = {
            "versions": versions | {"mpi": mpi and f"{vendor} {'.'.join(map(str, version))}"},
            "machine": {"cores": len(os.sched_getaffinity(0)), "platform": platform.platform()},
        }
        try:
            record.write(self.path, self._about | times | about | outcome | {"curves": self._curves})
        except FileExistsError:  # the record is beside, and is not written again
            self._finished = True
            raise
        self._finished = True

    def _last_step(self) -> int:
        return max((curve["steps"][-1] for curve in self._curves.values()), default=0)

    def _check_not_finished(self) -> None:
        if self._finished:
            raise RuntimeError(f"this experiment is finished: {self.path} is written")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _counts(totals: Mapping[str, Any]) -> Any:
    """Return a copy of totals; raise TypeError or ValueError that names what is no whole number of at least 0."""
    if not isinstance(totals, Mapping):
        raise TypeError(f"totals must be counts by name, got {totals!r:.60}")
    counts = strict_json.plain("totals", totals)
    _check_counts("totals", counts)
    return counts


def _check_counts(name: str, counts: Any) -> None:
    if isinstance(counts, dict):
        for key, value in counts.items():
            _check_counts(f"{name}.{key}", value)
    else:
        check_int(name, counts, 0)
