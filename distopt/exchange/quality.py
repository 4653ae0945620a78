"""How good what was sent in a step is: sums over all buckets, and the numbers that follow from them."""

import math
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

BLOCK = 1 << 15  # elements that are looked at together: as float64 they stay in a cache


class Share:
    """What one rank had, sent and kept."""

    def __init__(self) -> None:
        self._gradient = self._before = self._kept = 0.0  # squares
        self._waiting = self._leaving = 0.0  # magnitudes
        self._entries = self._elements = 0

    def had(self, gradient: np.ndarray) -> None:
        """A bucket's gradient, as a compressor got it."""
        for (g,) in _blocks(gradient):
            self._gradient += float(g @ g)

    def sent(self, sent: np.ndarray, kept: np.ndarray, elements: int) -> None:
        """What has left it of a bucket of so many elements, and what has not: by conservation, that was all there was.

        Gaps between members are zeros in both.
        """
        for s, k in _blocks(sent, kept):
            before = s + k
            self._before += float(before @ before)
            self._kept += float(k @ k)
            self._waiting += float(np.abs(k).sum())
            self._leaving += float(np.abs(s).sum())
            self._entries += int(np.count_nonzero(s))
        self._elements += elements

    def numbers(self) -> dict[str, float]:
        """Those of this rank."""
        residual = math.sqrt(self._kept)
        return {
            "energy": 1 - _ratio(self._kept, self._before),
            "residual": residual,
            "residual_ratio": _ratio(residual, math.sqrt(self._gradient)),
            "age": _ratio(self._waiting, self._leaving),
            "density": self._entries / self._elements if self._elements else 1.0,
        }


class Quality:
    """One step, over all buckets: the shares of the ranks that are here, and which way their sum points.

    * ``energy``: the fraction of the energy that a compressor had to send from which was sent,
      1 - |kept|^2 / |sent + kept|^2: of the gradient, with what was kept of earlier ones; for DGC, of the velocities.
      What a format rounds, clips or counts double makes it less, and less than 0 if that is more than there was.
    * ``residual``: the norm of what is kept, in units of the local, un-averaged gradient; what a compressor without
      memory drops.  ``residual_ratio``: that over the gradient's norm.
    * ``age``: |kept| / |sent|, sums of magnitudes: how many steps' worth of what is sent waits, and in a steady state
      the mean number of steps that it waits (Little, "A proof for the queuing formula L = lambda W", 1961).
    * ``density``: the fraction of the elements for which anything but zero was sent.
    * ``cosine``: of the angle between the sum over ranks of what was sent and that of their gradients.

    If nothing was looked at, because everything is sent, they are 1, 0, 0, 0, 1 and 1.
    """

    def __init__(self) -> None:
        self._shares: defaultdict[int, Share] = defaultdict(Share)
        self._products = np.zeros(3)

    def of(self, rank: int) -> Share:
        """The share of a rank."""
        return self._shares[rank]

    def compare(self, total: np.ndarray, dense: np.ndarray) -> None:
        """A bucket's sum over ranks of what was sent, and of the gradients as they were."""
        for t, d in _blocks(total, dense):
            self._products += t @ d, t @ t, d @ d

    def numbers(self) -> dict[str, float]:
        """Means over the ranks that are here, and the cosine."""
        found = [share.numbers() for share in self._shares.values()] or [Share().numbers()]
        means = {name: sum(numbers[name] for numbers in found) / len(found) for name in found[0]}
        return means | {"cosine": self._cosine()}

    def _cosine(self) -> float:
        """1 if all there was is zeros; what rounding lets pass 1 is held there."""
        along, one, other = self._products.tolist()
        if one == other == 0:
            return 1.0
        return float(np.clip(_ratio(along, math.sqrt(one) * math.sqrt(other)), -1, 1))


def _blocks(*arrays: np.ndarray) -> Iterator[list[np.ndarray]]:
    """The same pieces of flat arrays, as float64."""
    with np.errstate(all="ignore"):  # what is not finite makes the numbers so
        for begin in range(0, arrays[0].size, BLOCK):
            yield [x[begin : begin + BLOCK].astype(np.float64) for x in arrays]


def _ratio(a: float, b: float) -> float:
    """a / b; 0 / 0 is 0: of nothing, nothing is left."""
    return a / b if b else math.inf if a else 0.0
