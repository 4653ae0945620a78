"""The break-even of a compression mode and dense gradients: by density, by bandwidth, and by number of ranks."""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from distopt.lab.modes import Mode, mode
from distopt.lab.network import Network
from distopt.lab.question import Question

DENSE = mode("dense")
SPARSEST = 1e-7  # the lowest density tried
SLOWEST, FASTEST = 1e3, 1e14  # bytes per second, the range tried
MAX_RANKS = 4096  # the most ranks tried
CLOSE = 1e-4  # relative accuracy of a break-even


class Bounds(NamedTuple):
    """A range of numbers of ranks in which a mode is faster than dense.

    Attributes:
        first: the smallest number of ranks of the range.
        last: the largest one; None if the range goes on beyond the largest number tried (4096).

    Example:
        >>> from distopt.lab import Question, break_even, buckets, mode, network
        >>> question = Question(buckets([("weight", (1000, 1000))]), 8, network("1GbE"))
        >>> break_even.ranks(question, mode("topk=0.01"))
        [Bounds(first=2, last=1355)]
    """

    first: int
    last: int | None


def pays(question: Question, mode: Mode) -> bool:
    """Tell whether a mode's exchange is predicted to be faster than that of dense gradients."""
    return question.predict(mode).exchange < question.predict(DENSE).exchange


def density(question: Question, mode: Mode) -> float | None:
    """Return the density below which a sparse mode is faster than dense, to a relative accuracy of 1e-4.

    Returns:
        0 if it never is; None for a mode without a density.
    """
    if mode.density is None:
        return None
    dense = question.predict(DENSE).exchange
    return _last(lambda d: question.predict(mode.at_density(d)).exchange < dense, SPARSEST, 1.0)


def bandwidth(question: Question, mode: Mode) -> float | None:
    """Return the bandwidth of a link, in bytes per second, below which a mode is faster than dense.

    Returns:
        0 if it never is, infinity if it always is; None if the network is not described by a link (a ``Fit``), or no
        message crosses that link.
    """
    network = question.wire
    if not isinstance(network, Network) or 1 < question.ranks <= network.per_node:
        return None
    sent = [(m, question.sent(m)) for m in (mode, DENSE)]

    def faster(rate: float) -> bool:
        faster_link = question._replace(wire=network.at_bandwidth(rate))
        compressed, dense = (faster_link.timed(s, m, faster_link.compute(m)).exchange for m, s in sent)
        return compressed < dense

    edge = _last(faster, SLOWEST, FASTEST)
    return math.inf if edge == FASTEST else edge


def ranks(question: Question, mode: Mode) -> list[Bounds]:
    """Return the ranges of numbers of ranks, up to ``MAX_RANKS``, in which a mode is faster than dense.

    Tried are the question's own number and 1, 2, 3, 4, 6, 8, 12, ... nodes; where two neighbours differ, bisection
    finds the edge between them.
    """
    unit = question.wire.per_node

    def faster(size: int) -> bool:
        return pays(question._replace(ranks=size), mode)

    def edge(good: int, bad: int) -> int:
        """Bisect, in full nodes, for the last number of ranks at which the mode still pays."""
        while (middle := (good + bad) // 2 // unit * unit) not in (good, bad) and min(good, bad) < middle:
            good, bad = (middle, bad) if faster(middle) else (good, middle)
        return good

    steps = {n for k in range(MAX_RANKS.bit_length()) for n in (1 << k, 3 << k)}
    ladder = sorted({n * unit for n in steps if 1 < n * unit <= (question.logical or MAX_RANKS)} | {question.ranks})
    good, bounds = [faster(size) for size in ladder], []
    for pay, run in itertools.groupby(range(len(ladder)), good.__getitem__):
        if pay:
            first, *_, last = 2 * list(run)  # doubled, since a run may have one element
            begin = edge(ladder[first], ladder[first - 1]) if first else ladder[0]
            bounds.append(Bounds(begin, edge(ladder[last], ladder[last + 1]) if last + 1 < len(ladder) else None))
    return bounds


def _last(faster: Callable[[float], bool], low: float, high: float) -> float:
    """Bisect for the largest argument with ``faster``, to a factor of 1 + ``CLOSE``; 0 if ``low`` is not faster."""
    if not faster(low):
        return 0.0
    if faster(high):
        return high
    while high > low * (1 + CLOSE):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if faster(middle) else (low, middle)
    return low
