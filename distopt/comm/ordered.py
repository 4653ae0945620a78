"""Sums that do not depend on who computes them."""

import numpy as np

from distopt.comm.communicator import Communicator, Wrapper, all_reduce_in_rank_order


class Ordered(Wrapper):
    """A communicator whose all_reduce adds in rank order: the same bits on any transport and in any chunking."""

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        self.rank_ordered = True

    def all_reduce(self, x: np.ndarray) -> None:
        """Replace x, in place, by its sum over ranks, added in rank order."""
        all_reduce_in_rank_order(self.comm, x)
