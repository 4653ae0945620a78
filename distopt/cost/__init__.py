"""Bytes and seconds by formula: what a collective sends, and how long that takes on a link."""

from distopt.cost.wire import (
    DIRECT,
    RING,
    Algorithm,
    Moved,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
    shares,
)

__all__ = [
    "DIRECT",
    "RING",
    "Algorithm",
    "Moved",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce_scatter",
    "shares",
]
