"""The laws as functions of a communicator: every rank calls them, with inputs that differ per rank.

A law that is broken raises on the rank that sees it, which ends all ranks.
"""

import hashlib

import numpy as np

import reference
from distopt import DistOpt, Parameter
from distopt.compress import At
from distopt.optim import SGD, ExponentialDecay

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


def sgd():
    """All of SGD's state, and a learning rate that falls on the way."""
    return SGD(ExponentialDecay(0.1, 2, 0.5, staircase=True), momentum=0.9, weight_decay=1e-3)


def train(comm, steps=4, start=0, params=None, opt=None, shapes=SHAPES, dtype="float32", **options):
    """Some steps of a run; returns (params, opt)."""
    params = parameters(shapes, dtype, comm.rank) if params is None else params
    opt = DistOpt(sgd(), comm, **{"threshold": 60} | options) if opt is None else opt
    for step in range(start, start + steps):
        opt(zip(params, gradients(params, step, comm.rank), strict=True))
    return params, opt


def digest(params):
    """A hash of all values, to the bit."""
    return hashlib.sha256(b"".join(p.data.tobytes() for p in params)).hexdigest()


def same_on_all_ranks(comm, text):
    """Law 5: the same bits on every rank."""
    texts = comm.control.gather(text)
    assert texts == [texts[0]] * comm.size, texts


def conservation(compressor, x):
    """Law 1: before == after + decompress(compress(before)), to the bit for a lossless compressor."""
    before, out = x.copy(), np.full_like(x, np.nan if compressor.summable else 0)
    payload = compressor.compress(x, {}, At())
    if payload is x:  # the payload is x itself, x is spent, and the sum stands in x
        out, x = x, np.zeros_like(x)
    compressor.decompress(payload, out, At())
    np.testing.assert_array_equal(x + out, before)


def nothing_is_lost(comm, dtype="float32"):
    """Law 2: N times what was applied is the sum of all gradients."""
    params = parameters(dtype=dtype)
    before = [p.data.astype(np.float64) for p in params]
    opt = DistOpt(SGD(1.0), comm, threshold=60)
    total = [np.zeros(p.data.shape) for p in params]
    for step in range(5):
        for rank in range(comm.size):
            for s, g in zip(total, gradients(params, step, rank), strict=True):
                s += g
        opt(zip(params, gradients(params, step, comm.rank), strict=True))
    for p, b, s in zip(params, before, total, strict=True):
        np.testing.assert_allclose(comm.size * (b - p.data), s, rtol=0, atol=50 * comm.size * TOLERANCE[dtype])


def ranks_agree_with_whole_batch(comm, dtype="float32"):
    """Law 3: dense on N ranks is one rank on the whole batch, here the float64 reference."""
    params, _ = train(comm, dtype=dtype)
    lr = [0.1, 0.1, 0.05, 0.05]
    for k, p in enumerate(parameters(dtype=dtype, rank=0)):  # rank 0's initial values were broadcast
        w, b = p.data.astype(np.float64), np.zeros(p.data.shape)
        for step in range(4):
            g = reference.mean([gradients(params, step, r)[k] for r in range(comm.size)])
            w, b = reference.sgd(w, b, g, lr=lr[step], momentum=0.9, weight_decay=1e-3)
        np.testing.assert_allclose(params[k].data, w, rtol=0, atol=10 * TOLERANCE[dtype])


def same_bits(comm):
    """Law 5, after every step."""
    params, opt = train(comm, steps=1)
    same_on_all_ranks(comm, digest(params))
    for step in range(1, 4):
        train(comm, 1, step, params, opt)
        same_on_all_ranks(comm, digest(params))


def independence(comm):
    """Law 6: in deterministic mode neither threshold nor message size changes bits; returns their digest."""
    digests = {digest(train(comm, threshold=t, deterministic=True)[0]) for t in (0, 1, 60, 10**6)}
    assert len(digests) == 1, digests
    return digests.pop()


def resume(comm, **options):
    """Law 7: stopping after any call and going on from state_dict is never having stopped, bit for bit."""
    unbroken, _ = train(comm, steps=6, **options)
    for stop in range(1, 6):
        params, opt = train(comm, steps=stop, **options)
        saved = opt.state_dict()
        train(comm, steps=2, start=stop, params=params, opt=opt, **options)  # must not change what was saved
        params, _ = train(comm, steps=stop, **options)
        again = DistOpt(sgd(), comm, **{"threshold": 60} | options)
        again.load_state_dict(saved)
        train(comm, 6 - stop, stop, params, again)
        assert digest(params) == digest(unbroken), stop


def all_of_them(comm):
    """Every law that needs a communicator; returns what other transports must reproduce."""
    for dtype in TOLERANCE:
        nothing_is_lost(comm, dtype)
        ranks_agree_with_whole_batch(comm, dtype)
    same_bits(comm)
    resume(comm)
    resume(comm, num_batches=2)
    resume(comm, num_batches=3, sync_on_apply=False, deterministic=True)
    return {"digest": np.array(independence(comm))}
