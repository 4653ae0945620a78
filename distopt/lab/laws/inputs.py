"""What the laws are tried on: parameters and gradients that differ per rank and step, and arrays of every kind."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from distopt import device
from distopt.comm import Communicator
from distopt.engine.parameters import Parameter

SHAPES: list[tuple[int, ...]] = [(3, 4), (50,), (7,), (), (0,), (200,), (2, 3, 5), (1,)]
TOLERANCE = {"float32": 2e-6, "float64": 1e-14}  # relative, for sums of up to 8 ranks over a few steps


def parameters(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: str = "float32", rank: int = 0, seed: int = 0
) -> list[Parameter]:
    """Named parameters whose values differ per rank."""
    rng = np.random.default_rng([7, rank, seed])
    return [Parameter(f"p{k}", np.asarray(rng.standard_normal(s), dtype)) for k, s in enumerate(shapes)]


def gradients(params: Sequence[Parameter], step: int, rank: int, seed: int = 0) -> list[np.ndarray]:
    """Gradients that differ per step and rank."""
    rng = np.random.default_rng([11, step, rank, seed])
    return [np.asarray(rng.standard_normal(p.data.shape), p.data.dtype) for p in params]


def to_device(comm: Communicator, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Arrays where the communicator carries them: themselves, or copies on its GPU."""
    if comm.gpu is None:
        return arrays
    copies = [device.gpu_zeros(x.size, x.dtype).reshape(x.shape) for x in arrays]
    for to, x in zip(copies, arrays, strict=True):
        device.copy(to, x)
    return copies


def move_to_device(comm: Communicator, params: list[Parameter]) -> list[Parameter]:
    """The same parameters, with their data where the communicator carries it."""
    for p, data in zip(params, to_device(comm, [p.data for p in params]), strict=True):
        p.data = data
    return params


def summed(comm: Communicator, x: np.ndarray) -> np.ndarray:
    """The sum of numpy arrays over ranks."""
    [total] = to_device(comm, [x])
    comm.all_reduce(total)
    comm.wait()
    return device.host_copy(total)


def pairs(
    comm: Communicator, params: list[Parameter], step: int, seed: int = 0
) -> Iterator[tuple[Parameter, np.ndarray]]:
    """Pairs of a parameter and this rank's gradient, as a loss yields them."""
    return zip(params, to_device(comm, gradients(params, step, comm.rank, seed)), strict=True)


KINDS: dict[str, Callable[[np.random.Generator, int, Any], np.ndarray]] = {
    "normal": lambda rng, n, dtype: rng.standard_normal(n).astype(dtype),
    "constant": lambda rng, n, dtype: np.full(n, rng.standard_normal(), dtype),
    "subnormal": lambda rng, n, dtype: np.finfo(dtype).smallest_subnormal * rng.integers(-1000, 1000, n).astype(dtype),
    "tied": lambda rng, n, dtype: rng.integers(-3, 4, n).astype(dtype),
    "wide": lambda rng, n, dtype: (rng.standard_normal(n) * 2.0 ** rng.integers(-20, 20, n)).astype(dtype),
}
