"""The link on which the formulas of ``distopt.cost`` come closest to measured times, for any number of ranks."""

import math
from collections.abc import Sequence

import numpy as np

from distopt.lab import cost
from distopt.lab.cost import Link
from distopt.lab.fit.measure import Point
from distopt.lab.fit.pieces import FEWEST, least_squares

ROUNDS = 20  # enough for the choice of algorithms to settle
UNITS = Link("", 1.0, math.inf, 0.0), Link("", 0.0, 1.0, 0.0), Link("", 0.0, math.inf, 1.0)
LINEAR = "all_to_all", "all_gather", "reduce_scatter", "all_reduce"  # no broadcast: its pipeline is not linear


def one_link(points: Sequence[Point], size: int) -> Link:
    """Fit latency, bandwidth and reduction to points by the least squares of relative errors.

    The bandwidth is infinite if times do not grow with the bytes.
    """
    # An all-to-all is done by one algorithm only, which gives a first link; for each other verb the algorithm is the
    # one that is fastest on the link so far, as in cost.seconds.  Only the smallest and the largest sizes of each verb
    # count: one link for all sizes is for votes and for buckets, whatever protocols lie between.
    ends = {verb: _ends(sorted(p for p in points if p.verb == verb)) for verb in LINEAR}
    link = _link(ends["all_to_all"], size, Link("", 0.0, math.inf))
    for _ in range(ROUNDS):
        link = _link([point for verb in LINEAR for point in ends[verb]], size, link)
    return link


def _link(points: Sequence[Point], size: int, before: Link) -> Link:
    """Fit a link, with the algorithm for each point that is fastest on the link ``before``."""
    rows = np.array([_counts(p, size, before) for p in points]) / [[p.seconds] for p in points]
    latency, per_byte, reduction = least_squares(rows).tolist()
    return Link("", latency, 1 / per_byte if per_byte else math.inf, reduction)


def _counts(point: Point, size: int, link: Link) -> list[float]:
    """Return the numbers of messages in a row, of bytes that pass in them, and of bytes that are added up."""
    best = min(cost.algorithms(point.verb), key=lambda algorithm: algorithm(point.nbytes, size, link))
    return [best(point.nbytes, size, unit) for unit in UNITS]


def _ends(points: list[Point]) -> list[Point]:
    return points if len(points) < 2 * FEWEST else points[:FEWEST] + points[-FEWEST:]
