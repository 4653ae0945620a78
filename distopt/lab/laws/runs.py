"""Runs of some steps, and what is compared after them."""

import functools
import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from distopt import device
from distopt.comm import Communicator
from distopt.compress import Compressor
from distopt.dist_opt import DistOpt
from distopt.engine.parameters import Parameter
from distopt.lab.laws.inputs import SHAPES, gradients, move_to_device, pairs, parameters, to_device
from distopt.lab.laws.modes import MODES, Make, maker_for, sgd, sgd_without_momentum

Run = tuple[list[Parameter], DistOpt]


# not an assert statement, which ``python -O`` leaves out
def require(holds: object, text: object) -> None:
    """Raise AssertionError unless something holds."""
    if not holds:
        raise AssertionError(text)


def train(
    comm: Communicator,
    steps: int = 4,
    start: int = 0,
    params: list[Parameter] | None = None,
    opt: DistOpt | None = None,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    dtype: str = "float32",
    mode: str = "dense",
    make: Make = sgd,
    seed: int = 0,
    **options: Any,
) -> Run:
    """Some steps of a run; returns (params, opt)."""
    params = move_to_device(comm, parameters(shapes, dtype, comm.rank, seed)) if params is None else params
    opt = DistOpt(maker_for(mode, make)(), comm, **{"threshold": 60} | options) if opt is None else opt
    for step in range(start, start + steps):
        MODES[mode](opt, pairs(comm, params, step, seed))
    return params, opt


def digest(params: Sequence[Parameter]) -> str:
    """A hash of all values, to the bit."""
    return hashlib.sha256(b"".join(device.host_copy(p.data).tobytes() for p in params)).hexdigest()


def assert_same_bits(found: Sequence[Parameter], expected: Sequence[Parameter], what: object) -> None:
    """The same values, to the bit; else where they differ, by how much, and where they lie."""
    lines = []
    for p, q in zip(found, expected, strict=True):
        a, b = (device.host_copy(x.data).reshape(-1) for x in (p, q))
        bits = [x.view(f"u{x.itemsize}") for x in (a, b)]
        for k in np.flatnonzero(bits[0] != bits[1])[:20]:
            at = device.address(p.data) + int(k) * a.itemsize
            lines.append(f"{p.name}[{k}] at {at:#x} is {a[k]} ({bits[0][k]:#x}), not {b[k]} ({bits[1][k]:#x})")
    require(not lines, "\n".join([str(what), *lines]))


def share(params: list[Parameter], opt: DistOpt) -> Run:
    """Move the parameters into memory that all ranks share."""
    for p, view in zip(params, opt.parameter_views(params), strict=True):
        p.data = view
    return params, opt


def train_captured(
    comm: Communicator,
    compressor: Compressor | None = None,
    make: Make = sgd,
    captured: bool = True,
    nan_at: Collection[int] = (),
    **options: Any,
) -> Run:
    """Six steps whose gradients a "backward pass" writes to the same arrays each time; returns (params, opt).

    It writes each as it yields it, so that buckets are sent meanwhile, and NaNs come in the last one alone.
    """
    params = move_to_device(comm, parameters(rank=comm.rank))
    make = sgd_without_momentum if compressor and compressor.traits.corrects_momentum else make
    opt = DistOpt(make(), comm, **{"threshold": 60} | options)
    views = opt.gradient_views(params)
    given = to_device(comm, [np.zeros(p.data.shape, p.data.dtype) for p in params])  # what backward makes of its inputs

    def loss() -> Iterator[tuple[Parameter, np.ndarray]]:
        for param, view, x in zip(params, views, given, strict=True):
            device.copy(view, x)
            yield param, view

    def feed(step: int) -> None:
        grads = gradients(params, step, comm.rank)
        if step in nan_at and comm.rank == comm.size - 1:
            grads[-1][...] = np.nan
        for x, g in zip(given, grads, strict=True):
            device.copy(x, g)

    feed(0)
    step: Any = opt.capture(loss, compressor) if captured else functools.partial(opt.step, loss, compressor)
    for k in range(captured, 6):
        feed(k)
        step()
    return params, opt


def assert_equal_states(a: Any, b: Any, path: str = "state") -> None:
    """The same numbers and arrays, to the bit."""
    require(type(a) is type(b), f"{path} is {a!r:.100}, not {b!r:.100}")
    if isinstance(a, dict):
        require(a.keys() == b.keys(), f"{path} has {list(a)}, not {list(b)}")
        for key in a:
            assert_equal_states(a[key], b[key], f"{path}/{key}")
    else:
        require(np.asarray(a).tobytes() == np.asarray(b).tobytes(), f"{path} is {a!r:.100}, not {b!r:.100}")
