"""The places of a sum over ranks: in one array, or in shards that lie in the memory of several ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Shard(NamedTuple):
    """A piece of a bucket's sum.

    Attributes:
        number: the index of its share of the bucket's chunks.
        of: the number of equal shares.
        flat: an array of the bucket's size, of which this share is valid.

    Example:
        >>> import numpy as np
        >>> from distopt.buckets import Shard
        >>> Shard(0, 2, np.zeros(4, "f4")).of
        2
    """

    number: int
    of: int
    flat: np.ndarray


Reduced = Sequence[Shard]  # the pieces of a bucket's sum


def unsharded(flat: np.ndarray) -> Reduced:
    """Return a sum that lies in one array.

    Example:
        >>> import numpy as np
        >>> from distopt.buckets import unsharded
        >>> (piece,) = unsharded(np.zeros(4, "f4"))
        >>> piece.number, piece.of
        (0, 1)
    """
    return [Shard(0, 1, flat)]


def sharded(parts: Sequence[np.ndarray]) -> list[Shard]:
    """Return a sum of which each rank has its own share in its own memory, ``parts`` by rank.

    Example:
        >>> import numpy as np
        >>> from distopt.buckets import sharded
        >>> [(piece.number, piece.of) for piece in sharded([np.zeros(4, "f4"), np.zeros(4, "f4")])]
        [(0, 2), (1, 2)]
    """
    return [Shard(r, len(parts), flat) for r, flat in enumerate(parts)]


def local_shard(total: Reduced, rank: int, size: int) -> Reduced:
    """Return the part of a sum that one rank applies if each of ``size`` ranks applies its own share.

    Example:
        >>> import numpy as np
        >>> from distopt.buckets import unsharded, local_shard
        >>> (piece,) = local_shard(unsharded(np.zeros(4, "f4")), rank=1, size=2)
        >>> piece.number, piece.of
        (1, 2)
    """
    return [Shard(rank, size, total[rank if len(total) > 1 else 0].flat)]
