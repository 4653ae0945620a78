"""Numbers that a user gives, looked at when they are given."""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np


def whole(name: str, given: Any, least: int) -> int:
    """``given`` as an int; TypeError or ValueError that names the field if it is not a whole number >= ``least``."""
    if isinstance(given, bool) or not isinstance(given, int | np.integer):
        raise TypeError(f"{name} must be an integer, got {given!r}")
    if given < least:
        raise ValueError(f"{name} must be at least {least}, got {given}")
    return int(given)


def real(name: str, given: Any) -> float:
    """``given`` as a float; TypeError or ValueError that names the field if it is no number, or too large for one."""
    if isinstance(given, bool) or not isinstance(given, Real):
        raise TypeError(f"{name} must be a number, got {given!r}")
    try:
        return float(given)
    except OverflowError:
        raise ValueError(f"{name} must be a number that a float can hold, got one that is too large") from None


def figure(name: str, given: Any) -> int | float:
    """``given`` as an int if it is whole by type, else as a float, infinite and NaN too.  Raises as ``real``."""
    value = real(name, given)
    return int(given) if isinstance(given, Integral) else value


def number(name: str, given: Any, least: float = 0.0, most: float = math.inf) -> float:
    """``given`` as a float.

    Raises TypeError for what is no number, ValueError for one outside [least, most] or not finite; both name the field.
    """
    value = real(name, given)
    if not (least <= value <= most and math.isfinite(value)):
        raise ValueError(f"{name} must be finite and in [{least}, {most}], got {given}")
    return value


def positive(name: str, given: Any) -> float:
    """The same for one above 0."""
    value = real(name, given)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be finite and above 0, got {given}")
    return value


def bound(name: str, given: Any) -> float:
    """``given`` as a float above 0, infinity for none; TypeError or ValueError that names the field for others."""
    value = real(name, given)
    if not value > 0:
        raise ValueError(f"{name} must be above 0, got {given}")
    return value


def flag(name: str, given: Any) -> bool:
    """``given`` itself; TypeError that names the field for what is neither True nor False."""
    if not isinstance(given, bool):
        raise TypeError(f"{name} must be True or False, got {given!r}")
    return given


def multipliers(name: str, given: Any) -> dict[str, float]:
    """Numbers of at least 0 by parameter name, in the names' order: ranks compare them.  None is none.

    Raises TypeError for what is no such mapping, ValueError for a number that is negative or not finite.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(n, str) for n in given):
        raise TypeError(f"{name} must have numbers by parameter name, got {given!r}")
    return {n: number(f"{name} of {n}", given[n]) for n in sorted(given)}


def limit(name: str, given: Any) -> float:
    """What magnitudes are held below: ``given``, or infinity for None, for what is not above 0, and for itself."""
    bound = math.inf if given is None or given == math.inf else number(name, given, least=-math.inf)
    return bound if bound > 0 else math.inf
