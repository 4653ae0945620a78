"""The quality of what was sent in a step: sums over all buckets, and the numbers that follow from them."""

import math
from collections import defaultdict

import numpy as np

from distopt import kernels
from distopt.kernels.layout import BucketLayout

BLOCK = 1 << 16  # elements of which a product is taken at once, as float64


class RankQuality:
    """Sums over what one rank had, sent and kept."""

    def __init__(self) -> None:
        self._gradient = self._before = self._kept = 0.0  # squares
        self._waiting = self._leaving = 0.0  # magnitudes
        self._entries = self._elements = 0

    def add_gradient(self, members: BucketLayout, gradient: np.ndarray) -> None:
        """Add a bucket's gradient, ``(n,)``, as a compressor got it."""
        self._gradient += _squares(members, gradient)

    def add_sent(self, members: BucketLayout, sent: np.ndarray, kept: np.ndarray) -> None:
        """Add what was sent of a bucket, ``(n,)``, and what was kept; their sum, all there was, is left in ``sent``."""
        self._entries += int(np.count_nonzero(sent))
        self._leaving += _magnitudes(members, sent)
        self._waiting += _magnitudes(members, kept)
        self._kept += _squares(members, kept)
        kernels.accumulate(kept, sent)
        self._before += _squares(members, sent)
        self._elements += int(members.records["size"].sum())

    def numbers(self, exchanges: int) -> dict[str, float]:
        """Return the numbers of this rank, as ``Quality`` has them."""
        residual = math.sqrt(self._kept / exchanges)
        return {
            "energy": 1 - _ratio(self._kept, self._before),
            "residual": residual,
            "residual_ratio": _ratio(residual, math.sqrt(self._gradient / exchanges), of_nothing=math.nan),
            "age": _ratio(self._waiting, self._leaving),
            "density": self._entries / self._elements if self._elements else 1.0,
        }


class Quality:
    """The quality of one step, over all buckets and the ranks of this process.

    * ``energy``: how much of what there was to send was sent, 1 - |kept|^2 / |sent + kept|^2.  There was the gradient,
      and what was kept of earlier ones; for DGC, the velocities.  Below 0 if more is kept than there was.
    * ``residual``: the norm of what is kept, in units of the local, un-averaged gradient; what a compressor without
      memory drops.  ``residual_ratio``: that over the gradient's norm; NaN if something is kept and the gradient is
      zeros, as that of a rank that has joined.
    * ``age``: |kept| / |sent|, sums of magnitudes: how many steps' worth of what is sent waits, and in a steady state
      the mean number of steps that it waits (Little, "A proof for the queuing formula L = lambda W", 1961).
    * ``density``: the fraction of the elements for which anything but zero was sent.
    * ``cosine``: of the angle between the sum over ranks of what was sent and that of their gradients.  A momentum in
      the compressor turns the sum too.

    If nothing was checked, because everything is sent, they are 1, 0, 0, 0, 1 and 1.  What a compressor keeps in
    another state than 'residual' nobody knows: all that depends on it is NaN.

    A step of several ``exchanges`` is checked as a whole; its norms are root mean squares over these.

    Args:
        exchanges: the number of exchanges in the step.

    Example:
        >>> from distopt.lab.observe import Quality
        >>> Quality().numbers()["density"]
        1.0
    """

    def __init__(self, exchanges: int = 1) -> None:
        self._exchanges = exchanges
        self._shares: defaultdict[int, RankQuality] = defaultdict(RankQuality)
        self._along = self._total = self._dense = 0.0  # the product of both sums, and their squares

    def of_rank(self, rank: int) -> RankQuality:
        """Return the sums of a rank."""
        return self._shares[rank]

    def compare(self, members: BucketLayout, total: np.ndarray, dense: np.ndarray) -> None:
        """Add a bucket's sum over ranks of what was sent, ``total``, and of the gradients as they were, ``dense``.

        Args:
            members: the bucket's layout.
            total: the sum over ranks of what was sent, ``(n,)``.
            dense: the sum over ranks of the gradients, ``(n,)``.
        """
        self._along += _product(total, dense)
        self._total += _squares(members, total)
        self._dense += _squares(members, dense)

    def numbers(self) -> dict[str, float]:
        """Return means over the ranks of this process, and the cosine."""
        ranks = [share.numbers(self._exchanges) for share in self._shares.values() or [RankQuality()]]
        means = {name: sum(numbers[name] for numbers in ranks) / len(ranks) for name in ranks[0]}
        cosine = 1.0  # if all there was is zeros
        if self._total or self._dense:  # in [-1, 1], despite rounding
            cosine = float(np.clip(_ratio(self._along, math.sqrt(self._total) * math.sqrt(self._dense)), -1, 1))
        return means | {"cosine": cosine}


def _squares(members: BucketLayout, x: np.ndarray) -> float:
    partial = _partials(members)
    kernels.partial_squares(members, x, partial)
    return float(partial.sum())


def _magnitudes(members: BucketLayout, x: np.ndarray) -> float:
    partial = _partials(members)
    kernels.partial_magnitudes(members, x, x, False, partial)
    return float(partial.sum())


def _partials(members: BucketLayout) -> np.ndarray:
    """Return zeros, float64: one per chunk, or one per member if there are more of those."""
    return np.zeros(max(members.chunks, len(members.names)))


def _product(x: np.ndarray, y: np.ndarray) -> float:
    """Return the inner product of two arrays, in float64; gaps between members are zeros and add nothing."""
    pieces = (slice(begin, begin + BLOCK) for begin in range(0, x.size, BLOCK))
    with np.errstate(all="ignore"):  # what is not finite makes the product so
        return sum(float(x[piece].astype(np.float64) @ y[piece].astype(np.float64)) for piece in pieces)


def _ratio(a: float, b: float, of_nothing: float = math.inf) -> float:
    """Return a / b for b of at least 0; ``of_nothing`` for b = 0, unless a is 0 too: 0 / 0 counts as 0."""
    return a / b if b else of_nothing if a else 0.0
