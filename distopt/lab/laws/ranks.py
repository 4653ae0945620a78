"""The laws of training as functions of a communicator: every rank calls them, with inputs that differ per rank.

A law that is broken raises on the rank that sees it, which ends all ranks.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from distopt import device
from distopt.comm import Communicator, LocalCommunicator
from distopt.compress import Compressor, Threshold, TopK
from distopt.dist_opt import DistOpt
from distopt.engine.parameters import Parameter
from distopt.lab.laws import references
from distopt.lab.laws.inputs import TOLERANCE, gradients, move_to_device, pairs, parameters, summed
from distopt.lab.laws.modes import APART, ELEMENTWISE, LOSE_NOTHING, MODES, OPTIMIZERS, SHARDED, Make, Step, sgd
from distopt.lab.laws.runs import (
    assert_equal_states,
    assert_same_bits,
    digest,
    require,
    share,
    train,
    train_captured,
)
from distopt.optim import SGD

REFUSALS = ("skipped", "skips_in_a_row")  # the counts of refused steps in a DistOpt's state


def same_on_all_ranks(comm: Communicator, text: str) -> None:
    """Law 5: the same bits on every rank."""
    texts = comm.control.gather(text)
    require(texts == [texts[0]] * comm.size, texts)


def nothing_is_lost(comm: Communicator, mode: str = "dense", dtype: str = "float32", seed: int = 0) -> None:
    """Law 2: N times what was applied, and what all ranks still keep, are the sum of all gradients."""
    params = parameters(dtype=dtype, seed=seed)
    before = [p.data.astype(np.float64) for p in params]
    params = move_to_device(comm, params)
    opt = DistOpt(SGD(1.0), comm, threshold=60)
    total = [np.zeros(p.data.shape) for p in params]
    for step in range(5):
        for rank in range(comm.size):
            for s, g in zip(total, gradients(params, step, rank, seed), strict=True):
                s += g
        MODES[mode](opt, pairs(comm, params, step, seed))
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
            err_msg=f"applied and kept, {mode}, {p.name}",
        )


def ranks_agree_with_whole_batch(comm: Communicator, dtype: str = "float32", seed: int = 0) -> float:
    """Law 3: dense on N ranks is one rank on the whole batch, here the float64 reference; returns the largest error.

    Two ranks have the bits of one that is given the mean of their gradients.
    """
    params, _ = train(comm, dtype=dtype, seed=seed)
    of_ranks = [[gradients(params, step, rank, seed) for rank in range(comm.size)] for step in range(4)]
    largest = 0.0
    for k, p in enumerate(parameters(dtype=dtype, seed=seed)):  # rank 0's initial values were broadcast
        w, b = p.data.astype(np.float64), np.zeros(p.data.shape)
        for grads, lr in zip(of_ranks, [0.1, 0.1, 0.05, 0.05], strict=True):
            mean = references.mean([g[k] for g in grads])
            w, b = references.sgd(w, b, mean, lr=lr, momentum=0.9, weight_decay=1e-3)
        found = device.host_copy(params[k].data)
        np.testing.assert_allclose(found, w, rtol=0, atol=10 * TOLERANCE[dtype], err_msg=f"dense, {p.name}")
        largest = max(largest, float(abs(found - w).max(initial=0)))
    if comm.size == 2:
        alone = parameters(dtype=dtype, seed=seed)
        opt = DistOpt(sgd(), LocalCommunicator(), threshold=60)
        for grads in of_ranks:
            opt(zip(alone, [(one + other) / 2 for one, other in zip(*grads, strict=True)], strict=True))
        assert_same_bits(params, alone, "two ranks, and one with the mean of their gradients")
    return largest


def ranks_agree_with_one(comm: Communicator, make: Make, seed: int = 0) -> None:
    """Law 3 for every optimizer: N ranks are one rank with the mean gradient, here computed in float64."""
    params, _ = train(comm, make=make, seed=seed)
    alone, opt = parameters(dtype="float64"), make()
    for a, p in zip(alone, parameters(seed=seed), strict=True):
        a.data[...] = p.data
    for step in range(4):
        of_ranks = [gradients(params, step, r, seed) for r in range(comm.size)]
        opt(zip(alone, map(references.mean, zip(*of_ranks, strict=True)), strict=True))
    for p, a in zip(params, alone, strict=True):
        np.testing.assert_allclose(device.host_copy(p.data), a.data, rtol=0, atol=1e-4, err_msg=repr(opt))


def nan_is_refused_by_all(
    comm: Communicator, modes: Sequence[str] = ("dense",), rank: int = 0, at: int = 1, seed: int = 0
) -> None:
    """A NaN of one rank is refused by all, with one text, and leaves what a run without that step has."""
    for mode, nonfinite in itertools.product(modes, ("skip", "raise")):
        runs: list[tuple[Any, Any, list[str]]] = []
        for steps in (range(6), [k for k in range(6) if k != at]):
            params, opt = train(comm, 0, mode=mode, make=OPTIMIZERS["adam"], nonfinite=nonfinite, seed=seed)
            errors = []
            for step in steps:
                loss = list(pairs(comm, params, step, seed))
                if not runs and (step, comm.rank) == (at, rank):
                    loss[1][1][3] = np.nan
                try:
                    MODES[mode](opt, loss)
                except FloatingPointError as error:
                    errors.append(str(error))
            runs.append((params, opt.state_dict(), errors))
        (params, state, errors), (expected, wanted, _) = runs
        case = f"{nonfinite!r}, {mode}, a NaN on rank {rank} in step {at}: rank {comm.rank}"
        refused = [f"{state['skipped']} steps"] if nonfinite == "skip" else errors
        named = "1 steps" if nonfinite == "skip" else f"rank {rank}: p1 "
        require(len(refused) == 1 and named in refused[0], f"{case} refused {refused}")
        assert_same_bits(params, expected, f"{case} does not have the bits of a run without that step")
        assert_equal_states(*(s | dict.fromkeys(REFUSALS, 0) for s in (state, wanted)))
        same_on_all_ranks(comm, f"{digest(params)}, {errors}")


def modes_agree(comm: Communicator, seed: int = 0) -> None:
    """Law 3: sending everything is dense; one bucket and plain SGD are dense; rounding to 16 bits is close to it."""
    sends_all: dict[str, Step] = {
        "density 1": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=1.0, topK=True),
        "threshold 0": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=0.0, corr=False),
        "density 1 in two phases": lambda opt, loss: opt.step(loss, TopK(1.0), False, "two_phase"),
        "all above 0 in two phases": lambda opt, loss: opt.step(loss, Threshold(0, reselect=False), False, "two_phase"),
        "one bucket": lambda opt, loss: opt.backward_and_partial_update(loss, threshold=10**6),
    }
    dense, _ = train(comm, make=lambda: SGD(0.1), seed=seed)
    tolerances = dict.fromkeys(sends_all, 5e-6) | {"half": 2e-3, "bfloat16": 2e-2}
    for mode, tolerance in tolerances.items():
        params, opt = train(comm, 0, make=lambda: SGD(0.1), seed=seed)
        for step in range(4):
            (MODES | sends_all)[mode](opt, pairs(comm, params, step, seed))
        for p, q in zip(params, dense, strict=True):
            exactly, (one, other) = comm.size == 1 and mode in sends_all, map(device.host_copy, (p.data, q.data))
            np.testing.assert_allclose(one, other, rtol=0, atol=0 if exactly else tolerance, err_msg=mode)


def same_bits(comm: Communicator, mode: str = "dense", make: Make = sgd, seed: int = 0) -> None:
    """Law 5, after every step; in partial mode for the bucket, or the entries, that were just averaged."""
    params, opt = train(comm, steps=0, mode=mode, make=make, seed=seed)
    for step in range(4):
        train(comm, 1, step, params, opt, mode=mode, seed=seed)
        averaged = [p.name for p in params]
        if mode == "partial" and opt.plan:
            averaged = list(opt.plan.buckets[step % len(opt.plan.buckets)].names)
        of_all = [device.host_copy(p.data).reshape(-1) for p in params if p.name in averaged]
        if mode == "partial by seed":
            chosen = references.chosen_by_seed([p.data.size for p in params], 3, 5, step)
            of_all = [x[places] for x, places in zip(of_all, chosen, strict=True)]
        same_on_all_ranks(comm, repr([x.tobytes() for x in of_all]))


def independence(comm: Communicator, seed: int = 0) -> list[str]:
    """Law 6: in deterministic mode neither threshold nor message size changes bits; returns the digests by mode."""
    found = []
    for mode in ELEMENTWISE:
        runs = [train(comm, threshold=t, deterministic=True, mode=mode, seed=seed) for t in (0, 1, 60, 10**6)]
        digests = {digest(params) for params, _ in runs}
        require(len(digests) == 1, mode)
        found.append(digests.pop())
    return found


def resume(
    comm: Communicator, mode: str = "dense", make: Make = sgd, stops: Sequence[int] = (1, 4), **options: Any
) -> None:
    """Law 7: stopping after a call and going on from state_dict is never having stopped, bit for bit; nor is saving."""
    options |= {"mode": mode, "make": make}
    (unbroken, _), (params, opt) = (train(comm, steps, **options) for steps in (6, stops[0]))
    for stop, then in itertools.pairwise((*stops, 6)):
        saved, others = opt.state_dict(), [Parameter(p.name, device.host_copy(p.data)) for p in params]
        train(comm, then - stop, stop, params, opt, **options)  # must not change what was saved
        _, again = train(comm, steps=0, **options)
        again.load_state_dict(saved)
        train(comm, 6 - stop, stop, move_to_device(comm, others), again, **options)
        assert_same_bits(others, unbroken, f"{mode}, stopped after call {stop}")
    assert_same_bits(params, unbroken, f"{mode}, saved on its way")


def sharding_changes_no_bit(comm: Communicator, mode: str = "dense", make: Make = sgd, **options: Any) -> None:
    """Law 6 once more: each rank updates its share of parameters that all share; stopped and resumed in the middle."""
    if comm.peers(comm.alloc(1, np.uint8)) is None:
        return  # ranks share no memory
    options |= {"mode": mode, "make": make}
    expected, plain = train(comm, steps=5, **options)
    params, opt = share(*train(comm, steps=0, **options))
    train(comm, 3, 0, params, opt, **options)
    saved = opt.state_dict()
    params, opt = share(params, train(comm, steps=0, **options)[1])
    opt.load_state_dict(saved)
    train(comm, 2, 3, params, opt, **options)
    assert_same_bits(params, expected, (mode, opt.opt))
    assert_equal_states(opt.state_dict(), plain.state_dict())
    comm.barrier()  # others still read these parameters


def overlap_changes_no_bit(comm: Communicator, mode: str = "dense", seed: int = 0) -> None:
    """Law 6: whether buckets travel while gradients are computed or afterwards; gradients come one by one, late."""
    # a transport that cannot overlap sends them afterwards twice; without overlap, shared memory adds in rank order
    options: dict[str, Any] = {"deterministic": True, "mode": mode, "seed": seed}
    expected, _ = train(comm, steps=4, **options)
    params, opt = train(comm, steps=0, overlap=comm.may_overlap, **options)

    def late(pairs: Iterable[Any]) -> Iterator[Any]:
        for pair in pairs:
            time.sleep(2e-4 * comm.rank)
            yield pair

    for step in range(4):
        backward = pairs(comm, params, step, seed)
        MODES[mode](opt, late(backward))
    assert_same_bits(params, expected, mode)


def capture_changes_no_bit(comm: Communicator, compressor: Compressor | None = None, **options: Any) -> None:
    """Law 6 for a step as a CUDA graph: replay is the same as eager, steps that are refused included."""
    eager, captured = (train_captured(comm, compressor, captured=c, **options) for c in (False, True))
    assert_same_bits(captured[0], eager[0], compressor)
    assert_equal_states(captured[1].state_dict(), eager[1].state_dict())


def each_once(comm: Communicator, seed: int = 0) -> float:
    """Each law that needs a communicator, in the modes that differ most: what the default tier has time for.

    Returns:
        What ``ranks_agree_with_whole_batch`` returns.
    """
    largest = ranks_agree_with_whole_batch(comm, seed=seed)
    ranks_agree_with_one(comm, OPTIMIZERS["adam"], seed)
    modes_agree(comm, seed)
    for mode in ("topk", "2bit", "packed in two phases"):
        nothing_is_lost(comm, mode, seed=seed)
    for mode in ("dense", "half", *APART, "topk", "topk in two phases"):
        same_bits(comm, mode, seed=seed)
        resume(comm, mode, stops=(3,), seed=seed)
        overlap_changes_no_bit(comm, mode, seed)
    sharding_changes_no_bit(comm, seed=seed)
    independence(comm, seed)
    return largest


def sums(comm: Communicator) -> None:
    """Laws 2 and 3 in both widths."""
    for dtype in TOLERANCE:
        ranks_agree_with_whole_batch(comm, dtype)
        for mode in LOSE_NOTHING:
            nothing_is_lost(comm, mode, dtype)


def every_optimizer(comm: Communicator) -> None:
    """Laws 3, 5, 6 and 7 with each optimizer."""
    for make in OPTIMIZERS.values():
        ranks_agree_with_one(comm, make)
        same_bits(comm, make=make)
        resume(comm, make=make, stops=(3,))
        sharding_changes_no_bit(comm, make=make)


def every_mode(comm: Communicator, modes: Iterable[str] = tuple(MODES)) -> None:
    """Laws 5, 6 and 7 in each mode."""
    for mode in modes:
        same_bits(comm, mode)
        resume(comm, mode)
        resume(comm, mode, stops=(1, 2), num_batches=2)
        if mode not in APART:
            every = SHARDED if mode in ("dense", "topk") else SHARDED[list(MODES).index(mode) % len(SHARDED) :][:1]
            for options in every:
                sharding_changes_no_bit(comm, mode, **options)
        overlap_changes_no_bit(comm, mode)


def all_of_them(comm: Communicator) -> dict[str, np.ndarray]:
    """Every law that needs a communicator; returns what other transports must reproduce."""
    sums(comm)
    every_optimizer(comm)
    modes_agree(comm)
    every_mode(comm)
    resume(comm, "topk", num_batches=3, sync_on_apply=False, deterministic=True)
    return {"digests": np.array(independence(comm))}
