"""The laws as functions of a communicator: every rank calls them, with inputs that differ per rank.

A law that is broken raises on the rank that sees it, which ends all ranks.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import time

import numpy as np

import reference
from distopt import DistOpt, device
from distopt.compress import ExchangeContext, Threshold, TopK
from distopt.optim import SGD
from laws.inputs import TOLERANCE, gradients, move_to_device, pairs, parameters, summed
from laws.modes import APART, ELEMENTWISE, LOSE_NOTHING, MODES, OPTIMIZERS, SHARDED, sgd
from laws.runs import assert_equal_states, assert_same_bits, digest, share, train, train_captured


def same_on_all_ranks(comm, text):
    """Law 5: the same bits on every rank."""
    texts = comm.control.gather(text)
    assert texts == [texts[0]] * comm.size, texts


def conservation(compressor, x, size=1, ulps=0):
    """Law 1: before == after + decompress(compress(before)), to the bit, or within ``ulps`` of the largest of them."""
    context = ExchangeContext(size=size)
    before, out = x.copy(), np.full_like(x, np.nan if compressor.summable else 0)
    payload = compressor.compress(x, {}, context)
    expected = compressor.payload_bytes(x.size, x.itemsize)
    assert expected is None or payload.nbytes == expected
    if payload is x:  # the payload is x itself, x is spent, and the sum stands in x
        out, x = x, np.zeros_like(x)
    compressor.decompress(payload, out, context)
    add_up(x, out, before, ulps)


def add_up(kept, sent, before, ulps=0):
    """What stays and what arrives are what was there, to the bit, or within ``ulps`` of the largest of them."""
    if ulps:
        below_all = np.nextafter(np.finfo(before.dtype).max, before.dtype.type(0))  # the largest has no next one
        largest = np.minimum(np.maximum(np.maximum(abs(kept), abs(sent)), abs(before)), below_all)
        assert (abs(kept + sent - before) <= ulps * np.spacing(largest)).all()
    else:
        np.testing.assert_array_equal(kept + sent, before)


def nothing_is_lost(comm, mode="dense", dtype="float32"):
    """Law 2: N times what was applied, and what all ranks still keep, are the sum of all gradients."""
    params = parameters(dtype=dtype)
    before = [p.data.astype(np.float64) for p in params]
    params = move_to_device(comm, params)
    opt = DistOpt(SGD(1.0), comm, threshold=60)
    total = [np.zeros(p.data.shape) for p in params]
    for step in range(5):
        for rank in range(comm.size):
            for s, g in zip(total, gradients(params, step, rank), strict=True):
                s += g
        MODES[mode](opt, pairs(comm, params, step))
    states = opt.state_dict()["states"]
    kept = [states.get(state, {}) for state in ("residual", "owed")]
    for p, b, s in zip(params, before, total, strict=True):
        residual = sum(np.asarray(arrays.get(p.name, np.zeros(p.data.shape)), np.float64) for arrays in kept)
        residual = summed(comm, np.asarray(residual))
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
    """Law 3: sending everything is dense; one bucket and plain SGD are dense; rounding to 16 bits is close to it."""
    steps = MODES | {
        "density 1": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=1.0, topK=True),
        "threshold 0": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=0.0, corr=False),
        "density 1 in two phases": lambda opt, loss: opt.step(loss, TopK(1.0), False, "two_phase"),
        "all above 0 in two phases": lambda opt, loss: opt.step(loss, Threshold(0, reselect=False), False, "two_phase"),
        "one bucket": lambda opt, loss: opt.backward_and_partial_update(loss, threshold=10**6),
    }
    dense, _ = train(comm, make=lambda: SGD(0.1))
    for mode, tolerance in {
        "density 1": 1e-6,
        "threshold 0": 1e-6,
        "density 1 in two phases": 1e-6,
        "all above 0 in two phases": 1e-6,
        "one bucket": 1e-6,
        "half": 2e-3,
        "bfloat16": 2e-2,
    }.items():
        params, opt = move_to_device(comm, parameters(rank=comm.rank)), DistOpt(SGD(0.1), comm, threshold=60)
        for step in range(4):
            steps[mode](opt, pairs(comm, params, step))
        for p, q in zip(params, dense, strict=True):
            exactly, (one, other) = comm.size == 1 and tolerance == 1e-6, map(device.host_copy, (p.data, q.data))
            np.testing.assert_allclose(one, other, rtol=0, atol=0 if exactly else tolerance, err_msg=mode)


def same_bits(comm, mode="dense", make=sgd):
    """Law 5, after every step; in partial mode for the bucket, or the entries, that were just averaged."""
    params, opt = train(comm, steps=0, mode=mode, make=make)
    for step in range(4):
        train(comm, 1, step, params, opt, mode=mode)
        buckets = opt.plan.buckets
        averaged = buckets[step % len(buckets)].names if mode == "partial" else [p.name for p in params]
        of_all = [device.host_copy(p.data).reshape(-1) for p in params if p.name in averaged]
        if mode == "partial by seed":
            chosen = reference.chosen_by_seed([p.data.size for p in params], 3, 5, step)
            of_all = [x[places] for x, places in zip(of_all, chosen, strict=True)]
        same_on_all_ranks(comm, repr([x.tobytes() for x in of_all]))


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
        assert_same_bits(params, unbroken, (mode, stop))


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
    assert_same_bits(params, expected, (mode, opt.opt))
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
    assert_same_bits(params, expected, mode)


def capture_changes_no_bit(comm, compressor=None, **options):
    """Law 6 for a step as a CUDA graph: replay is the same as eager, steps that are refused included."""
    eager, captured = (train_captured(comm, compressor, captured=c, **options) for c in (False, True))
    assert_same_bits(captured[0], eager[0], compressor)
    assert_equal_states(captured[1].state_dict(), eager[1].state_dict())


def each_once(comm):
    """Each law that needs a communicator, in the modes that differ most: what the default tier has time for."""
    ranks_agree_with_whole_batch(comm)
    ranks_agree_with_one(comm, OPTIMIZERS["adam"])
    modes_agree(comm)
    for mode in ("topk", "2bit", "packed in two phases"):
        nothing_is_lost(comm, mode)
    for mode in ("dense", "half", *APART, "topk", "topk in two phases"):
        same_bits(comm, mode)
        resume(comm, mode, stops=(3,))
        overlap_changes_no_bit(comm, mode)
    sharding_changes_no_bit(comm)
    independence(comm)


def sums(comm):
    """Laws 2 and 3 in both widths."""
    for dtype in TOLERANCE:
        ranks_agree_with_whole_batch(comm, dtype)
        for mode in LOSE_NOTHING:
            nothing_is_lost(comm, mode, dtype)


def every_optimizer(comm):
    """Laws 3, 5, 6 and 7 with each optimizer."""
    for make in OPTIMIZERS.values():
        ranks_agree_with_one(comm, make)
        same_bits(comm, make=make)
        resume(comm, make=make, stops=(3,))
        if comm.gpu is None:
            sharding_changes_no_bit(comm, make=make)


def every_mode(comm, modes=tuple(MODES)):
    """Laws 5, 6 and 7 in each mode."""
    for mode in modes:
        same_bits(comm, mode)
        resume(comm, mode)
        resume(comm, mode, stops=(1, 2), num_batches=2)
        if mode not in APART and comm.gpu is None:
            every = SHARDED if mode in ("dense", "topk") else SHARDED[list(MODES).index(mode) % len(SHARDED) :][:1]
            for options in every:
                sharding_changes_no_bit(comm, mode, **options)
        overlap_changes_no_bit(comm, mode)


def all_of_them(comm):
    """Every law that needs a communicator; returns what other transports must reproduce."""
    sums(comm)
    every_optimizer(comm)
    modes_agree(comm)
    every_mode(comm)
    resume(comm, "topk", num_batches=3, sync_on_apply=False, deterministic=True)
    return {"digests": np.array(independence(comm))}
