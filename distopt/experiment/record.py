"""Write and read the record of a run."""

import datetime
import itertools
import os
import warnings
from collections.abc import Callable
from typing import Any

from distopt import files, plain
from distopt.checkpoint import pending
from distopt.version import __version__

FAMILY = "distopt experiment"
FORMAT = f"{FAMILY} 1"
COUNTS = "payload", "wire"  # curves of bytes since the start


def write(path: str | os.PathLike[str], record: dict[str, Any]) -> None:
    """Write plain values, whole or not at all, one line per field; the umask says who may read it.

    Raises OSError; FileExistsError if something that is no record has come to its place, and the record is beside it.
    """
    lines = (f" {plain.dumps(name)}: {plain.dumps(value)}" for name, value in ({"format": FORMAT} | record).items())
    text = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    pending.prepare(path, text, 0o666).commit_as("record", read)
    if not plain.readable(text):
        warnings.warn(f"{path} is too large to be read again: log fewer points", RuntimeWarning, stacklevel=2)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a record: ``mode seed settings topology started ended raised versions machine steps totals results curves``.

    A curve is ``{"steps": [...], "values": [...]}``.  Raises OSError for a file that cannot be read, and ValueError
    that names file and field for one that is no such record, is cut off, or of another version of the format.
    """
    try:
        found: Any = plain.loads(files.read(path, plain.MOST))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no experiment's record: {error}") from None
    said = found.get("format") if isinstance(found, dict) else None
    if not isinstance(said, str) or not said.startswith(FAMILY):
        raise ValueError(f"{path} is no experiment's record: format must be {FORMAT!r}, got {said!r:.60}")
    if said != FORMAT:
        raise ValueError(f"{path}: format must be {FORMAT!r}, the one that distopt {__version__} reads, got {said!r}")
    for name, (right, what) in FIELDS.items():
        if name not in found or not right(found[name]):
            raise ValueError(f"{path}: {name} must be {what}, got {found.get(name)!r:.60}")
    for name, curve in found["curves"].items():
        if curve["steps"][-1] > found["steps"]:
            last = f"{curve['steps'][-1]}, the last of curve {name!r}"
            raise ValueError(f"{path}: steps must be at least {last}, got {found['steps']}")
    return dict(found)


def _is_whole(x: Any, least: int = 0) -> bool:
    return type(x) is int and least <= x <= plain.LARGEST


def _is_number(x: Any) -> bool:
    return type(x) is float or (type(x) is int and abs(x) <= plain.LARGEST)


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
    "totals": (lambda x: x is None or (isinstance(x, dict) and _are_counts(x)), "counts by name, or null"),
    "results": (lambda x: isinstance(x, dict) and all(map(_is_number, x.values())), "numbers by name"),
    "curves": (
        lambda x: isinstance(x, dict) and all(_is_curve(name, curve) for name, curve in x.items()),
        "points by name: as many steps, growing, as values; bytes since the start never fall",
    ),
}
