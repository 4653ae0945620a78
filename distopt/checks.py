"""Checks of what a user gives: numbers, flags and names; an error names the field, the value and the allowed range."""

import difflib
import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np


def check_int(name: str, value: Any, least: int) -> int:
    """Return ``value`` as an int; TypeError if it is none, as a bool is none, ValueError if it is below ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def as_float(name: str, value: Any) -> float:
    """Return ``value`` as a float, which may be infinite or NaN; TypeError for what is no number, as a bool is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a number that a float can hold, got one that is too large") from None


def check_number(name: str, value: Any) -> int | float:
    """Return an integer as an int, any other number as a float.  Raises as ``as_float``."""
    number = as_float(name, value)
    return int(value) if isinstance(value, Integral) else number


def check_float(name: str, value: Any, least: float = 0.0, most: float = math.inf) -> float:
    """Return a value as a finite float; TypeError for what is no number, ValueError outside of the range."""
    number = as_float(name, value)
    if not (least <= number <= most and math.isfinite(number)):
        raise ValueError(f"{name} must be finite and in [{least}, {most}], got {value}")
    return number


def check_positive(name: str, value: Any) -> float:
    """Return ``value`` as a finite float above 0.  Raises TypeError and ValueError as ``check_float``."""
    number = as_float(name, value)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be finite and above 0, got {value}")
    return number


def check_bound(name: str, value: Any) -> float:
    """Return ``value`` as a float above 0, infinity for no bound.  Raises TypeError and ValueError."""
    number = as_float(name, value)
    if not number > 0:
        raise ValueError(f"{name} must be above 0, got {value}")
    return number


def check_bool(name: str, value: Any) -> bool:
    """Return ``value``; raise TypeError if it is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_multipliers(name: str, value: Any) -> dict[str, float]:
    """Return numbers of at least 0 by parameter name, in the order of the names; {} for None."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(n, str) for n in value):
        raise TypeError(f"{name} must be numbers by parameter name, got {value!r}")
    return {n: check_float(f"{name} of {n}", value[n]) for n in sorted(value)}


def clip_limit(name: str, value: Any) -> float:
    """Return the magnitude at which to clip: infinity for None, infinity, and numbers that are not above 0."""
    limit = math.inf if value is None or value == math.inf else check_float(name, value, least=-math.inf)
    return limit if limit > 0 else math.inf


def check_callable(name: str, value: Any, arguments: str) -> Any:
    """Return ``value``, None or callable; raise TypeError, which names its ``arguments``, for anything else."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable with {arguments}, or None, got {value!r:.60}")
    return value


def suggest(name: object, known: Iterable[str], most: int = 1, least: float = 0.6) -> str:
    """Return '; did you mean ...?' with the known names that are closest; '' if none is close."""
    # least: how close a name must be, from 0, anything, to 1, the same (difflib).
    names = {n.lower(): n for n in known}
    near = [names[n] for n in difflib.get_close_matches(str(name).lower(), names, most, least)]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def check_one_of(what: str, name: str, known: Iterable[str]) -> str:
    """Return ``name``; raise ValueError, with all known names and the closest, if it is none of them."""
    names = list(known)
    if name not in names:
        raise ValueError(f"{what} must be one of {', '.join(names)}, got {name!r}{suggest(name, names)}")
    return name


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Return the text of an error for a name that is not known: all that are, and the closest."""
    names = sorted(known)
    return f"there is no {what} {name!r}: there are {', '.join(names) or 'none'}{suggest(name, names)}"
