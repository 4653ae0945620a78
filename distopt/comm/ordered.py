"""Sums in rank order, which are the same to the bit on every transport."""

import operator
from collections.abc import Sequence

import numpy as np

from distopt.comm.byte_counts import Algorithm, Moved
from distopt.comm.communicator import Communicator, Wrapper, all_reduce_in_rank_order
from distopt.comm.metered import Metered


class Ordered(Wrapper):
    """Communicator whose ``all_reduce`` adds in rank order: the same bits on any transport and in any chunking.

    Args:
        comm: the communicator that carries the data.

    Example:
        >>> import numpy as np
        >>> from distopt.comm import Ordered, run_ranks
        >>> def main(comm):
        ...     x = np.array([1e16, 1.0, -1e16])[[comm.rank]]
        ...     Ordered(comm).all_reduce(x)
        ...     return x.item()
        >>> run_ranks(3, main)  # (1e16 + 1) - 1e16 in float64
        [0.0, 0.0, 0.0]
    """

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        self.rank_ordered, self.algorithm = True, Slices(comm.algorithm)

    def all_reduce(self, x: np.ndarray, op: str = "sum") -> None:
        """Replace x, in place, by its sum over ranks, or another reduction, in rank order.  Collective."""
        self.transaction_on(x, f"all_reduce by {op}", lambda: all_reduce_in_rank_order(self.comm, x, op))


class Slices(Algorithm):
    """Routes of sums in rank order: a direct reduce-scatter, and the all-gather of another algorithm."""

    def __init__(self, gathers: Algorithm):
        self._gathers = gathers

    def all_reduce(self, shares: Sequence[int], rank: int) -> Moved:
        phases = self.reduce_scatter(shares, rank), self._gathers.all_gather(shares, rank)
        return Moved(*(tuple(map(operator.add, *pair)) for pair in zip(*phases, strict=True)))

    def all_gather(self, parts: Sequence[int], rank: int) -> Moved:
        return self._gathers.all_gather(parts, rank)


def in_rank_order(comm: Communicator) -> Communicator:
    """Return a communicator with the ranks of ``comm`` whose sums are in rank order.

    The result is ``comm`` itself if its sums are already.  If ``comm`` is ``Metered``, so is the result, with the same
    ledger, in which each sum is one all-reduce.

    Example:
        >>> from distopt.comm import LocalCommunicator, in_rank_order
        >>> comm = LocalCommunicator()
        >>> in_rank_order(comm) is comm
        True
    """
    if comm.rank_ordered:
        return comm
    return comm.around(Ordered(comm.comm)) if isinstance(comm, Metered) else Ordered(comm)
