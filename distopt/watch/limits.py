"""How long an operation may take."""

import math
import os
from collections.abc import Mapping
from typing import NamedTuple

VARIABLE = "DISTOPT_TIMEOUT"


class Limits(NamedTuple):
    """Seconds for an operation, and for one before this process has done its first step."""

    usual: float = 300.0
    first: float = 1800.0  # ranks compile, and load data, at different speed


def limits(environ: Mapping[str, str] = os.environ) -> Limits | None:
    """What DISTOPT_TIMEOUT says, one number of seconds for all; None if it is 0 or 'never'.

    Raises ValueError for anything else.
    """
    given = environ.get(VARIABLE, "").strip()
    if not given:
        return Limits()
    if given == "never":
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{VARIABLE} must be a number of seconds, 0 or 'never', got {given!r}")
    return Limits(seconds, seconds) if seconds else None
