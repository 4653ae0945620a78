"""The laws as functions of a communicator: every rank calls them, with inputs that differ per rank.

A law that is broken raises on the rank that sees it, which ends all ranks.
"""

import hashlib
import time

import numpy as np

import reference
from distopt import DistOpt, Parameter, device
from distopt.compress import (
    At,
    DeepGradientCompression,
    Dense,
    ErrorFeedback,
    Half,
    OneBit,
    Packed,
    Threshold,
    TopK,
    TwoBit,
)
from distopt.optim import (
    LAMB,
    LANS,
    LARS,
    LBSGD,
    SGD,
    AdaGrad,
    Adam,
    AdamW,
    BatchGradients,
    ExponentialDecay,
    LarsWrapper,
    RMSProp,
)

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


def put(comm, arrays):
    """Arrays where the communicator carries them: themselves, or copies on its GPU."""
    if comm.gpu is None:
        return arrays
    there = [device.gpu_zeros(x.size, x.dtype).reshape(x.shape) for x in arrays]
    for to, x in zip(there, arrays, strict=True):
        device.copy(to, x)
    return there


def there(comm, params):
    """Parameters whose data is there."""
    for p, data in zip(params, put(comm, [p.data for p in params]), strict=True):
        p.data = data
    return params


def summed(comm, x):
    """The sum of numpy arrays over ranks."""
    [found] = put(comm, [x])
    comm.all_reduce(found)
    comm.wait()
    return device.host_copy(found)


class Turn:
    """What ``pairs`` asks of a communicator, for one of several virtual ranks."""

    gpu, xp = None, np

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def pairs(comm, params, step):
    """What a loss yields."""
    return zip(params, put(comm, gradients(params, step, comm.rank)), strict=True)


def sgd():
    """All of SGD's state, and a learning rate that falls on the way."""
    return SGD(ExponentialDecay(0.1, 2, 0.5, staircase=True), momentum=0.9, weight_decay=1e-3)


def plain():
    """The same without momentum, for what has that itself."""
    return SGD(ExponentialDecay(0.1, 2, 0.5, staircase=True), weight_decay=1e-3)


def maker(mode, make):
    """Of the optimizer that a mode is tried with."""
    return plain if mode.startswith("dgc") else make


OPTIMIZERS = {
    "sgd": sgd,
    "plain sgd": lambda: SGD(0.1),
    "nesterov": lambda: SGD(0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda: RMSProp(0.01, epsilon=1e-3),
    "adagrad": lambda: AdaGrad(0.1, epsilon=1e-3),
    "adam": lambda: Adam(0.01, epsilon=1e-3, weight_decay=1e-3),
    "adamw": lambda: AdamW(0.01, epsilon=1e-3, weight_decay=1e-3),
    "lars": lambda: LARS(1.0, momentum=0.9, eta=0.01, weight_decay=1e-3, exclude=["3", "6"]),
    "lamb": lambda: LAMB(0.01, epsilon=1e-3, weight_decay=1e-3, upper_bound=10.0, exclude=["3", "6"]),
    "lans": lambda: LANS(0.01, epsilon=1e-3, weight_decay=1e-3, exclude=["3", "6"]),
    "lbsgd": lambda: LBSGD(0.1, momentum=0.9, batch_scale=2, warmup_strategy="sqrt"),
    "lbsgd lars": lambda: LBSGD(0.01, momentum=0.9, weight_decay=1e-3, warmup_strategy="lars"),
}


def layer_wise(opt=None):
    """LARS around an optimizer, with numbers that show."""
    return LarsWrapper(SGD(ExponentialDecay(0.1, 2, 0.5, staircase=True), 0.9) if opt is None else opt, 0.02, 0.1)


WRAPPERS = {
    "lars": layer_wise,
    "lars with epsilon": lambda: LarsWrapper(Adam(0.01, epsilon=1e-3), epsilon=0.1, exclude=["1", "3"]),
    "batch gradients": lambda: BatchGradients(sgd(), 2),
    "three batches": lambda: BatchGradients(Adam(0.01, epsilon=1e-3), 3),
    "lars of two batches": lambda: BatchGradients(layer_wise(), 2),
    "batches of lars": lambda: layer_wise(BatchGradients(SGD(0.1, 0.9), 2)),
}

DGC = DeepGradientCompression(Packed(TopK(0.1)), weight_decay=1e-2, warmup=[0.5, 0.0, 0.9], steps_per_epoch=1)
DGC_NOW = DeepGradientCompression(Packed(TopK(0.1), value="int8"), weight_decay=1e-2, decay_in_gradient=True)
NESTEROV_DGC = DeepGradientCompression(
    TopK(0.1), 0.8, nesterov=True, clip_norm=2.0, weight_decay=1e-2, exclude_1d=False, min_numel=8
)

# One step of every kind, as a user would write it.
MODES = {
    "dense": lambda opt, loss: opt(loss),
    "half": lambda opt, loss: opt.backward_and_update_half(loss),
    "clipped half": lambda opt, loss: opt.backward_and_update_half(loss, clipping=True, clip_Value=0.5),
    "bfloat16": lambda opt, loss: opt.step(loss, Half("bfloat16")),
    "half with memory": lambda opt, loss: opt.step(loss, ErrorFeedback(Half())),
    "partial": lambda opt, loss: opt.backward_and_partial_update(loss),
    "topk": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=0.1, topK=True),
    "threshold": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=0.7),
    "topk without memory": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=0.1, topK=True, corr=False),
    "topk per tensor": lambda opt, loss: opt.step(loss, ErrorFeedback(TopK(0.1, per_tensor=True))),
    "threshold without memory": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=0.7, corr=False),
    "topk beyond break even": lambda opt, loss: opt.step(loss, ErrorFeedback(TopK(0.9))),
    "2bit": lambda opt, loss: opt.step(loss, ErrorFeedback(TwoBit(0.5))),
    "1bit": lambda opt, loss: opt.step(loss, ErrorFeedback(OneBit())),
    "packed": lambda opt, loss: opt.step(loss, ErrorFeedback(Packed(TopK(0.1)))),
    "packed threshold": lambda opt, loss: opt.step(loss, ErrorFeedback(Packed(Threshold(0.7), value="bfloat16"))),
    "dgc": lambda opt, loss: opt.step(loss, DGC),
    "dgc by gather": lambda opt, loss: opt.step(loss, NESTEROV_DGC, break_even=False),
    "dgc in int8": lambda opt, loss: opt.step(loss, DGC_NOW),
    "dgc of all": lambda opt, loss: opt.step(loss, DeepGradientCompression(TopK(1.0))),
}
WITH_MEMORY = tuple(map(ErrorFeedback, (Half(), TopK(0.1), TwoBit(), OneBit(), Packed(TopK(0.1)))))
CAPTURED = (Dense(), Half(), Half("bfloat16"), TopK(0.1), *WITH_MEMORY, DGC_NOW, NESTEROV_DGC)
LOSE_NOTHING = "dense,threshold,topk,topk per tensor,topk beyond break even,half with memory,2bit,1bit".split(",")
LOSE_NOTHING += ["packed", "packed threshold"]
ELEMENTWISE = (
    "dense",
    "half",
    "bfloat16",
    "half with memory",
    "threshold",
    "topk per tensor",
    "2bit",
    "packed threshold",
    "dgc by gather",
)


def train(
    comm, steps=4, start=0, params=None, opt=None, shapes=SHAPES, dtype="float32", mode="dense", make=sgd, **options
):
    """Some steps of a run; returns (params, opt)."""
    params = there(comm, parameters(shapes, dtype, comm.rank)) if params is None else params
    opt = DistOpt(maker(mode, make)(), comm, **{"threshold": 60} | options) if opt is None else opt
    for step in range(start, start + steps):
        MODES[mode](opt, pairs(comm, params, step))
    return params, opt


def digest(params):
    """A hash of all values, to the bit."""
    return hashlib.sha256(b"".join(device.host_copy(p.data).tobytes() for p in params)).hexdigest()


def same_on_all_ranks(comm, text):
    """Law 5: the same bits on every rank."""
    texts = comm.control.gather(text)
    assert texts == [texts[0]] * comm.size, texts


def conservation(compressor, x, size=1, ulps=0):
    """Law 1: before == after + decompress(compress(before)), to the bit, or within ``ulps`` of the largest of them."""
    at = At(size=size)
    before, out = x.copy(), np.full_like(x, np.nan if compressor.summable else 0)
    payload = compressor.compress(x, {}, at)
    expected = compressor.payload_bytes(x.size, x.itemsize)
    assert expected is None or payload.nbytes == expected
    if payload is x:  # the payload is x itself, x is spent, and the sum stands in x
        out, x = x, np.zeros_like(x)
    compressor.decompress(payload, out, at)
    if ulps:
        largest = np.maximum(np.maximum(abs(x), abs(out)), abs(before))
        assert (abs(x + out - before) <= ulps * np.spacing(largest)).all()
    else:
        np.testing.assert_array_equal(x + out, before)


def nothing_is_lost(comm, mode="dense", dtype="float32"):
    """Law 2: N times what was applied, and what all ranks still keep, are the sum of all gradients."""
    params = parameters(dtype=dtype)
    before = [p.data.astype(np.float64) for p in params]
    params = there(comm, params)
    opt = DistOpt(SGD(1.0), comm, threshold=60)
    total = [np.zeros(p.data.shape) for p in params]
    for step in range(5):
        for rank in range(comm.size):
            for s, g in zip(total, gradients(params, step, rank), strict=True):
                s += g
        MODES[mode](opt, pairs(comm, params, step))
    kept = opt.state_dict()["states"].get("residual", {})
    for p, b, s in zip(params, before, total, strict=True):
        residual = np.zeros(p.data.shape) if not kept else kept[p.name].astype(np.float64)
        residual = summed(comm, residual)
        wire = 2e-3 * comm.size if "half" in mode else 0  # the sum itself is rounded to 16 bits
        np.testing.assert_allclose(
            comm.size * (b - device.host_copy(p.data)) + residual,
            s,
            rtol=0,
            atol=50 * comm.size * TOLERANCE[dtype] + 5 * wire,
        )


def ranks_agree_with_whole_batch(comm, dtype="float32"):
    """Law 3: dense on N ranks is one rank on the whole batch, here the float64 reference."""
    params, _ = train(comm, dtype=dtype)
    lr = [0.1, 0.1, 0.05, 0.05]
    for k, p in enumerate(parameters(dtype=dtype, rank=0)):  # rank 0's initial values were broadcast
        w, b = p.data.astype(np.float64), np.zeros(p.data.shape)
        for step in range(4):
            g = reference.mean([gradients(params, step, r)[k] for r in range(comm.size)])
            w, b = reference.sgd(w, b, g, lr=lr[step], momentum=0.9, weight_decay=1e-3)
        np.testing.assert_allclose(device.host_copy(params[k].data), w, rtol=0, atol=10 * TOLERANCE[dtype])


def ranks_agree_with_one(comm, make):
    """Law 3 for every optimizer: N ranks are one rank with the mean gradient, here computed in float64."""
    params, _ = train(comm, make=make)
    alone, opt = parameters(dtype="float64"), make()
    for a, p in zip(alone, parameters(), strict=True):
        a.data[...] = p.data
    for step in range(4):
        means = [
            reference.mean(parts) for parts in zip(*(gradients(params, step, r) for r in range(comm.size)), strict=True)
        ]
        opt(zip(alone, (np.asarray(m) for m in means), strict=True))
    for p, a in zip(params, alone, strict=True):
        np.testing.assert_allclose(device.host_copy(p.data), a.data, rtol=0, atol=1e-4)


def modes_agree(comm):
    """Law 3: sending everything is dense; one partition and plain SGD are dense; rounding to 16 bits is close to it."""
    steps = MODES | {
        "density 1": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=1.0, topK=True),
        "threshold 0": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=0.0, corr=False),
        "one partition": lambda opt, loss: opt.backward_and_partial_update(loss, threshold=10**6),
    }
    dense, _ = train(comm, make=lambda: SGD(0.1))
    for mode, tolerance in {
        "density 1": 1e-6,
        "threshold 0": 1e-6,
        "one partition": 1e-6,
        "half": 2e-3,
        "bfloat16": 2e-2,
    }.items():
        params, opt = there(comm, parameters(rank=comm.rank)), DistOpt(SGD(0.1), comm, threshold=60)
        for step in range(4):
            steps[mode](opt, pairs(comm, params, step))
        for p, q in zip(params, dense, strict=True):
            exactly, (one, other) = comm.size == 1 and tolerance == 1e-6, map(device.host_copy, (p.data, q.data))
            np.testing.assert_allclose(one, other, rtol=0, atol=0 if exactly else tolerance, err_msg=mode)


def same_bits(comm, mode="dense", make=sgd):
    """Law 5, after every step; in partial mode for the bucket that was just averaged."""
    params, opt = train(comm, steps=0, mode=mode, make=make)
    for step in range(4):
        train(comm, 1, step, params, opt, mode=mode)
        buckets = opt.plan.buckets
        averaged = buckets[step % len(buckets)].names if mode == "partial" else [p.name for p in params]
        same_on_all_ranks(comm, digest(p for p in params if p.name in averaged))


def independence(comm):
    """Law 6: in deterministic mode neither threshold nor message size changes bits; returns the digests by mode."""
    found = []
    for mode in ELEMENTWISE:
        digests = {digest(train(comm, threshold=t, deterministic=True, mode=mode)[0]) for t in (0, 1, 60, 10**6)}
        assert len(digests) == 1, mode
        found.append(digests.pop())
    return found


def resume(comm, mode="dense", make=sgd, stops=(1, 4), **options):
    """Law 7: stopping after a call and going on from state_dict is never having stopped, bit for bit."""
    options |= {"mode": mode, "make": make}
    unbroken, _ = train(comm, steps=6, **options)
    for stop in stops:
        params, opt = train(comm, steps=stop, **options)
        saved = opt.state_dict()
        train(comm, steps=2, start=stop, params=params, opt=opt, **options)  # must not change what was saved
        params, _ = train(comm, steps=stop, **options)
        _, again = train(comm, steps=0, **options)
        again.load_state_dict(saved)
        train(comm, 6 - stop, stop, params, again, **options)
        assert digest(params) == digest(unbroken), (mode, stop)


def share(params, opt):
    """Move the parameters into memory that all ranks share."""
    for p, view in zip(params, opt.parameter_views(params), strict=True):
        p.data = view
    return params, opt


SHARDED = (  # who updates what does not depend on what was sent: most modes are tried with one of these
    {},
    {"nonfinite": "propagate"},
    {"overlap": True, "clip_norm": 2.0},
    {"dtype": "float64", "num_batches": 2, "deterministic": True},
    {"nonfinite": "propagate", "clip_norm": 2.0},
)


def sharding_changes_no_bit(comm, mode="dense", make=sgd, **options):
    """Law 6 once more: each rank updates its share of parameters that all share; stopped and resumed in the middle."""
    options |= {"mode": mode, "make": make}
    expected, plain = train(comm, steps=5, **options)
    params, opt = share(*train(comm, steps=0, **options))
    train(comm, 3, 0, params, opt, **options)
    saved = opt.state_dict()
    params, opt = share(*[params, train(comm, steps=0, **options)[1]])
    opt.load_state_dict(saved)
    train(comm, 2, 3, params, opt, **options)
    assert digest(params) == digest(expected), (mode, opt.opt)
    assert_equal_states(opt.state_dict(), plain.state_dict())
    comm.barrier()  # others still read these parameters


def overlap_changes_no_bit(comm, mode="dense"):
    """Law 6: whether buckets travel while gradients are computed or afterwards; gradients come one by one, late."""
    options = {"deterministic": True}  # overlapped or not; without overlap, shared memory adds in rank order anyway
    expected, _ = train(comm, steps=4, mode=mode, **options)
    params, opt = train(comm, steps=0, mode=mode, overlap=True, **options)
    for step in range(4):
        backward = pairs(comm, params, step)
        MODES[mode](opt, ((p, g) for p, g in backward if time.sleep(2e-4 * comm.rank) is None))
    assert digest(params) == digest(expected), mode


def train_captured(comm, compressor=None, make=sgd, captured=True, nan_at=(), **options):
    """Six steps whose gradients a "backward pass" writes to the same arrays each time; returns (params, opt)."""
    params = there(comm, parameters(rank=comm.rank))
    opt = DistOpt(
        maker("dgc" if compressor in (DGC_NOW, NESTEROV_DGC) else "", make)(), comm, **{"threshold": 60} | options
    )
    views = opt.gradient_views(params)
    given = put(comm, [np.zeros(p.data.shape, p.data.dtype) for p in params])  # what backward makes of its inputs

    def loss():
        for view, x in zip(views, given, strict=True):
            device.copy(view, x)
        return zip(params, views, strict=True)

    def feed(step):
        for x, g in zip(given, gradients(params, step, comm.rank), strict=True):
            if step in nan_at and comm.rank == comm.size - 1:
                g[...] = np.nan
            device.copy(x, g)

    feed(0)
    step = opt.capture(loss, compressor) if captured else lambda: opt.step(loss, compressor)
    for k in range(captured, 6):
        feed(k)
        step()
    return params, opt


def capture_changes_no_bit(comm, compressor=None, **options):
    """Law 6 for a step as a CUDA graph: replay is the same as eager, steps that are refused included."""
    eager, captured = (train_captured(comm, compressor, captured=c, **options) for c in (False, True))
    assert digest(captured[0]) == digest(eager[0]), compressor
    assert_equal_states(captured[1].state_dict(), eager[1].state_dict())


def assert_equal_states(a, b):
    """The same numbers and arrays, to the bit."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal_states(a[key], b[key])
    else:
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def each_once(comm):
    """Each law that needs a communicator, in the modes that differ most: what the default tier has time for."""
    ranks_agree_with_whole_batch(comm)
    ranks_agree_with_one(comm, OPTIMIZERS["adam"])
    modes_agree(comm)
    for mode in ("topk", "2bit"):
        nothing_is_lost(comm, mode)
    for mode in ("dense", "half", "partial", "topk"):
        same_bits(comm, mode)
        resume(comm, mode, stops=(3,))
        overlap_changes_no_bit(comm, mode)
    sharding_changes_no_bit(comm)
    independence(comm)


def all_of_them(comm):
    """Every law that needs a communicator; returns what other transports must reproduce."""
    for dtype in TOLERANCE:
        ranks_agree_with_whole_batch(comm, dtype)
        for mode in LOSE_NOTHING:
            nothing_is_lost(comm, mode, dtype)
    for make in OPTIMIZERS.values():
        ranks_agree_with_one(comm, make)
        same_bits(comm, make=make)
        resume(comm, make=make, stops=(3,))
        if comm.gpu is None:
            sharding_changes_no_bit(comm, make=make)
    modes_agree(comm)
    for number, mode in enumerate(MODES):
        same_bits(comm, mode)
        resume(comm, mode)
        resume(comm, mode, stops=(1, 2), num_batches=2)
        if mode != "partial" and comm.gpu is None:
            every = SHARDED if mode in ("dense", "topk") else SHARDED[number % len(SHARDED) :][:1]
            for options in every:
                sharding_changes_no_bit(comm, mode, **options)
        overlap_changes_no_bit(comm, mode)
    resume(comm, "topk", num_batches=3, sync_on_apply=False, deterministic=True)
    return {"digests": np.array(independence(comm))}
