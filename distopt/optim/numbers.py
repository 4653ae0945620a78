"""Numbers that a user gives, looked at when they are given."""

import math
from numbers import Real
from typing import Any


def number(name: str, given: Any, least: float = 0.0, most: float = math.inf) -> float:
    """``given`` as a float.

    Raises TypeError for what is no number, ValueError for one outside [least, most] or not finite; both name the field.
    """
    value = _real(name, given)
    if not (least <= value <= most and math.isfinite(value)):
        raise ValueError(f"{name} must be finite and in [{least}, {most}], got {given}")
    return value


def positive(name: str, given: Any) -> float:
    """The same for one above 0."""
    value = _real(name, given)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be finite and above 0, got {given}")
    return value


def _real(name: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, Real):
        raise TypeError(f"{name} must be a number, got {given!r}")
    return float(given)
