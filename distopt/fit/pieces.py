"""Latency and bandwidth from times: non-negative least squares on relative errors, by size of message."""

import itertools
from typing import NamedTuple

import numpy as np

CLOSE = 0.05  # lines whose worst relative error is no more than this are as many as there need be
MOST = 5  # pieces
FEWEST = 3  # points of a piece: two are always on a line


class Piece(NamedTuple):
    """Seconds per message, and per byte, where messages have ``least`` bytes or more: MPI changes its protocol."""

    least: float
    latency: float
    per_byte: float


Cut = tuple[float, tuple[int, ...]]  # the sum of squares, and where the pieces start


def least_squares(rows: np.ndarray) -> np.ndarray:
    """The x >= 0 for which ``rows @ x`` is closest to 1, of shape (2,); ``rows`` (n, 2) are at least 0, none all zero.

    With messages and bytes divided by the time that they took, 1 is no relative error at all.
    """
    (aa, ab), (_, bb) = (rows.T @ rows).tolist()
    a, b = rows.sum(0).tolist()
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        inside = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if min(inside) >= 0:
            return np.array(inside)
    # the least of a convex function that lies outside of a quadrant has its least within on an edge
    return np.array([a / aa, 0.0]) if a * a * bb >= b * b * aa else np.array([0.0, b / bb])


def pieces(messages: np.ndarray, rows: np.ndarray) -> list[Piece]:
    """As few lines as describe the rows well; ``messages`` (n,) are the bytes of each row's messages, ascending.

    Of all ways to cut the points into so many pieces it is the one with the least sum of squares (Bellman, 1961).
    """
    ends = range(min(FEWEST, len(rows)), len(rows) + 1)
    best: dict[int, Cut] = {end: (_squares(rows[:end]), (0,)) for end in ends}
    for more in range(2, MOST + 1):
        if len(rows) < FEWEST * more or _worst(rows, best[len(rows)][1]) <= CLOSE:
            break
        best = {end: _longer(rows, best, end) for end in ends if end - FEWEST in best}
    starts = best[len(rows)][1]
    lines = [least_squares(part).tolist() for part in _parts(rows, starts)]
    least = [0.0, *(float(np.sqrt(messages[k - 1] * messages[k])) for k in starts[1:])]
    return [Piece(at, *line) for at, line in zip(least, lines, strict=True)]


def _longer(rows: np.ndarray, best: dict[int, Cut], end: int) -> Cut:
    """The best of one more piece up to ``end``."""
    found = (
        (best[k][0] + _squares(rows[k:end]), (*best[k][1], k)) for k in range(FEWEST, end - FEWEST + 1) if k in best
    )
    return min(found)


def _parts(rows: np.ndarray, starts: tuple[int, ...]) -> list[np.ndarray]:
    """The rows of each piece."""
    return [rows[a:b] for a, b in itertools.pairwise([*starts, len(rows)])]


def _errors(rows: np.ndarray) -> np.ndarray:
    """Relative errors of the best line."""
    return np.asarray(rows @ least_squares(rows) - 1)


def _squares(rows: np.ndarray) -> float:
    return float((_errors(rows) ** 2).sum())


def _worst(rows: np.ndarray, starts: tuple[int, ...]) -> float:
    return max(float(np.abs(_errors(part)).max()) for part in _parts(rows, starts))
