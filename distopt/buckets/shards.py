"""The places of a sum over ranks: in one array, or in shards that lie in the memory of several ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Shard(NamedTuple):
    """A piece of a bucket's sum."""

    number: int
    of: int
    # of the bucket's size; only this share is valid
    flat: np.ndarray


# The pieces of a bucket's sum.
Reduced = Sequence[Shard]


def unsharded(flat: np.ndarray) -> Reduced:
    """Return a sum that lies in one array."""
    return [Shard(0, 1, flat)]


def sharded(parts: Sequence[np.ndarray]) -> list[Shard]:
    """Return a sum of which each rank has its own share in its own memory, ``parts`` by rank."""
    return [Shard(r, len(parts), flat) for r, flat in enumerate(parts)]


def local_shard(total: Reduced, rank: int, size: int) -> Reduced:
    """Return the part of a sum that one rank applies if each of ``size`` ranks applies its own share."""
    return [Shard(rank, size, total[rank if len(total) > 1 else 0].flat)]
