"""One link for all verbs, and for any number of ranks: the one on which the formulas say what was measured."""

import math
from collections.abc import Sequence

import numpy as np

from distopt import cost
from distopt.cost import Link
from distopt.fit.measure import Point
from distopt.fit.pieces import FEWEST, least_squares

ROUNDS = 20  # after which algorithms hardly change any more
UNITS = Link("", 1.0, math.inf, 0.0), Link("", 0.0, 1.0, 0.0), Link("", 0.0, math.inf, 1.0)
LINEAR = "all_to_all", "all_gather", "reduce_scatter", "all_reduce"  # a broadcast's best algorithm is a pipeline


def one_link(points: Sequence[Point], size: int) -> Link:
    """Latency, bandwidth and reduction by the least squares of relative errors; no bandwidth is an infinite one.

    An all-to-all is done in one way only, which gives a first link; of another verb it is always the algorithm that is
    best on the link so far, as in ``cost.seconds``.  Only the smallest and the largest of each verb are looked at: one
    link for all sizes is for votes and for buckets, whatever protocols lie between.
    """
    ends = {verb: _ends(sorted(p for p in points if p.verb == verb)) for verb in LINEAR}
    link = _link(ends["all_to_all"], size, Link("", 0.0, math.inf))
    for _ in range(ROUNDS):
        link = _link([point for verb in LINEAR for point in ends[verb]], size, link)
    return link


def _link(points: Sequence[Point], size: int, before: Link) -> Link:
    """The best one, if every verb is done as is best on the one ``before``."""
    rows = np.array([_counts(p, size, before) for p in points]) / [[p.seconds] for p in points]
    latency, per_byte, reduction = least_squares(rows).tolist()
    return Link("", latency, 1 / per_byte if per_byte else math.inf, reduction)


def _counts(point: Point, size: int, link: Link) -> list[float]:
    """Messages one after the other, bytes that pass in them, and bytes that are added up."""
    best = min(cost.algorithms(point.verb), key=lambda algorithm: algorithm(point.nbytes, size, link))
    return [best(point.nbytes, size, unit) for unit in UNITS]


def _ends(points: list[Point]) -> list[Point]:
    return points if len(points) < 2 * FEWEST else points[:FEWEST] + points[-FEWEST:]
