"""The one place where a compressor meets a communicator; one file per algorithm."""

from collections.abc import Callable
from functools import partial

import numpy as np

from distopt.comm import Communicator
from distopt.comm.message import MessageTag
from distopt.compress import Compressor, ExchangeContext
from distopt.compress.base import check_compressor
from distopt.compress.state import State
from distopt.exchange.all_gather import gather, gather_program
from distopt.exchange.all_reduce import TravellingBucket, reduce, reduce_program
from distopt.exchange.choice import EXCHANGES, TwoPhase, two_phases
from distopt.exchange.program import Exchange
from distopt.exchange.shared_memory import reduce_everywhere, reduce_half_shards, reduce_shards

Algorithm = Callable[[np.ndarray, Compressor, Communicator, State, ExchangeContext, MessageTag], None]


def choose(compressor: Compressor, break_even: bool = False) -> Algorithm:
    """Choose the algorithm that replaces a flat array by the sum over ranks of what a compressor sends of it.

    Args:
        compressor: whose properties decide.
        break_even: send no more bytes than dense (and 8 per bucket and rank).

    Raises:
        TypeError: for an object that is no compressor.

    Example:
        >>> from distopt.compress import Dense, TopK
        >>> choose(Dense()).__name__, choose(TopK(0.1)).__name__
        ('reduce', 'gather')
    """
    check_compressor(compressor)
    if compressor.traits.summable:
        return reduce
    return partial(gather, break_even=True) if break_even else gather


def program_of(bucket: TravellingBucket, compressor: Compressor, break_even: bool = False) -> Exchange:
    """Return what one rank does in the algorithm that ``choose`` returns."""
    x, state, context, tag = bucket
    if compressor.traits.summable:
        return reduce_program(x, compressor, state, context)
    return gather_program(x, compressor, state, context, tag, break_even)


__all__ = [
    "EXCHANGES",
    "Algorithm",
    "TwoPhase",
    "choose",
    "gather",
    "program_of",
    "reduce",
    "reduce_everywhere",
    "reduce_half_shards",
    "reduce_shards",
    "two_phases",
]
