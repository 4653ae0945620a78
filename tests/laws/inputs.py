"""What the laws are tried on: parameters and gradients that differ per rank and step."""

import numpy as np

from distopt import Parameter, device

SHAPES = [(3, 4), (50,), (7,), (), (0,), (200,), (2, 3, 5), (1,)]
TOLERANCE = {"float32": 2e-6, "float64": 1e-14}  # relative, for sums of up to 8 ranks over a few steps


def parameters(shapes=SHAPES, dtype="float32", rank=0):
    """Named parameters whose values differ per rank."""
    rng = np.random.default_rng([7, rank])
    return [Parameter(f"p{k}", rng.standard_normal(s).astype(dtype)) for k, s in enumerate(shapes)]


def gradients(params, step, rank):
    """Gradients that differ per step and rank."""
    rng = np.random.default_rng([11, step, rank])
    return [np.asarray(rng.standard_normal(p.data.shape), p.data.dtype) for p in params]


def to_device(comm, arrays):
    """Arrays where the communicator carries them: themselves, or copies on its GPU."""
    if comm.gpu is None:
        return arrays
    copies = [device.gpu_zeros(x.size, x.dtype).reshape(x.shape) for x in arrays]
    for to, x in zip(copies, arrays, strict=True):
        device.copy(to, x)
    return copies


def move_to_device(comm, params):
    """The same parameters, with their data where the communicator carries it."""
    for p, data in zip(params, to_device(comm, [p.data for p in params]), strict=True):
        p.data = data
    return params


def summed(comm, x):
    """The sum of numpy arrays over ranks."""
    [total] = to_device(comm, [x])
    comm.all_reduce(total)
    comm.wait()
    return device.host_copy(total)


class VirtualRank:
    """What ``pairs`` asks of a communicator, for one of several virtual ranks."""

    gpu, xp = None, np

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def pairs(comm, params, step):
    """Pairs of a parameter and this rank's gradient, as a loss yields them."""
    return zip(params, to_device(comm, gradients(params, step, comm.rank)), strict=True)


def three_parameters(dtype="float32"):
    """Parameters a, b and c, of ones."""
    return [Parameter(n, np.ones(s, dtype)) for n, s in (("a", (3, 2)), ("b", (4,)), ("c", ()))]


def constant_pairs(params, value=1.0):
    """Each parameter with a gradient of one value."""
    return [(p, np.full(p.data.shape, value, p.data.dtype)) for p in params]
