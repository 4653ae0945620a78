"""Writing and reading the record of a run."""

import datetime
import itertools
import os
import warnings
from collections.abc import Callable
from typing import Any

from distopt.io import files, pending, strict_json
from distopt.version import __version__

FAMILY = "distopt experiment"
FORMAT = f"{FAMILY} 1"
COUNTS = "payload", "wire"  # curves of bytes since the start


def write(path: str | os.PathLike[str], record: dict[str, Any]) -> None:
    """Write a record of plain values, one line per field, all or nothing; the umask says who may read it."""
    lines = (
        f" {strict_json.dumps(name)}: {strict_json.dumps(value)}"
        for name, value in ({"format": FORMAT} | record).items()
    )
    text = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    pending.prepare(path, text, 0o666).commit_as("record", read)
    if not strict_json.readable(text):
        warnings.warn(f"{path} is too large to be read again: log fewer points", RuntimeWarning, stacklevel=2)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a record: ``mode seed settings topology started ended raised versions machine steps totals results curves``.

    A curve is ``{"steps": [...], "values": [...]}``.  There is also ``counted_from``, the number of steps after which
    bytes are counted: 0, or more in a run that went on from a checkpoint; None if that is unknown.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no record, is cut off, or has another version of the format; the text names file and field.

    Example:
        >>> import pathlib, tempfile
        >>> from distopt.experiment import Experiment, read
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "dense.json"
        ...     with Experiment(path, "dense", ranks=1) as experiment:
        ...         experiment.log(1, loss=0.5)
        ...         experiment.log(2, loss=0.25)
        ...     print(read(path)["curves"]["loss"])
        {'steps': [1, 2], 'values': [0.5, 0.25]}
    """
    try:
        record: Any = strict_json.loads(files.read(path, strict_json.MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no experiment's record: {error}") from None
    label = record.get("format") if isinstance(record, dict) else None
    if not isinstance(label, str) or not label.startswith(FAMILY):
        raise ValueError(f"{path} is no experiment's record: format must be {FORMAT!r}, got {label!r:.60}")
    if label != FORMAT:
        raise ValueError(f"{path}: format must be {FORMAT!r}, the one that distopt {__version__} reads, got {label!r}")
    record.setdefault("counted_from", None)  # which older records do not have
    for name, (right, what) in FIELDS.items():
        if name not in record or not right(record[name]):
            raise ValueError(f"{path}: {name} must be {what}, got {record.get(name)!r:.60}")
    if (record["counted_from"] or 0) > record["steps"]:
        raise ValueError(f"{path}: counted_from must be at most steps {record['steps']}, got {record['counted_from']}")
    for name, curve in record["curves"].items():
        if curve["steps"][-1] > record["steps"]:
            last = f"{curve['steps'][-1]}, the last of curve {name!r}"
            raise ValueError(f"{path}: steps must be at least {last}, got {record['steps']}")
    return dict(record)


def _is_whole(x: Any, least: int = 0) -> bool:
    return type(x) is int and least <= x <= strict_json.MAX_NUMBER


def _is_number(x: Any) -> bool:
    return type(x) is float or (type(x) is int and abs(x) <= strict_json.MAX_NUMBER)


def _is_time(x: Any) -> bool:
    try:
        return datetime.datetime.fromisoformat(x).utcoffset() == datetime.timedelta()
    except (TypeError, ValueError):
        return False


def _are_counts(x: Any) -> bool:
    return all(map(_are_counts, x.values())) if isinstance(x, dict) else _is_whole(x)


def _is_topology(x: Any) -> bool:
    return isinstance(x, dict) and all(n in x and (x[n] is None or _is_whole(x[n], 1)) for n in ("ranks", "hosts"))


def _is_curve(name: str, x: Any) -> bool:
    if not isinstance(x, dict) or not all(isinstance(x.get(part), list) for part in ("steps", "values")):
        return False
    steps, values = x["steps"], x["values"]
    fitting = 0 < len(steps) == len(values) and all(map(_is_whole, steps)) and all(map(_is_number, values))
    return fitting and _grows(steps, 1) and (name not in COUNTS or (values[0] >= 0 and _grows(values, 0)))


def _grows(numbers: list[Any], least: int) -> bool:
    return all(b - a >= least for a, b in itertools.pairwise(numbers))


Right = Callable[[Any], bool]
FIELDS: dict[str, tuple[Right, str]] = {
    "mode": (lambda x: isinstance(x, str) and x != "", "a text that is not empty"),
    "seed": (lambda x: x is None or _is_whole(x), "a whole number or null"),
    "settings": (lambda x: isinstance(x, dict), "an object"),
    "topology": (_is_topology, "an object with ranks and hosts, whole numbers above 0 or null"),
    "started": (_is_time, "a time in UTC"),
    "ended": (_is_time, "a time in UTC"),
    "raised": (lambda x: x is None or isinstance(x, str), "an exception's name or null"),
    "versions": (lambda x: isinstance(x, dict), "an object"),
    "machine": (lambda x: isinstance(x, dict), "an object"),
    "steps": (_is_whole, "a whole number"),
    "counted_from": (lambda x: x is None or _is_whole(x), "a whole number or null"),
    "totals": (lambda x: x is None or (isinstance(x, dict) and _are_counts(x)), "counts by name, or null"),
    "results": (lambda x: isinstance(x, dict) and all(map(_is_number, x.values())), "numbers by name"),
    "curves": (
        lambda x: isinstance(x, dict) and all(_is_curve(name, curve) for name, curve in x.items()),
        "points by name: as many steps, growing, as values; bytes since the start never fall",
    ),
}
