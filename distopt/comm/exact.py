"""Sums of singles that do not depend on their order, whoever has added up which of them first."""

from collections.abc import Sequence

import numpy as np

from distopt import device, kernels
from distopt.comm.byte_counts import Moved
from distopt.comm.communicator import Communicator, Wrapper, as_flat, slices
from distopt.comm.metered import Metered
from distopt.comm.ordered import Slices, in_rank_order
from distopt.kernels.layout import CHUNK


class Exact(Wrapper):
    """Communicator whose ``all_reduce`` of float32 rounds numbers to a grid on which doubles add up exactly.

    So the sum is the same in any order, and ranks that live in one process are added up before they are sent.  The grid
    of each 4,096 elements is 2^-49 of the largest magnitude that any of them has on any rank, or finer, for up to 16
    ranks.  Eight bytes of each element are sent, and four come back; a step adds up in shared memory where there is
    such.  Other dtypes are added in rank order.

    Args:
        comm: the communicator that carries the data.

    Example:
        >>> import numpy as np
        >>> from distopt.comm import Exact, run_ranks
        >>> def main(comm):
        ...     x = np.array([1e8, 1.0, -1e8], np.float32)[[comm.rank]]
        ...     Exact(comm).all_reduce(x)
        ...     return x.item()
        >>> run_ranks(3, main)  # in rank order, and in float32, it is 0
        [1.0, 1.0, 1.0]
    """

    exact = True

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        self.algorithm = ExactSlices(comm.algorithm)

    def all_reduce(self, x: np.ndarray, op: str = "sum") -> None:
        """Replace x, in place, by its sum over ranks, or another reduction.  Collective."""
        if x.dtype != np.float32 or op != "sum":
            self.comm.all_reduce(x, op)
        else:
            self.transaction_on(x, "all_reduce", lambda: sum_exactly(self.comm, [x], self.size))


class ExactSlices(Slices):
    """Routes of exact sums: of magnitudes, of doubles to owners of slices, and of singles from these."""

    def all_reduce(self, shares: Sequence[int], rank: int) -> Moved:
        chunks = -(-sum(shares) // (4 * CHUNK))
        magnitudes = self._gathers.all_gather([4 * chunks] * len(shares), rank)
        phases = self.reduce_scatter([2 * n for n in shares], rank), self._gathers.all_gather(shares, rank)
        return Moved(*(tuple(map(sum, zip(*parts, strict=True))) for parts in zip(magnitudes, *phases, strict=True)))


def sum_exactly(comm: Communicator, arrays: Sequence[np.ndarray], ranks: int) -> None:
    """Replace the last of these arrays of ranks that live here by the sum of all ranks' ``ranks`` ones.  Collective."""
    flats = [as_flat(x, gpu=device.gpu_of(x)) for x in arrays]
    n = flats[-1].size
    with comm.on_comm_stream():
        most, total = largest_of_ranks(comm, flats), device.zeros(n, np.float64, like=flats[-1])
        bits = max(2, (ranks - 1).bit_length())
        for x in flats:
            kernels.add_on_grid(x, total, most, bits)
        sums = comm.reduce_scatter(total)
        mine = device.empty(sums.size, np.float32, like=flats[-1])
        kernels.round_sums(sums, mine)
        for part, s in zip(comm.all_gather(mine, ragged=True), slices(n, comm.size), strict=True):
            device.copy(flats[-1][s], part)


def largest_of_ranks(comm: Communicator, flats: Sequence[np.ndarray]) -> np.ndarray:
    """Return the largest magnitude that each 4,096 elements of such flat arrays have on any rank.  Collective."""
    most: np.ndarray = device.zeros(-(-flats[-1].size // CHUNK), np.float32, like=flats[-1])
    for x in flats:
        kernels.largest_magnitudes(x, most)
    for of_process in comm.all_gather(most):
        np.maximum(most, of_process, out=most)
    return most


def as_deterministic(comm: Communicator, deterministic: bool | str) -> Communicator:
    """Return a communicator of these ranks whose sums are as that argument of ``DistOpt`` says."""
    if not isinstance(deterministic, bool) and deterministic != "exact":
        raise TypeError(f"deterministic must be True, False or 'exact', got {deterministic!r}")
    if deterministic != "exact":
        return in_rank_order(comm) if deterministic else comm
    if comm.exact:
        return comm
    ordered = in_rank_order(comm)
    return ordered.around(Exact(ordered.comm)) if isinstance(ordered, Metered) else Exact(ordered)
