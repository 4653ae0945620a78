"""What tests are tried on beside the package's: virtual ranks, small parameters, and the error of all ranks."""

import numpy as np

from distopt import Parameter, run_ranks
from distopt.lab.laws.inputs import *  # noqa: F403


class VirtualRank:
    """What ``pairs`` asks of a communicator, for one of several virtual ranks."""

    gpu, xp = None, np

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def three_parameters(dtype="float32"):
    """Parameters a, b and c, of ones."""
    return [Parameter(n, np.ones(s, dtype)) for n, s in (("a", (3, 2)), ("b", (4,)), ("c", ()))]


def constant_pairs(params, value=1.0):
    """Each parameter with a gradient of one value."""
    return [(p, np.full(p.data.shape, value, p.data.dtype)) for p in params]


def texts_of(size, main, kind=Exception):
    """The text of the error that ``main`` raises, for every rank; all ranks must raise the same type."""

    def catch(comm):
        try:
            main(comm)
        except kind as error:
            return type(error), str(error)
        raise AssertionError(f"rank {comm.rank} did not raise {kind}")

    errors = run_ranks(size, catch)
    assert len(set(errors)) == 1, errors
    return errors[0][1]
