"""What a payload consists of: said by the compressors that make payloads, and counted by ledgers and forecasts."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class PayloadBreakdown(NamedTuple):
    """Breakdown of a payload into values and indices; its other bytes are headers and scales."""

    values: int  # bytes
    indices: int = 0  # bytes
    # Information in the payload, in bits: the logarithm of the number of ways to choose so many entries, plus the bits
    # of the values.  For codes of one or two bits it is an estimate, from 2048 bytes of them.  None: all bits.
    ideal: int | None = None
    # Entries of each member of the bucket, ``(members,)``; None if all of them are sent.
    counts: np.ndarray | None = None


# It may be called after the payload's memory has been used again.
LazyBreakdown = Callable[[], PayloadBreakdown]
