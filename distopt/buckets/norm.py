"""The global norm of gradients in buckets."""

import itertools
import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

from distopt import device, kernels
from distopt.buckets.bucket import BucketSet
from distopt.buckets.shards import Reduced, local_shard

SumOverRanks = Callable[[np.ndarray], None]


def global_norm(
    buckets: BucketSet,
    sums: Sequence[Reduced],
    rank: int,
    size: int,
    sum_over_ranks: SumOverRanks,
    skip: Collection[str] = (),
) -> float:
    """Return the L2 norm of all sums as one vector, in float64.  Collective if a sum lies in pieces."""
    # Squares are added in a fixed order within each parameter, and then exactly, so that every rank and every plan has
    # the same bits.  On a GPU the host waits for the norm.  Where a sum lies in pieces each rank squares its own.
    tables = [b.gradients for b in buckets]
    # Kernels need at least one number per member.
    sizes = [max(t.chunks, len(t.names)) for t in tables]
    bounds = list(itertools.accumulate(sizes, initial=0))
    partial = device.zeros(bounds[-1], np.float64, buckets.bad)
    parts = [partial[start:end] for start, end in itertools.pairwise(bounds)]
    for table, total, part in zip(tables, sums, parts, strict=True):
        for piece in local_shard(total, rank, size) if len(total) > 1 else total:
            kernels.partial_squares(table.shard(piece.number, piece.of), piece.flat, part)
    if any(len(total) > 1 for total in sums):
        sum_over_ranks(partial)
    squares: list[float] = []
    for table, part in zip(tables, parts, strict=True):
        folded = device.zeros(len(table.names), np.float64, part)
        kernels.fold_partials(table, part, folded, 1)
        pairs = zip(table.names, device.host_copy(folded).tolist(), strict=True)
        squares += [square for name, square in pairs if name not in skip]
    try:
        return math.sqrt(math.fsum(squares))
    except OverflowError:
        return math.inf
