"""Where a sum stands."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Piece(NamedTuple):
    """Share ``number`` of ``of`` equal ones of a bucket's chunks, in a flat array of the bucket's size."""

    number: int
    of: int
    flat: np.ndarray


Sum = Sequence[Piece]  # of a bucket: pieces that make it whole


def in_one_piece(flat: np.ndarray) -> Sum:
    """A sum in one piece."""
    return [Piece(0, 1, flat)]


def shared(parts: Sequence[np.ndarray]) -> Sum:
    """A sum of which each rank has its own share in its own memory."""
    return [Piece(r, len(parts), flat) for r, flat in enumerate(parts)]


def own(total: Sum, rank: int, size: int) -> Sum:
    """Of a sum what one rank has to apply if each applies its own share."""
    return [Piece(rank, size, total[rank if len(total) > 1 else 0].flat)]
