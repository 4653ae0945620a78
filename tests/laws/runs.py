"""Runs of some steps, and what is compared after them."""

import hashlib

import numpy as np

from distopt import DistOpt, device, run_ranks
from laws.inputs import SHAPES, gradients, move_to_device, pairs, parameters, to_device
from laws.modes import DGC_NOW, MODES, NESTEROV_DGC, maker_for, sgd


def train(
    comm, steps=4, start=0, params=None, opt=None, shapes=SHAPES, dtype="float32", mode="dense", make=sgd, **options
):
    """Some steps of a run; returns (params, opt)."""
    params = move_to_device(comm, parameters(shapes, dtype, comm.rank)) if params is None else params
    opt = DistOpt(maker_for(mode, make)(), comm, **{"threshold": 60} | options) if opt is None else opt
    for step in range(start, start + steps):
        MODES[mode](opt, pairs(comm, params, step))
    return params, opt


def digest(params):
    """A hash of all values, to the bit."""
    return hashlib.sha256(b"".join(device.host_copy(p.data).tobytes() for p in params)).hexdigest()


def assert_same_bits(found, expected, what):
    """The same values, to the bit; else where they differ, by how much, and where they lie."""
    lines = []
    for p, q in zip(found, expected, strict=True):
        a, b = (device.host_copy(x.data).reshape(-1) for x in (p, q))
        bits = [x.view(f"u{x.itemsize}") for x in (a, b)]
        for k in np.flatnonzero(bits[0] != bits[1])[:20]:
            at = device.address(p.data) + int(k) * a.itemsize
            lines.append(f"{p.name}[{k}] at {at:#x} is {a[k]} ({bits[0][k]:#x}), not {b[k]} ({bits[1][k]:#x})")
    assert not lines, "\n".join([str(what), *lines])


def share(params, opt):
    """Move the parameters into memory that all ranks share."""
    for p, view in zip(params, opt.parameter_views(params), strict=True):
        p.data = view
    return params, opt


def train_captured(comm, compressor=None, make=sgd, captured=True, nan_at=(), **options):
    """Six steps whose gradients a "backward pass" writes to the same arrays each time; returns (params, opt).

    It writes each as it yields it, so that buckets are sent meanwhile, and NaNs come in the last one alone.
    """
    params = move_to_device(comm, parameters(rank=comm.rank))
    opt = DistOpt(
        maker_for("dgc" if compressor in (DGC_NOW, NESTEROV_DGC) else "", make)(), comm, **{"threshold": 60} | options
    )
    views = opt.gradient_views(params)
    given = to_device(comm, [np.zeros(p.data.shape, p.data.dtype) for p in params])  # what backward makes of its inputs

    def loss():
        for param, view, x in zip(params, views, given, strict=True):
            device.copy(view, x)
            yield param, view

    def feed(step):
        grads = gradients(params, step, comm.rank)
        if step in nan_at and comm.rank == comm.size - 1:
            grads[-1][...] = np.nan
        for x, g in zip(given, grads, strict=True):
            device.copy(x, g)

    feed(0)
    step = opt.capture(loss, compressor) if captured else lambda: opt.step(loss, compressor)
    for k in range(captured, 6):
        feed(k)
        step()
    return params, opt


def assert_equal_states(a, b):
    """The same numbers and arrays, to the bit."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal_states(a[key], b[key])
    else:
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


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
