"""The time that an operation may take."""

import math
import os
from collections.abc import Mapping
from typing import NamedTuple

VARIABLE = "DISTOPT_TIMEOUT"


class Limits(NamedTuple):
    """The time limits of operations, in seconds."""

    usual: float = 300.0
    # the limit before this process has done its first step, since ranks compile and load data at different speeds
    first: float = 1800.0  # ranks compile, and load data, at different speed


def limits(environ: Mapping[str, str] = os.environ) -> Limits | None:
    """The limits that ``DISTOPT_TIMEOUT`` sets: one number of seconds for all; None if it is 0 or 'never'."""
    setting = environ.get(VARIABLE, "").strip()
    if not setting:
        return Limits()
    if setting == "never":
        return None
    try:
        seconds = float(setting)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{VARIABLE} must be a number of seconds, 0 or 'never', got {setting!r}")
    return Limits(seconds, seconds) if seconds else None
