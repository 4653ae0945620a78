"""Payloads that cannot be added on the wire: all of them to all ranks, and the sum is formed there, in rank order."""

import numpy as np

from distopt.comm import Communicator
from distopt.compress import At, Compressor
from distopt.compress.compressor import decompress_all, look
from distopt.exchange.traffic import dense_is_less


def gather(x: np.ndarray, compressor: Compressor, comm: Communicator, state: dict[str, np.ndarray], at: At) -> None:
    """Replace x by the sum over ranks of what each rank's compressor took from it."""
    with comm.aside():
        payload = compressor.compress(x, state, at)
        decompress_all(compressor, from_all(payload, x, compressor, comm, at), x, at)


def gather_or_reduce(
    x: np.ndarray, compressor: Compressor, comm: Communicator, state: dict[str, np.ndarray], at: At
) -> None:
    """The same, but all-reduced as a dense array of the entries that were taken, where that is fewer bytes.

    Where lengths differ, all ranks learn all of them first (8 bytes a rank), so that they decide alike; what is sent
    does not depend on it.
    """
    with comm.aside():
        payload = compressor.compress(x, state, at)
        ragged = compressor.ragged and at.room is None
        total = sum(comm.lengths(payload.nbytes)) if ragged else payload.nbytes * comm.size
        if dense_is_less(total, 0, x.nbytes, comm.size):
            decompress_all(compressor, [payload], x, at)
            comm.all_reduce(x)
        else:
            decompress_all(compressor, from_all(payload, x, compressor, comm, at), x, at)


def from_all(
    payload: np.ndarray, x: np.ndarray, compressor: Compressor, comm: Communicator, at: At
) -> list[np.ndarray]:
    """Every rank's payload."""
    with comm.on_behalf_of(at.purpose._replace(look=lambda payload: look(compressor, payload, x, at))):
        if compressor.ragged and at.room is None:
            return comm.all_gather(payload, ragged=True)
        return comm.all_gather(payload, into=at.scratch("payloads", payload.nbytes * comm.size))
