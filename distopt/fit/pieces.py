"""Latency and bandwidth from times: non-negative least squares on relative errors, by size of message."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CLOSE = 0.05  # lines whose worst relative error is no more than this are as many as there need be
MOST = 5  # pieces
FEWEST = 3  # points of a piece: two are always on a line


class Piece(NamedTuple):
    """``least`` bytes or more: seconds of so many, and for each byte beyond.

    MPI changes its protocol with the size, and many a network lets a burst through before it is as slow as it is.  The
    first piece begins at 0 bytes: there ``seconds`` is the latency.
    """

    least: float
    seconds: float
    per_byte: float

    def of(self, nbytes: float) -> float:
        """Seconds of so many bytes, ``least`` or more."""
        return self.seconds + self.per_byte * (nbytes - self.least)


def predicted(pieces: Sequence[Piece], nbytes: float) -> float:
    """Seconds of so many bytes.  More never take less time, whatever noise has made of the pieces."""
    reached = [p for p in pieces if p.least <= nbytes]
    ends = [*(p.least for p in reached[1:]), nbytes]
    return max(p.of(end) for p, end in zip(reached, ends, strict=True))


Cut = tuple[float, tuple[int, ...]]  # the sum of squares, and where the pieces start


def least_squares(rows: np.ndarray) -> np.ndarray:
    """The x >= 0 for which ``rows @ x`` is closest to 1, of shape (k,); ``rows`` (n, k) are at least 0, for a small k.

    With messages and bytes divided by the time that they took, 1 is no relative error at all.  The least lies on the
    edge where some of x are 0, and there is the least without a bound: of all edges that one is taken.
    """
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


def pieces(nbytes: np.ndarray, seconds: np.ndarray) -> list[Piece]:
    """As few lines as describe times (n,) of so many bytes (n,) well; these ascend.

    Of all ways to cut the points into so many pieces it is the one with the least sum of squares (Bellman, 1961).
    """
    rows = np.stack([np.ones(len(nbytes)), nbytes], 1) / seconds[:, None]
    bounds = np.array([0.0, *np.sqrt(nbytes[:-1] * nbytes[1:])])  # where a piece begins whose first point is k
    whole, ends = len(rows), range(min(FEWEST, len(rows)), len(rows) + 1)
    costs = {(k, end): _squares(_beyond(bounds[k], rows[k:end])) for k in range(whole) for end in ends if k < end}
    best: dict[int, Cut] = {end: (costs[0, end], (0,)) for end in ends}
    for more in range(2, MOST + 1):
        parts = [_beyond(bounds[a], rows[a:b]) for a, b in itertools.pairwise([*best[whole][1], whole])]
        if whole < FEWEST * more or max(np.abs(_errors(part)).max() for part in parts) <= CLOSE:
            break
        best = {end: _longer(costs, best, end) for end in ends if end - FEWEST in best}
    found = []
    for a, b in itertools.pairwise([*best[whole][1], whole]):
        found.append(Piece(float(bounds[a]), *least_squares(_beyond(bounds[a], rows[a:b])).tolist()))
    return found


def _longer(costs: dict[tuple[int, int], float], best: dict[int, Cut], end: int) -> Cut:
    """The best with one more piece, which goes up to ``end``."""
    starts = (k for k in range(FEWEST, end - FEWEST + 1) if k in best)
    return min((best[k][0] + costs[k, end], (*best[k][1], k)) for k in starts)


def _beyond(least: float, rows: np.ndarray) -> np.ndarray:
    """Rows whose bytes are those beyond ``least``."""
    return np.array(rows - rows[:, :1] * [0.0, least])


def _errors(rows: np.ndarray) -> np.ndarray:
    """Relative errors of the best line."""
    return np.asarray(rows @ least_squares(rows) - 1)


def _squares(rows: np.ndarray) -> float:
    return float((_errors(rows) ** 2).sum())
