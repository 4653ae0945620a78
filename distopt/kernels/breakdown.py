"""What a payload consists of: said by the compressors that make payloads, and counted by ledgers and forecasts."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class PayloadBreakdown(NamedTuple):
    """Breakdown of a payload into values and indices; its other bytes are headers and scales.

    Attributes:
        values: bytes of values.
        indices: bytes of indices.
        ideal: information in the payload, in bits: the logarithm of the number of ways to choose so many entries, plus
            the bits of the values.  For codes of one or two bits it is an estimate, from 2048 bytes of them.  None: the
            bits of the payload.
        counts: number of entries of each member of the bucket, ``(members,)``; None if all of them are sent.
    """

    values: int
    indices: int = 0
    ideal: int | None = None
    counts: np.ndarray | None = None


LazyBreakdown = Callable[[], PayloadBreakdown]  # callable after the payload's memory has been used again
