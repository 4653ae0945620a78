"""What a payload consists of: said by the compressors that make payloads, and counted by ledgers and forecasts."""

from collections.abc import Callable, Sequence
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


def total(parts: Sequence[PayloadBreakdown]) -> PayloadBreakdown:
    """Return the breakdown of payloads of several ranks together.

    Example:
        >>> total([PayloadBreakdown(8, 4), PayloadBreakdown(16)])
        PayloadBreakdown(values=24, indices=4, ideal=None, counts=None)
    """
    values, indices, ideals, counts = zip(*parts, strict=True)
    ideal, known = None if None in ideals else sum(ideals), all(x is not None for x in counts)
    return PayloadBreakdown(sum(values), sum(indices), ideal, np.sum(counts, axis=0) if known else None)


# It may be called after the payload's memory has been used again.
LazyBreakdown = Callable[[], PayloadBreakdown]
