"""Callbacks for the numbers of a running training: files, Prometheus, TensorBoard, Weights & Biases, or a user's own.

A callback is anything that can be called with a step and the numbers of that step, by name; an ``Experiment`` is one
too.  All ranks have the same sums, so one rank writes::

    callbacks = [CsvFile("run.csv"), TensorBoard(SummaryWriter())] if world.rank == 0 else []
    ...
    for callback in callbacks:
        callback(step, {"loss": loss, "accuracy": accuracy})
"""

import csv
import os
import re
from collections.abc import Mapping
from typing import Any, Protocol

from distopt.checks import check_int, check_number
from distopt.comm import Metered
from distopt.io import pending, strict_json

__all__ = ["Callback", "CsvFile", "JsonLines", "Prometheus", "TensorBoard", "WeightsAndBiases", "totals"]


class Callback(Protocol):
    """The protocol of a callback; it may also have a ``close()``, to be called at the end.

    Example:
        >>> from distopt.experiment import Callback
        >>> def show(step: int, numbers) -> None:
        ...     print(step, *(f"{name}={number:g}" for name, number in numbers.items()))
        >>> callback: Callback = show
        >>> callback(10, {"loss": 0.25})
        10 loss=0.25
    """

    def __call__(self, step: int, numbers: Mapping[str, float], /) -> None:
        """Take the numbers of a step.

        Args:
            step: the number of updates done so far.
            numbers: losses, accuracies, bytes by name.
        """


def checked(step: int, numbers: Mapping[str, float]) -> dict[str, int | float]:
    """Return a call's arguments in one dict, the step first; raise TypeError or ValueError that names what is wrong."""
    if not isinstance(numbers, Mapping) or not all(isinstance(name, str) for name in numbers):
        raise TypeError(f"names of numbers must be texts, got {numbers!r:.60}")
    if "step" in numbers:
        raise ValueError("names of numbers must be other than 'step', the call's first argument, got 'step'")
    return {"step": check_int("step", step, 0)} | {name: check_number(name, x) for name, x in numbers.items()}


class _FileCallback:
    """A callback that writes text to a file, which it opens anew."""

    newline: str | None = None  # as ``open`` takes it

    def __init__(self, path: str | os.PathLike[str]):
        self._file = open(path, "w", newline=self.newline, encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CsvFile(_FileCallback):
    """A callback that writes one line per call to a CSV file; what the file held before is lost.

    The first call that has numbers names the columns, after ``step``; calls without numbers before it write nothing.  A
    number that a later call lacks is an empty cell.  Each line is in the file when the call returns.

    Raises:
        OSError: at once, if the file cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> from distopt.experiment import CsvFile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "run.csv"
        ...     callback = CsvFile(path)
        ...     callback(1, {"loss": 0.5})
        ...     callback(2, {"loss": 0.25})
        ...     callback.close()
        ...     print(path.read_text().split())
        ['step,loss', '1,0.5', '2,0.25']
    """

    newline = ""

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        self._lines, self._columns = csv.writer(self._file, lineterminator="\n"), list[str]()

    def __call__(self, step: int, numbers: Mapping[str, float], /) -> None:
        """Write a line; raise ValueError, and write nothing, if there are numbers that are no columns."""
        cells = checked(step, numbers)
        if not numbers and not self._columns:
            return
        if not self._columns:
            self._columns = list(cells)
            self._lines.writerow(self._columns)
        unknown = sorted(cells.keys() - set(self._columns))
        if unknown:
            raise ValueError(
                f"names must be among the first call's columns {', '.join(self._columns)}, got {', '.join(unknown)}"
            )
        self._lines.writerow([cells.get(column, "") for column in self._columns])
        self._file.flush()


class JsonLines(_FileCallback):
    """A callback that writes one JSON object per line and call, with ``step``; what the file held before is lost.

    NaN and infinity become the strings "NaN", "Infinity" and "-Infinity".  Each line is in the file when the call
    returns.

    Raises:
        OSError: at once, if the file cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> from distopt.experiment import JsonLines
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "run.jsonl"
        ...     callback = JsonLines(path)
        ...     callback(1, {"loss": 0.5})
        ...     callback.close()
        ...     print(path.read_text().strip())
        {"step": 1, "loss": 0.5}
    """

    def __call__(self, step: int, numbers: Mapping[str, float], /) -> None:
        self._file.write(strict_json.dumps(checked(step, numbers)) + "\n")
        self._file.flush()


class Prometheus:
    """A callback that writes the last numbers to a file for Prometheus: each a gauge, ``step`` too.

    The file is in the text format of Prometheus, as node exporter's textfile collector reads it from files ``*.prom``
    in a folder, so that no port is opened.  It is whole at any time; each call replaces it, and everybody may read it.

    Args:
        path: the file.
        labels: texts by name, the same at each call, such as the job and the rank.

    Raises:
        TypeError: a label is no text.
        ValueError: at a call, if two numbers have the same name in Prometheus, where a character other than a letter,
            a digit or an underscore is an underscore.
        OSError: at a call, if the file cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> from distopt.monitor import Prometheus
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "rank0.prom"
        ...     Prometheus(path, rank="0")(10, {"loss": 0.25})
        ...     print(path.read_text(), end="")
        # TYPE distopt_step gauge
        distopt_step{rank="0"} 10
        # TYPE distopt_loss gauge
        distopt_loss{rank="0"} 0.25
    """

    def __init__(self, path: str | os.PathLike[str], **labels: str):
        for name, label in labels.items():
            if not isinstance(label, str):
                raise TypeError(f"label {name} must be a text, got {label!r:.60}")
        escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
        pairs = ",".join(f'{name}="{label.translate(escapes)}"' for name, label in labels.items())
        self._path, self._labels = path, f"{{{pairs}}}" if pairs else ""

    def __call__(self, step: int, numbers: Mapping[str, float], /) -> None:
        lines = dict[str, str]()
        for name, number in checked(step, numbers).items():
            gauge = "distopt_" + re.sub("[^a-zA-Z0-9_]", "_", name)
            if gauge in lines:
                raise ValueError(f"names of numbers must differ in letters and digits, got {name!r} twice as {gauge}")
            lines[gauge] = f"# TYPE {gauge} gauge\n{gauge}{self._labels} {number}\n"
        pending.prepare(self._path, "".join(lines.values()).encode(), mode=0o644, durable=False).commit()


def totals(opt: Any) -> dict[str, int]:
    """Return what a training has counted so far, as numbers for a callback.

    Args:
        opt: a ``DistOpt``, a ``Trainer``, a ``LocalSteps``, or what ``distopt.torch`` has returned.

    Returns:
        ``updates``; ``skipped``, calls that were dropped as they were not finite; ``ranks``; ``lost``, ranks that this
        one has seen lost in an elastic job; and with a ``Metered`` communicator, of all steps, ``payload`` and
        ``wire``, the bytes that this rank has handed over and sent.

    Example:
        >>> import distopt
        >>> from distopt.monitor import totals
        >>> opt = distopt.DistOpt(communicator=distopt.comm.Metered(distopt.comm.LocalCommunicator()))
        >>> totals(opt)
        {'updates': 0, 'skipped': 0, 'ranks': 1, 'lost': 0, 'payload': 0, 'wire': 0}
    """
    comm, found = opt.communicator, {"updates": opt.step_counter, "skipped": getattr(opt, "skipped", 0)}
    found |= {"ranks": comm.ranks.size, "lost": comm.membership.losses if comm.membership else 0}
    if isinstance(comm, Metered):
        sums = comm.ledger.total_of_steps()
        found |= {"payload": sums["payload"], "wire": sums["sent"]}
    return found


class TensorBoard:
    """A callback for a ``SummaryWriter``, or any object with ``add_scalar(name, number, step)``.

    Raises:
        TypeError: the writer has no such method.

    Example:
        >>> from distopt.experiment import TensorBoard
        >>> class Writer:
        ...     def add_scalar(self, name, number, step):
        ...         print(name, number, step)
        >>> TensorBoard(Writer())(10, {"loss": 0.25})
        loss 0.25 10
    """

    def __init__(self, writer: Any):
        self._add_scalar = _method("writer", writer, "add_scalar")

    def __call__(self, step: int, numbers: Mapping[str, float], /) -> None:
        points = checked(step, numbers)
        at = points.pop("step")
        for name, number in points.items():
            self._add_scalar(name, number, at)


class WeightsAndBiases:
    """A callback for a run of ``wandb.init()``, or any object with ``log(numbers, step=step)``.

    Raises:
        TypeError: the run has no such method.

    Example:
        >>> from distopt.experiment import WeightsAndBiases
        >>> class Run:
        ...     def log(self, numbers, step):
        ...         print(numbers, step)
        >>> WeightsAndBiases(Run())(10, {"loss": 0.25})
        {'loss': 0.25} 10
    """

    def __init__(self, run: Any):
        self._log = _method("run", run, "log")

    def __call__(self, step: int, numbers: Mapping[str, float], /) -> None:
        points = checked(step, numbers)
        at = points.pop("step")
        self._log(points, step=at)


def _method(name: str, owner: Any, method: str) -> Any:
    bound = getattr(owner, method, None)
    if not callable(bound):
        raise TypeError(f"{name} must be an object with the method {method}, got {owner!r:.60}")
    return bound
