"""Where a mode and dense gradients take the same time: above which density, bandwidth, or number of ranks."""

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
    """Numbers of ranks, the first and the last with which a mode is faster than dense."""

    first: int
    last: int


def pays(question: Question, mode: Mode) -> bool:
    """Is a step faster than with dense gradients?"""
    return question.predict(mode).step < question.predict(DENSE).step


def density(question: Question, mode: Mode) -> float | None:
    """Below which a mode that sends a fraction of the entries is faster; 0 if it never is, None for other modes."""
    if mode.density is None:
        return None
    dense = question.predict(DENSE).step
    return _last(lambda d: question.predict(mode.at_density(d)).step < dense, SPARSEST, 1.0)


def bandwidth(question: Question, mode: Mode) -> float | None:
    """Bytes per second of a link below which a mode is faster; 0 if it never is, infinite if it always is.

    None where the network is not described by a link.
    """
    network = question.wire
    if not isinstance(network, Network):
        return None
    sent = [(m, sendings(question.buckets, m, question.ranks)) for m in (mode, DENSE)]

    def faster(rate: float) -> bool:
        there = question._replace(wire=network.at_bandwidth(rate))
        own, dense = (there.timed(s, m, there.compute(m)).step for m, s in sent)
        return own < dense

    found = _last(faster, SLOWEST, FASTEST)
    return math.inf if found == FASTEST else found


def ranks(question: Question, mode: Mode) -> Bounds | None:
    """With how many ranks, up to ``MOST``, a mode is faster; None if with no number of them.

    Numbers in doubling steps are looked at, and between the first two and the last two that differ, all.
    """
    unit = getattr(question.wire, "per_node", 1)

    def faster(nodes: int) -> bool:
        return pays(question._replace(ranks=nodes * unit), mode)

    ladder = [n for n in (1 << k for k in range(MOST.bit_length())) if 1 < n * unit <= MOST]
    found = [n for n in ladder if faster(n)]
    if not found:
        return None
    first, last = found[0], found[-1]
    if first > ladder[0]:
        first = _edge(faster, first, first // 2)
    if last < ladder[-1]:
        last = _edge(faster, last, 2 * last)
    return Bounds(first * unit, last * unit)


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


def _edge(faster: Callable[[int], bool], good: int, bad: int) -> int:
    """The last number for which it is so, on the way from a good one to a bad one."""
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if faster(middle) else (good, middle)
    return good
