"""Sums that do not depend on who computes them."""

import numpy as np

from distopt.comm.communicator import Communicator, Wrapper, checked, slices


class Ordered(Wrapper):
    """A communicator whose all_reduce adds in rank order: the same bits on any transport and in any chunking.

    Slices go to their owners by all_to_all, are added there in rank order, and are gathered: the bytes of a ring.
    """

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        self.rank_ordered = True

    def all_reduce(self, x: np.ndarray) -> None:
        """Replace x, in place, by its sum over ranks, added in rank order."""
        flat = checked(x)
        parts = self.comm.all_gather(self.comm.reduce_scatter(flat), ragged=True)
        for part, s in zip(parts, slices(flat.size, self.size), strict=True):
            flat[s] = part
