"""Sums that do not depend on who computes them."""

import operator
from collections.abc import Sequence

import numpy as np

from distopt.comm.communicator import Communicator, Wrapper, all_reduce_in_rank_order
from distopt.comm.metered import Metered
from distopt.cost import Algorithm, Moved


class Ordered(Wrapper):
    """A communicator whose all_reduce adds in rank order: the same bits on any transport and in any chunking."""

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        self.rank_ordered, self.algorithm = True, Slices(comm.algorithm)

    def all_reduce(self, x: np.ndarray) -> None:
        """Replace x, in place, by its sum over ranks, added in rank order."""
        all_reduce_in_rank_order(self.comm, x)


class Slices(Algorithm):
    """Slices of a sum go straight to their owners, and from there as anything is gathered."""

    def __init__(self, gathers: Algorithm):
        self._gathers = gathers

    def all_reduce(self, shares: Sequence[int], rank: int) -> Moved:
        """Both ways."""
        there, back = self.reduce_scatter(shares, rank), self._gathers.all_gather(shares, rank)
        return Moved(*(tuple(map(operator.add, *pair)) for pair in zip(there, back, strict=True)))

    def all_gather(self, parts: Sequence[int], rank: int) -> Moved:
        """As it was."""
        return self._gathers.all_gather(parts, rank)


def in_rank_order(comm: Communicator) -> Communicator:
    """``comm`` with sums in rank order; its ledger has each as the one all-reduce that it is."""
    if comm.rank_ordered:
        return comm
    return comm.around(Ordered(comm.comm)) if isinstance(comm, Metered) else Ordered(comm)
