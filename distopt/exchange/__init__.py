"""The one place where a compressor meets a communicator; one file per algorithm."""

from collections.abc import Callable

import numpy as np

from distopt.comm import Communicator
from distopt.compress import At, Compressor
from distopt.exchange.background import Background, Inline
from distopt.exchange.divergence import refuse_divergence
from distopt.exchange.gather import gather, gather_or_reduce
from distopt.exchange.mixed import mixed, mixed_or_reduce
from distopt.exchange.overlap import Overlap
from distopt.exchange.reduce import reduce
from distopt.exchange.refusal import Blind, Refusal, Seen
from distopt.exchange.room import Rooms
from distopt.exchange.shares import add_shares
from distopt.exchange.window import Window

Algorithm = Callable[[np.ndarray, Compressor, Communicator, dict[str, np.ndarray], At], None]


PROPERTIES = ("summable", "ragged", "lossless", "may_overflow", "stateful")
PROTOCOL = ("compress", "decompress", "payload_bytes", *PROPERTIES)


def choose(compressor: Compressor, break_even: bool = False) -> Algorithm:
    """The algorithm for a compressor's payloads: it replaces a flat array by the sum over ranks of what they carry.

    ``break_even``: never more wire bytes than dense (and 8 per bucket and rank).  Raises TypeError for what is no
    compressor.
    """
    lacks = [name for name in PROTOCOL if not hasattr(compressor, name)]
    if lacks:
        raise TypeError(f"{compressor!r} is no compressor: it lacks {', '.join(lacks)} (compress/compressor.py)")
    if compressor.summable:
        return reduce
    if hasattr(compressor, "whole"):
        return mixed_or_reduce if break_even else mixed
    return gather_or_reduce if break_even else gather


__all__ = [
    "Algorithm",
    "Background",
    "Blind",
    "Inline",
    "Overlap",
    "Refusal",
    "Rooms",
    "Seen",
    "Window",
    "add_shares",
    "choose",
    "gather",
    "reduce",
    "refuse_divergence",
]
