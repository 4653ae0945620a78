"""A bucket of which some members are summed as they are, while payloads of the others are gathered."""

import math

import numpy as np

from distopt import kernels
from distopt.comm import Communicator
from distopt.compress import At, Compressor
from distopt.compress.compressor import decompress_all, table
from distopt.exchange.gather import from_all
from distopt.exchange.traffic import dense_is_less


class Apart:
    """The members of x that a compressor has left whole, moved together, unless that is all of x."""

    def __init__(self, x: np.ndarray, compressor: Compressor, at: At):
        members = table(x, at)
        chosen: np.ndarray = compressor.whole(members, at).host != 0  # type: ignore[attr-defined]
        self.all, self.none = bool(chosen.all()), not chosen.any()
        self.flat, self.members = x, members
        if not self.all:
            self.members = members.only(chosen).closely(x)
            self.flat = at.scratch("whole", self.members.extent * x.itemsize).view(x.dtype)
            found = at.scratch("whole and not finite", 8 * chosen.size).view(np.int64)
            kernels.pack(self.members, self.flat, 1.0, found, math.inf)

    def put_back(self) -> None:
        """Let x have them."""
        kernels.unpack(self.members, self.flat, 1.0)


def mixed(x: np.ndarray, compressor: Compressor, comm: Communicator, state: dict[str, np.ndarray], at: At) -> None:
    """Replace x by the sum over ranks of what each rank's compressor took from it, and of the members left whole."""
    with comm.aside():
        payload = compressor.compress(x, state, at)
        _sum(x, payload, Apart(x, compressor, at), compressor, comm, at)


def mixed_or_reduce(
    x: np.ndarray, compressor: Compressor, comm: Communicator, state: dict[str, np.ndarray], at: At
) -> None:
    """The same, but all-reduced as one dense array of what was taken, where that is fewer bytes."""
    with comm.aside():
        payload = compressor.compress(x, state, at)
        apart = Apart(x, compressor, at)
        summed = 0 if apart.none else apart.flat.nbytes
        if not apart.all and dense_is_less(payload.nbytes * comm.size, summed, x.nbytes, comm.size):
            decompress_all(compressor, [payload], x, at)
            apart.put_back()
            comm.all_reduce(x)
        else:
            _sum(x, payload, apart, compressor, comm, at)


def _sum(x: np.ndarray, payload: np.ndarray, apart: Apart, compressor: Compressor, comm: Communicator, at: At) -> None:
    if apart.all:
        comm.all_reduce(x)
        return
    if not apart.none:
        with comm.on_behalf_of(at.purpose._replace(members=apart.members)):
            comm.all_reduce(apart.flat)
    decompress_all(compressor, from_all(payload, x, compressor, comm, at), x, at)
    apart.put_back()
