"""The global norm of gradients in buckets."""

import itertools
import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

from distopt import device, kernels
from distopt.buckets.buffers import Buffers
from distopt.buckets.piece import Sum, own

AddUp = Callable[[np.ndarray], None]


def global_norm(
    buffers: Buffers, sums: Sequence[Sum], rank: int, size: int, add_up: AddUp, skip: Collection[str] = ()
) -> float:
    """The L2 norm, in float64, of all sums as one vector, without the parameters to ``skip``.

    Squares are added in a fixed order within each parameter, and then exactly, so that every rank and every plan has
    the same bits.  Of a sum in pieces each of the ``size`` ranks squares its own, and ``add_up`` replaces an array by
    its sum over ranks.  On a GPU the host waits for the norm.
    """
    tables = [b.gradients for b in buffers]
    sizes = [max(t.chunks, len(t.names)) for t in tables]  # of which kernels want one per member at least
    bounds = list(itertools.accumulate(sizes, initial=0))
    partial = device.zeros(bounds[-1], np.float64, buffers.bad)
    parts = [partial[start:end] for start, end in itertools.pairwise(bounds)]
    for table, total, part in zip(tables, sums, parts, strict=True):
        for piece in own(total, rank, size) if len(total) > 1 else total:
            kernels.partial_squares(table.share(piece.number, piece.of), piece.flat, part)
    if any(len(total) > 1 for total in sums):
        add_up(partial)
    squares: list[float] = []
    for table, part in zip(tables, parts, strict=True):
        folded = device.zeros(len(table.names), np.float64, part)
        kernels.fold_partials(table, part, folded, 1)
        found = zip(table.names, device.host_copy(folded).tolist(), strict=True)
        squares += [square for name, square in found if name not in skip]
    try:
        return math.sqrt(math.fsum(squares))
    except OverflowError:
        return math.inf
