"""Payloads that cannot be added on the wire: all of them to all ranks, and the sum is formed there, in rank order."""

import numpy as np

from distopt import cost
from distopt.comm import Communicator
from distopt.compress import At, Compressor


def gather(x: np.ndarray, compressor: Compressor, comm: Communicator, state: dict[str, np.ndarray], at: At) -> None:
    """Replace x by the sum over ranks of what each rank's compressor took from it."""
    payload = compressor.compress(x, state, at)
    x.fill(0)
    for one in comm.all_gather(payload, ragged=True):
        compressor.decompress(one, x, at)


def gather_or_reduce(
    x: np.ndarray, compressor: Compressor, comm: Communicator, state: dict[str, np.ndarray], at: At
) -> None:
    """The same, but all-reduced as a dense array of the entries that were taken, where that is fewer bytes.

    All ranks learn all lengths first (8 bytes a rank), so that they decide alike; what is sent does not depend on it.
    """
    payload = compressor.compress(x, state, at)
    lengths = comm.all_gather(np.array([payload.nbytes]))
    x.fill(0)
    if cost.all_gather(int(sum(n[0] for n in lengths)), comm.size) > cost.all_reduce(x.nbytes, comm.size):
        compressor.decompress(payload, x, at)
        comm.all_reduce(x)
        return
    for one in comm.all_gather(payload, ragged=True):
        compressor.decompress(one, x, at)
