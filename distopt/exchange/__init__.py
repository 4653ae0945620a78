"""The one place where a compressor meets a communicator; one file per algorithm."""

from distopt.compress import Compressor
from distopt.exchange.background import Background, Inline
from distopt.exchange.divergence import refuse_divergence
from distopt.exchange.gather import gather, gather_or_reduce
from distopt.exchange.mixed import mixed, mixed_or_reduce
from distopt.exchange.observer import Callback, Observer
from distopt.exchange.overlap import Overlap
from distopt.exchange.probe import Algorithm
from distopt.exchange.quality import Quality
from distopt.exchange.reduce import reduce, reduce_each
from distopt.exchange.refusal import Blind, Refusal, Seen
from distopt.exchange.room import Rooms
from distopt.exchange.shares import add_halves, add_shares
from distopt.exchange.window import Window

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
    "Callback",
    "Inline",
    "Observer",
    "Overlap",
    "Quality",
    "Refusal",
    "Rooms",
    "Seen",
    "Window",
    "add_halves",
    "add_shares",
    "choose",
    "gather",
    "reduce",
    "reduce_each",
    "refuse_divergence",
]
