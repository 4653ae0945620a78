"""Payloads that can be added on the wire: one all-reduce."""

import numpy as np

from distopt.comm import Communicator
from distopt.compress import At, Compressor


def reduce(x: np.ndarray, compressor: Compressor, comm: Communicator, state: dict[str, np.ndarray], at: At) -> None:
    """Replace x by the sum over ranks of what each rank's compressor took from it.

    What that leaves in x nobody reads, so that a compressor that can ``copy`` need not write it.
    """
    with comm.aside():
        payload = getattr(compressor, "copy", compressor.compress)(x, state, at)
        comm.all_reduce(payload)
        compressor.decompress(payload, x, at)
