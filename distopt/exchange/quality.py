"""How good what was sent in a step is: sums over all buckets, and the numbers that follow from them."""

import math
from collections import defaultdict

import numpy as np

from distopt import kernels
from distopt.tables import Members

BLOCK = 1 << 16  # elements of which a product is taken at once, as float64


class Share:
    """What one rank had, sent and kept."""

    def __init__(self) -> None:
        self._gradient = self._before = self._kept = 0.0  # squares
        self._waiting = self._leaving = 0.0  # magnitudes
        self._entries = self._elements = 0

    def had(self, members: Members, gradient: np.ndarray) -> None:
        """A bucket's gradient, as a compressor got it."""
        self._gradient += _squares(members, gradient)

    def sent(self, members: Members, sent: np.ndarray, kept: np.ndarray) -> None:
        """What has left it of a bucket, and what has not; all there was is their sum, which is left in ``sent``."""
        self._entries += int(np.count_nonzero(sent))
        self._leaving += _magnitudes(members, sent)
        self._waiting += _magnitudes(members, kept)
        self._kept += _squares(members, kept)
        kernels.accumulate(kept, sent)
        self._before += _squares(members, sent)
        self._elements += int(members.rows["size"].sum())

    def numbers(self, exchanges: int) -> dict[str, float]:
        """Those of this rank."""
        residual = math.sqrt(self._kept / exchanges)
        return {
            "energy": 1 - _ratio(self._kept, self._before),
            "residual": residual,
            "residual_ratio": _ratio(residual, math.sqrt(self._gradient / exchanges), of_nothing=math.nan),
            "age": _ratio(self._waiting, self._leaving),
            "density": self._entries / self._elements if self._elements else 1.0,
        }


class Quality:
    """One step, over all buckets: the shares of the ranks that are here, and which way their sum points.

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

    If nothing was looked at, because everything is sent, they are 1, 0, 0, 0, 1 and 1.  What a compressor keeps in
    another state than 'residual' nobody knows: all that depends on it is NaN.

    A step of several ``exchanges`` is looked at as a whole; its norms are root mean squares over these.
    """

    def __init__(self, exchanges: int = 1) -> None:
        self._exchanges = exchanges
        self._shares: defaultdict[int, Share] = defaultdict(Share)
        self._along = self._total = self._dense = 0.0  # the product of both sums, and their squares

    def of(self, rank: int) -> Share:
        """The share of a rank."""
        return self._shares[rank]

    def compare(self, members: Members, total: np.ndarray, dense: np.ndarray) -> None:
        """A bucket's sum over ranks of what was sent, and of the gradients as they were."""
        self._along += _product(total, dense)
        self._total += _squares(members, total)
        self._dense += _squares(members, dense)

    def numbers(self) -> dict[str, float]:
        """Means over the ranks that are here, and the cosine."""
        found = [share.numbers(self._exchanges) for share in self._shares.values() or [Share()]]
        means = {name: sum(numbers[name] for numbers in found) / len(found) for name in found[0]}
        return means | {"cosine": self._cosine()}

    def _cosine(self) -> float:
        """1 if all there was is zeros; what rounding lets pass 1 is held there."""
        if self._total == self._dense == 0:
            return 1.0
        return float(np.clip(_ratio(self._along, math.sqrt(self._total) * math.sqrt(self._dense)), -1, 1))


def _squares(members: Members, x: np.ndarray) -> float:
    partial = _partials(members)
    kernels.partial_squares(members, x, partial)
    return float(partial.sum())


def _magnitudes(members: Members, x: np.ndarray) -> float:
    partial = _partials(members)
    kernels.partial_magnitudes(members, x, x, False, partial)
    return float(partial.sum())


def _partials(members: Members) -> np.ndarray:
    """A number per chunk, and one for a member that has none."""
    return np.zeros(max(members.chunks, len(members.names)))


def _product(x: np.ndarray, y: np.ndarray) -> float:
    """Gaps between members are zeros."""
    pieces = (slice(begin, begin + BLOCK) for begin in range(0, x.size, BLOCK))
    with np.errstate(all="ignore"):  # what is not finite makes the product so
        return sum(float(x[piece].astype(np.float64) @ y[piece].astype(np.float64)) for piece in pieces)


def _ratio(a: float, b: float, of_nothing: float = math.inf) -> float:
    """a / b; 0 / 0 is 0: of nothing, nothing is left."""
    return a / b if b else of_nothing if a else 0.0
