"""Piecewise lines of time over bytes: non-negative least squares on relative errors, by size of message."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CLOSE = 0.05  # relative error below which no more lines are added
MAX_PIECES = 5  # pieces at most
FEWEST = 3  # points of a piece: any two lie on a line


class Segment(NamedTuple):
    """A line of time over bytes, from ``least`` bytes on.

    MPI changes its protocol with the size, and many networks let a burst through before they are as slow as they are.
    The first piece begins at 0 bytes: its ``seconds`` is the latency.

    Attributes:
        least: the bytes at which the piece begins.
        seconds: the time of ``least`` bytes.
        per_byte: the seconds for each byte beyond.

    Example:
        >>> from distopt.fit import Segment
        >>> round(Segment(least=0.0, seconds=1e-5, per_byte=1e-9).of(1e6), 6)
        0.00101
    """

    least: float
    seconds: float
    per_byte: float

    def of(self, nbytes: float) -> float:
        """Return the seconds of so many bytes, ``least`` or more."""
        return self.seconds + self.per_byte * (nbytes - self.least)


def predicted(pieces: Sequence[Segment], nbytes: float) -> float:
    """Return the seconds of so many bytes; more bytes never take less time, however noisy the pieces are."""
    reached = [p for p in pieces if p.least <= nbytes]
    ends = [*(p.least for p in reached[1:]), nbytes]
    return max(p.of(end) for p, end in zip(reached, ends, strict=True))


Cut = tuple[float, tuple[int, ...]]  # the sum of squares, and the index of each piece's first point


def least_squares(rows: np.ndarray) -> np.ndarray:
    """Return the x >= 0, (k,), that minimizes ``|rows @ x - 1|``, for rows (n, k) of at least 0."""
    # With messages and bytes divided by the time that they took, 1 means no relative error.  The minimum lies on a face
    # where some of x are 0, and is there the minimum without a bound: all faces are tried, so k must be small.
    k, scale = rows.shape[1], np.linalg.norm(rows, axis=0)
    scaled = rows / np.where(scale > 0, scale, 1)
    best, least = np.zeros(k), np.inf
    for used in itertools.chain(*(itertools.combinations(range(k), size) for size in range(1, k + 1))):
        x = np.zeros(k)
        x[list(used)] = np.linalg.lstsq(scaled[:, used], np.ones(len(rows)), rcond=1e-9)[0]
        wrong = float(((scaled @ x - 1) ** 2).sum())
        if wrong < least and (x >= 0).all():
            best, least = x, wrong
    return np.asarray(best / np.where(scale > 0, scale, 1))


def pieces(nbytes: np.ndarray, seconds: np.ndarray) -> list[Segment]:
    """Fit as few lines as describe measured times well, of ascending bytes; both are (n,)."""
    # Of all ways to cut the points into so many pieces it takes the one with the least sum of squares of relative
    # errors (Bellman, 1961), and adds pieces until the largest relative error is at most 5 %, up to five pieces.
    rows = np.stack([np.ones(len(nbytes)), nbytes], 1) / seconds[:, None]
    bounds = np.array([0.0, *np.sqrt(nbytes[:-1] * nbytes[1:])])  # the start of a piece whose first point is k
    total, ends = len(rows), range(min(FEWEST, len(rows)), len(rows) + 1)
    costs = {
        (k, end): float((_errors(_beyond(bounds[k], rows[k:end])) ** 2).sum())
        for k in range(total)
        for end in ends
        if k < end
    }
    best: dict[int, Cut] = {end: (costs[0, end], (0,)) for end in ends}
    for more in range(2, MAX_PIECES + 1):
        parts = [_beyond(bounds[a], rows[a:b]) for a, b in itertools.pairwise([*best[total][1], total])]
        if total < FEWEST * more or max(np.abs(_errors(part)).max() for part in parts) <= CLOSE:
            break
        longer = {}
        for end in (end for end in ends if end - FEWEST in best):
            starts = (k for k in range(FEWEST, end - FEWEST + 1) if k in best)
            longer[end] = min((best[k][0] + costs[k, end], (*best[k][1], k)) for k in starts)
        best = longer
    lines = []
    for a, b in itertools.pairwise([*best[total][1], total]):
        lines.append(Segment(float(bounds[a]), *least_squares(_beyond(bounds[a], rows[a:b])).tolist()))
    return lines


def _beyond(least: float, rows: np.ndarray) -> np.ndarray:
    """Return rows whose bytes are counted from ``least`` on."""
    return np.array(rows - rows[:, :1] * [0.0, least])


def _errors(rows: np.ndarray) -> np.ndarray:
    """Return the relative errors of the best line."""
    return np.asarray(rows @ least_squares(rows) - 1)
