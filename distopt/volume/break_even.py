"""Where a mode and dense gradients take the same time: above which density, bandwidth, or number of ranks."""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from distopt.volume.forecast import sendings
from distopt.volume.modes import Mode, mode
from distopt.volume.network import Network
from distopt.volume.question import Question

DENSE = mode("dense")
SPARSEST = 1e-7  # density
SLOWEST, FASTEST = 1e3, 1e14  # bytes per second
MOST = 4096  # ranks that are looked at
CLOSE = 1e-4  # relative: how near both sides of a break-even come


class Bounds(NamedTuple):
    """Numbers of ranks in a row with which a mode is faster than dense; no ``last`` one: more than are looked at."""

    first: int
    last: int | None


def pays(question: Question, mode: Mode) -> bool:
    """Is the exchange faster than that of dense gradients?"""
    return question.predict(mode).exchange < question.predict(DENSE).exchange


def density(question: Question, mode: Mode) -> float | None:
    """Below which a mode that sends a fraction of the entries is faster; 0 if it never is, None for other modes."""
    if mode.density is None:
        return None
    dense = question.predict(DENSE).exchange
    return _last(lambda d: question.predict(mode.at_density(d)).exchange < dense, SPARSEST, 1.0)


def bandwidth(question: Question, mode: Mode) -> float | None:
    """Bytes per second of a link below which a mode is faster; 0 if it never is, infinite if it always is.

    None where the network is not described by a link, and where nothing goes over it.
    """
    network = question.wire
    if not isinstance(network, Network) or 1 < question.ranks <= network.per_node:
        return None
    sent = [(m, sendings(question.buckets, m, question.ranks)) for m in (mode, DENSE)]

    def faster(rate: float) -> bool:
        there = question._replace(wire=network.at_bandwidth(rate))
        own, dense = (there.timed(s, m, there.compute(m)).exchange for m, s in sent)
        return own < dense

    found = _last(faster, SLOWEST, FASTEST)
    return math.inf if found == FASTEST else found


def ranks(question: Question, mode: Mode) -> list[Bounds]:
    """With how many ranks, up to ``MOST``, a mode is faster.

    The question's number is looked at, and 1, 2, 3, 4, 6, 8, 12, ... nodes; and where two of these differ, between them
    for the edge.
    """
    unit = question.wire.per_node

    def faster(size: int) -> bool:
        return pays(question._replace(ranks=size), mode)

    def edge(good: int, bad: int) -> int:
        """The last number of full nodes for which it is so, on the way to one for which it is not."""
        while (middle := (good + bad) // 2 // unit * unit) not in (good, bad) and min(good, bad) < middle:
            good, bad = (middle, bad) if faster(middle) else (good, middle)
        return good

    steps = {n for k in range(MOST.bit_length()) for n in (1 << k, 3 << k)}
    ladder = sorted({n * unit for n in steps if 1 < n * unit <= MOST} | {question.ranks})
    good, found = [faster(size) for size in ladder], []
    for pay, run in itertools.groupby(range(len(ladder)), good.__getitem__):
        if pay:
            first, *_, last = 2 * list(run)  # which may be one
            begin = edge(ladder[first], ladder[first - 1]) if first else ladder[0]
            found.append(Bounds(begin, edge(ladder[last], ladder[last + 1]) if last + 1 < len(ladder) else None))
    return found


def _last(faster: Callable[[float], bool], low: float, high: float) -> float:
    """The largest number, to a factor of 1 + ``CLOSE``, for which it is so; 0 if it is not so for the lowest."""
    if not faster(low):
        return 0.0
    if faster(high):
        return high
    while high > low * (1 + CLOSE):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if faster(middle) else (low, middle)
    return low
