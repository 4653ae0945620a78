"""Trainer: Gluon's way to train, without upstream's faults T1 to T9, M6 and M7."""

import contextlib
import sys
import threading
import time

import numpy as np
import pytest

import laws
import reference
from distopt import DistOpt, LossScaler, Parameter, Trainer, buckets, device, optim, run_ranks
from distopt.comm import LocalCommunicator
from distopt.compress import Dense, ErrorFeedback, Half, OneBit, TopK, TwoBit
from distopt.optim import SGD, Adam, BatchGradients, ExponentialDecay
from doubles.ranks import on_gpus
from launch import needs_mpi, run_mpi

COMPRESSIONS = {
    "none": (None, Dense()),
    "fp16": ({"type": "fp16"}, Half()),
    "topk": ({"type": "topk", "density": 0.1}, ErrorFeedback(TopK(0.1))),
    "2bit": ({"type": "2bit", "threshold": 0.25}, ErrorFeedback(TwoBit(0.25))),
    "1bit": ({"type": "1bit"}, ErrorFeedback(OneBit())),
}
BATCHES = (8, 3, 6, 5)  # per step, of all ranks together


def backward(comm, params, step, fresh=lambda p: True):
    """New gradients for those that have one."""
    for p, grad in zip(params, laws.put(comm, laws.gradients(params, step, comm.rank)), strict=True):
        if fresh(p):
            p.grad = grad


def model(comm, dtype="float32"):
    return laws.there(comm, laws.parameters(dtype=dtype, rank=comm.rank))


def make(comm, params, optimizer=None, **options):
    return Trainer(params, laws.sgd() if optimizer is None else optimizer, communicator=comm, threshold=60, **options)


def in_one(trainer, batch_size, ignore=False):
    return trainer.step(batch_size, ignore)


def in_two(trainer, batch_size, ignore=False):
    trainer.allreduce_grads(ignore)
    return trainer.update(batch_size, ignore)


def train(comm, steps=4, start=0, params=None, trainer=None, step=in_one, optimizer=None, **options):
    """Some steps of a run; returns (params, trainer)."""
    params = model(comm) if params is None else params
    trainer = make(comm, params, optimizer, **options) if trainer is None else trainer
    for k in range(start, start + steps):
        backward(comm, params, k)
        assert step(trainer, BATCHES[k % len(BATCHES)]) is True
    return params, trainer


def same_error(size, main, kind=ValueError):
    """The text that ``main`` raises, the same on every rank."""

    def catch(comm):
        with pytest.raises(kind) as caught:
            main(comm)
        return str(caught.value)

    found = run_ranks(size, catch)
    assert len(set(found)) == 1, found
    return found[0]


# ----------------------------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("dtype", laws.TOLERANCE)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_are_one_rank_on_the_whole_batch(size, dtype):
    """A sum over ranks, divided by the size of the global batch; here in float64."""

    def main(comm):
        params = model(comm, dtype)
        laws.same_on_all_ranks(comm, laws.digest(train(comm, params=params)[0]))
        return [p.data for p in params]

    found, lr = run_ranks(size, main)[0], [0.1, 0.1, 0.05, 0.05]
    for k, p in enumerate(laws.parameters(dtype=dtype)):
        w, b = p.data.astype(np.float64), np.zeros(p.data.shape)
        for step in range(4):
            total = sum(laws.gradients(laws.parameters(), step, r)[k].astype(np.float64) for r in range(size))
            if dtype == "float64":
                total = sum(laws.gradients(laws.parameters(dtype=dtype), step, r)[k] for r in range(size))
            w, b = reference.sgd(w, b, total / BATCHES[step], lr=lr[step], momentum=0.9, weight_decay=1e-3)
        np.testing.assert_allclose(found[k], w, rtol=0, atol=10 * laws.TOLERANCE[dtype])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_with_one_example_per_rank_it_is_distopt(kind, size):
    given, compressor = COMPRESSIONS[kind]

    def main(comm):
        params, others = model(comm), model(comm)
        trainer = make(comm, params, compression_params=given)
        opt = DistOpt(laws.sgd(), comm, threshold=60)
        for step in range(4):
            backward(comm, params, step)
            trainer.step(comm.size)
            opt.step(laws.pairs(comm, others, step), compressor)
        return laws.digest(params) == laws.digest(others)

    assert run_ranks(size, main) == [True] * size


@pytest.mark.sampled(12)
@pytest.mark.parametrize("make", laws.OPTIMIZERS.values(), ids=laws.OPTIMIZERS)
@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_a_step_is_sums_and_an_update(kind, make):
    """To the bit, with a batch size that changes at every step."""

    def main(comm):
        options = {"compression_params": COMPRESSIONS[kind][0]}
        found = [train(comm, step=step, optimizer=make(), **options) for step in (in_one, in_two)]
        digests = {laws.digest(params) for params, _ in found}
        laws.assert_equal_states(*(trainer.state_dict() for _, trainer in found))
        return len(digests)

    for size in (1, 2, 3):
        assert run_ranks(size, main) == [1] * size


class Stranger:
    """Knows nothing of buckets."""

    def __init__(self):
        self.seen = []

    def apply(self, name, value, grad):
        self.seen.append((name, grad.copy()))
        value -= grad


@pytest.mark.parametrize("step", [in_one, in_two])
def test_a_stranger_sees_the_sum_divided_once(step):
    """By a factor of exactly 1 / batch_size, not a mean that is scaled again."""

    def main(comm):
        p = Parameter("p", np.zeros(1000, np.float32))
        trainer = make(comm, [p], Stranger())
        p.grad = laws.parameters([(1000,)], rank=comm.rank)[0].data
        step(trainer, 7)
        total = laws.parameters([(1000,)])[0].data + laws.parameters([(1000,)], rank=1)[0].data
        np.testing.assert_array_equal(trainer.optimizer.seen[0][1], total * np.float32(1 / 7))

    run_ranks(2, main)


def test_sums_may_be_clipped_before_the_update():
    def main(comm):
        params = [Parameter("a", np.zeros(3)), Parameter("b", np.zeros((2, 2)))]
        trainer = make(comm, params, SGD(1.0))
        for p in params:
            p.grad = np.full(p.data.shape, 1.0 + comm.rank)
        kept = [p.grad for p in params]
        assert trainer.allreduce_grads() is True
        assert all(p.grad is g and (g == 3).all() for p, g in zip(params, kept, strict=True))
        assert trainer.state_dict()["contributions"] == 0
        norm = np.sqrt(sum((p.grad**2).sum() for p in params))
        for p in params:
            p.grad *= 1 / norm  # an assignment, for Python
        assert trainer.update(2) is True
        np.testing.assert_allclose([p.data.flat[0] for p in params], -1 / np.sqrt(7) / 2)
        assert not any(p.fresh for p in params)

    run_ranks(2, main)


def test_sums_in_views_may_be_changed_although_another_rank_is_slow(monkeypatch):
    """Which would read them in shared memory."""

    def main(comm):
        params = model(comm)
        trainer = make(comm, params, SGD(1.0))
        for p, view in zip(params, trainer.gradient_views(params), strict=True):
            p.grad = view
        for _ in range(2):
            for p in params:
                p.grad[...] = 1
                p.touch()
            trainer.allreduce_grads()
            for p in params:
                p.grad *= 2
            trainer.update(4)
        laws.same_on_all_ranks(comm, laws.digest(params))
        return [(q.data - p.data).mean() for p, q in zip(params, laws.parameters(), strict=True) if p.data.size]

    def leave(buffers, sums, grads, refused):
        time.sleep(0.05 * (threading.current_thread() is not first[0]))
        return buckets.leave(buffers, sums, grads, refused)

    first = []

    def rank(comm):
        if comm.rank == 0:
            first.append(threading.current_thread())
        comm.barrier()
        return main(comm)

    monkeypatch.setattr(sys.modules["distopt.trainer"], "leave", leave)
    np.testing.assert_allclose(run_ranks(2, rank), 2.0, atol=1e-5)


def test_gradients_that_cannot_hold_a_sum():
    """Read-only, not contiguous, a scalar, missing here, one for two parameters, or in the view of another."""

    def main(comm):
        shapes = {"fixed": (3,), "turned": (2, 3), "scalar": (), "missing": (2,), "left": (4,), "right": (4,)}
        shapes |= {"guest": (5,), "home": (5,), "empty": (0,)}
        params = [Parameter(n, np.zeros(s)) for n, s in shapes.items()]
        by_name = {p.name: p for p in params}
        trainer = make(comm, params, SGD(1.0))
        views = dict(zip(shapes, trainer.gradient_views(params), strict=True))
        values = {n: np.arange(1.0, 1 + np.prod(s, dtype=int)).reshape(s) * (1 + comm.rank) for n, s in shapes.items()}
        for name, value in values.items():
            by_name[name].grad = value
        by_name["fixed"].grad.flags.writeable = False
        by_name["turned"].grad = np.asfortranarray(values["turned"])
        by_name["scalar"].grad = np.float64(values["scalar"])
        by_name["right"].grad = by_name["left"].grad if comm.rank else values["left"].copy()
        views["home"][...] = values["home"]
        by_name["guest"].grad = views["home"]
        by_name["home"].grad = 10 * values["home"]
        if comm.rank:
            by_name["missing"].grad = None
        trainer.allreduce_grads(ignore_stale_grad=True)
        total = {n: 3 * np.arange(1.0, 1 + np.prod(s, dtype=int)).reshape(s) for n, s in shapes.items()}
        total["missing"] /= 3
        total["home"] *= 10
        for name, p in by_name.items():
            np.testing.assert_array_equal(p.grad, total[name], err_msg=name)
        assert by_name["fixed"].grad is not values["fixed"]
        assert by_name["left"].grad is not by_name["right"].grad
        by_name["right"].grad *= 2
        trainer.update(1, ignore_stale_grad=True)
        for name, p in by_name.items():
            np.testing.assert_array_equal(p.data, -total[name] * (2 if name == "right" else 1), err_msg=name)

    run_ranks(2, main)


@pytest.mark.parametrize("flaw", ["none", "read-only", "one for two", "in another's view", "missing here"])
@pytest.mark.parametrize("size", [1, 2])
def test_one_gradient_among_others_that_cannot_hold_its_sum(size, flaw):
    def main(comm):
        params = [Parameter(n, np.zeros(5)) for n in "abc"]
        trainer = make(comm, params, SGD(1.0))
        views = trainer.gradient_views(params)
        for k, p in enumerate(params):
            p.grad = np.full(5, 10.0**k)
        kept = [p.grad for p in params]
        expected = [comm.size * 10.0**k for k in range(3)]
        if flaw == "read-only":
            kept[0].flags.writeable = False
        if flaw == "one for two":
            params[1].grad, expected[1] = params[0].grad, expected[0]
        if flaw == "in another's view":
            views[1][...] = 1.0
            params[0].grad = views[1]
        if flaw == "missing here":
            params[0].grad, expected[0] = None if comm.rank else kept[0], 1.0
        trainer.allreduce_grads(ignore_stale_grad=True)
        assert [p.grad.tolist() for p in params] == [[e] * 5 for e in expected]
        assert params[2].grad is kept[2]
        stays = flaw in ("none", "one for two") or (flaw == "missing here" and comm.rank == 0)
        assert (params[0].grad is kept[0]) == stays
        params[0].grad[...] = 7
        trainer.update(1, ignore_stale_grad=True)
        assert [p.data.tolist() for p in params] == [[-e] * 5 for e in (7, *expected[1:])]

    run_ranks(size, main)


@pytest.mark.parametrize("step", [in_one, in_two])
@pytest.mark.parametrize("scaled", [False, True])
def test_views_and_shared_parameters_change_no_bit(step, scaled):
    def main(comm):
        expected = train(comm)[0]
        params, scaler = model(comm), LossScaler() if scaled else None
        trainer = make(comm, params, loss_scaler=scaler)
        laws.share(params, trainer)
        for p, view in zip(params, trainer.gradient_views(params), strict=True):
            p.grad = view
        for k in range(4):
            for p, grad in zip(params, laws.gradients(params, k, comm.rank), strict=True):
                p.grad[...] = grad * np.float32(scaler.scale if scaled else 1)
                p.touch()
            step(trainer, BATCHES[k])
        same = laws.digest(params) == laws.digest(expected)
        comm.barrier()
        return same

    assert run_ranks(2, main) == [True] * 2


@pytest.mark.parametrize("multi_precision", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2])
def test_parameters_of_16_bits(size, dtype, multi_precision):
    """Sums are float32, in arrays that stand in for the gradients' own until the update, so no bit is lost."""

    def main(comm):
        found = []
        for step in (in_one, in_two):
            params = [Parameter(p.name, p.data.astype(dtype)) for p in laws.parameters(rank=comm.rank)]
            scaler = LossScaler(init_scale=2.0**9)
            trainer = make(comm, params, Adam(0.1, multi_precision=multi_precision), loss_scaler=scaler)
            grads = [np.zeros_like(p.data) for p in params]
            for k in range(4):
                for p, mine, g in zip(params, grads, laws.gradients(laws.parameters(), k, comm.rank), strict=True):
                    mine[...] = 1e-6 * g * scaler.scale  # the smallest of these have no place in float16 as they are
                    p.grad = mine
                assert step(trainer, BATCHES[k])
                assert all(p.grad is mine for p, mine in zip(params, grads, strict=True))
            found.append(laws.digest(params))
            laws.same_on_all_ranks(comm, found[-1])
        return found[0] == found[1]

    assert run_ranks(size, main) == [True] * size


def test_gradients_that_are_added_up_by_the_user():
    """``grad_req='add'``: a step leaves the gradient as it is; who zeroes it is the user."""

    def main(comm):
        p = Parameter("p", np.zeros(2), np.zeros(2), grad_req="add")
        trainer = make(comm, [p], SGD(1.0))
        for expected in (-1.0, -3.0):
            p.grad[...] += 1.0
            p.touch()
            trainer.step(2)
            assert p.data[0] == expected  # sums of 2 and of 4, by 2
        with pytest.raises(ValueError, match="p: gradient_views is not for grad_req='add'"):
            trainer.gradient_views([p])

    run_ranks(2, main)


@pytest.mark.parametrize("fixed", [False, True])
def test_sums_are_not_written_over_anything_else(fixed):
    """A gradient may be the parameter itself, that of 1/2 |w|^2, or a part of an array that another has a part of."""

    def main(comm):
        shared = np.ones(5)
        params = [Parameter(n, np.ones(3)) for n in "abcd"]
        a, b, c, d = params
        trainer = make(comm, params, SGD(1.0))
        a.grad, b.grad, c.grad, d.grad = a.data, shared[2:], shared[:3], np.ones(3)
        d.grad.flags.writeable = not fixed
        trainer.allreduce_grads()
        assert [p.data.tolist() for p in params] == [[1.0] * 3] * 4
        for k, p in enumerate(params):
            p.grad *= k  # of it alone
        trainer.update(2)
        assert a.grad is a.data
        return [p.data.tolist() for p in params]

    assert run_ranks(2, main) == [[[1.0] * 3, [0.0] * 3, [-1.0] * 3, [-2.0] * 3]] * 2


def test_views_of_some_parameters():
    """The others are in the plan all the same."""

    def main(comm):
        a, b, c = params = [Parameter(n, np.zeros(2)) for n in "abc"]
        frozen = Parameter("frozen", np.zeros(2), grad_req="null")
        trainer = make(comm, [*params, frozen], SGD(1.0))
        c.grad, _ = trainer.gradient_views([c, frozen])
        assert trainer.plan.buckets[0].names == ("a", "b", "c", "frozen")
        c.grad[...] = 1
        c.touch()
        a.grad = b.grad = np.ones(2)
        trainer.step(2)
        return [p.data.tolist() for p in (*params, frozen)]

    assert run_ranks(2, main) == [[[-1.0, -1.0]] * 3 + [[0.0, 0.0]]] * 2


def test_views_that_cannot_be_on_one_rank():
    def main(comm):
        p = Parameter("p", np.zeros(2), grad_req="add" if comm.rank else "write")
        make(comm, [p]).gradient_views([p])

    assert same_error(2, main) == "rank 1: p: gradient_views is not for grad_req='add', whose gradient must stay"


def test_what_has_no_gradient_is_left_out():
    """'null' at first, or from some step on; the same on all ranks."""

    def main(comm):
        a, b, c = (Parameter(n, np.ones(2), grad_req=r) for n, r in (("a", "write"), ("b", "null"), ("c", "write")))
        trainer = make(comm, [a, b, c], SGD(1.0, weight_decay=0.5))
        a.grad = c.grad = np.ones(2)
        trainer.step(2)
        assert trainer.plan.buckets[0].names == ("a", "c")
        c.grad_req = "null"
        a.grad = np.ones(2)
        trainer.step(2)
        assert [p.data[0] for p in (a, b, c)] == [-1.25, 1.0, -0.5]
        a.grad, a.grad_req = np.ones(2), "null" if comm.rank else "write"
        with pytest.raises(ValueError, match=r"rank 0 has step .*frozen=\['b', 'c'\], rank 1 has .*=\['a', 'b', 'c'\]"):
            trainer.step(2)

    run_ranks(2, main)
    assert make(LocalCommunicator(), []).step(1) is True


def over_mpi(comm):
    """On ranks that are processes."""
    params, _ = train(comm, step=in_two, compression_params={"type": "topk", "density": 0.1})
    text = ""
    backward(comm, params, 9, lambda p: comm.rank == 0 or p.name != "p1")
    try:
        train(comm, 0, params=params)[1].step(1)
    except ValueError as error:
        text = str(error)
    return {"digest": np.array(laws.digest(params)), "text": np.array(text)}


@needs_mpi
def test_ranks_that_are_processes(tmp_path):
    def main(comm):
        return laws.digest(train(comm, compression_params={"type": "topk", "density": 0.1})[0])

    expected = run_ranks(2, main)
    found = run_mpi(2, over_mpi, tmp_path)
    assert [str(f["digest"]) for f in found] == expected
    assert {str(f["text"])[:55] for f in found} == {"stale since the last step: the gradients of p1 (rank 1)"}


# ----------------------------------------------------------------------------------------------- T1 to T9, M6, M7


def test_t1_a_shared_parameter_shifts_nothing():
    """Upstream counts it twice in one list and once in another: all later multipliers and states belong to others."""

    def main(comm, given):
        a, b, c = (Parameter(n, np.zeros(2)) for n in "abc")
        trainer = make(comm, given(a, b, c), SGD(1.0, momentum=0.5, lr_mult={"b": 0.5, "c": 0.0}))
        for _ in range(2):
            for p in (a, b, c):
                p.grad = np.ones(2)
            trainer.step(comm.size)
        assert trainer.plan.buckets[0].names == ("a", "b", "c")
        moments = trainer.state_dict()["optimizer"]["moments"]
        assert {n: m[0] for n, m in moments.items()} == {"a": 1.5, "b": 1.5, "c": 1.5}
        return [p.data[0] for p in (a, b, c)]

    for given in (
        lambda a, b, c: [a, b, a, a, c, b],
        lambda a, b, c: {"1.w": a, "2.w": b, "0.w": a, "3.w": c, "2.tied": b},
    ):
        assert run_ranks(2, lambda comm, given=given: main(comm, given)) == [[-2.5, -1.25, 0.0]] * 2


def t2(comm, call):
    """Rank 1's backward pass has not reached p1."""
    params, trainer = train(comm, 2, compression_params={"type": "topk", "density": 0.1})
    backward(comm, params, 2, lambda p: comm.rank != 1 or p.name != "p1")
    before = [p.grad.copy() for p in params], laws.digest(params), trainer.state_dict()
    with pytest.raises(ValueError, match=r"^stale .* the gradients of p1 \(rank 1\); assign param.grad, or"):
        call(trainer, BATCHES[2])
    for p, grad in zip(params, before[0], strict=True):
        np.testing.assert_array_equal(p.grad, grad)
        assert p.fresh == (comm.rank != 1 or p.name != "p1")
    assert laws.digest(params) == before[1]
    laws.assert_equal_states(trainer.state_dict(), before[2])
    params[1].grad = laws.gradients(params, 2, comm.rank)[1]  # mended
    assert call(trainer, BATCHES[2])
    expected = train(comm, 3, compression_params={"type": "topk", "density": 0.1})[0]
    return laws.digest(params) == laws.digest(expected)


@pytest.mark.parametrize("call", [in_one, in_two])
def test_t2_a_stale_gradient_is_found_before_anything_moves(call):
    """Upstream has summed in place by then, and has marked some as used: to try again sums twice, or fails again."""
    assert run_ranks(3, lambda comm: t2(comm, call)) == [True] * 3


def test_t2_in_views_that_a_scale_would_divide_in_place():
    def main(comm):
        params, scaler = model(comm), LossScaler()
        trainer = make(comm, params, loss_scaler=scaler)
        for p, view, g in zip(
            params, trainer.gradient_views(params), laws.gradients(params, 0, comm.rank), strict=True
        ):
            p.grad = view
            p.grad[...] = g * np.float32(scaler.scale)
        params[2].fresh = comm.rank == 0
        with pytest.raises(ValueError, match=r"p2 \(ranks 1, 2\)"):
            trainer.step(BATCHES[0])
        params[2].touch()
        trainer.step(BATCHES[0])
        return laws.digest(params) == laws.digest(train(comm, 1)[0])

    assert run_ranks(3, main) == [True] * 3


@pytest.mark.parametrize("call", [in_one, in_two])
@pytest.mark.parametrize("scaled", [False, True])
def test_t2_what_was_packed_over_is_stale_when_another_rank_raises(scaled, call):
    """A view that was divided by the scale, and one with another's gradient, would count wrongly if tried again."""

    def main(comm):
        a, b, c = params = [Parameter(n, np.zeros(2)) for n in "abc"]
        trainer = make(comm, params, SGD(1.0), loss_scaler=LossScaler(4.0) if scaled else None)
        views = trainer.gradient_views(params)

        def fill():
            for view in views:
                view[...] = 4 if scaled else 1
            a.grad, b.grad, c.grad = views[0], views[2], views[1] * 1

        fill()
        c.grad = np.zeros(3) if comm.rank else c.grad
        with pytest.raises(ValueError, match=r"rank 1: c: the gradient must have the parameter's shape \(2,\), got"):
            call(trainer, 1)
        assert [p.fresh for p in params] == [not scaled, False, True]
        c.grad = np.ones(2)
        with pytest.raises(ValueError, match=r"b \(ranks 0, 1\)"):
            call(trainer, 1)
        fill()
        call(trainer, 1)
        return [p.data.tolist() for p in params]

    assert run_ranks(2, main) == [[[-2.0, -2.0]] * 3] * 2


def test_t2_sums_are_not_summed_again():
    """Nor does ``update`` take what was never summed, which would let ranks drift apart."""

    def main(comm):
        params, trainer = train(comm, 1)
        backward(comm, params, 1)
        trainer.allreduce_grads()
        sums = [p.grad.copy() for p in params]
        for again in (trainer.allreduce_grads, lambda: trainer.step(1)):
            with pytest.raises(ValueError, match=r"stale since the last step: .* p4 \(ranks 0, 1\) and 3 more; assign"):
                again()
        for p, total in zip(params, sums, strict=True):
            np.testing.assert_array_equal(p.grad, total)
        assert trainer.update(BATCHES[1])
        assert laws.digest(params) == laws.digest(train(comm, 2)[0])
        backward(comm, params, 2)
        with pytest.raises(RuntimeError, match=r"^rank 0: update applies what allreduce_grads has summed: call it"):
            trainer.update(1)

    run_ranks(2, main)


@pytest.mark.parametrize("call", [in_one, in_two])
@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_t3_ranks_agree_on_what_is_ignored(kind, call):
    """Updated if fresh on some rank, where the others count as zeros; what is fresh nowhere is left alone by all."""

    def main(comm):
        params, trainer = train(comm, 2, compression_params=COMPRESSIONS[kind][0])
        everywhere, nowhere, somewhere = {"p0", "p2", "p3", "p4", "p6", "p7"}, "p1", "p5"
        before, states = params[1].data.copy(), trainer.state_dict()
        backward(comm, params, 2, lambda p: p.name in everywhere or (p.name == somewhere and comm.rank == 1))
        kept = {p.name: p.grad.copy() for p in params if not p.fresh}
        assert call(trainer, 4, True)
        np.testing.assert_array_equal(params[1].grad, kept[nowhere])
        np.testing.assert_array_equal(params[1].data, before)
        after = trainer.state_dict()
        assert (after["optimizer"]["moments"][nowhere] == states["optimizer"]["moments"][nowhere]).all()
        for state, arrays in states["states"].items():
            np.testing.assert_array_equal(after["states"][state][nowhere], arrays[nowhere])
        laws.same_on_all_ranks(comm, laws.digest(params))
        if kind == "none":  # as if it had been given as zeros
            others, opt = train(comm, 2)
            backward(comm, others, 2)
            for p in others:
                if p.name == nowhere or (p.name == somewhere and comm.rank != 1):
                    p.grad = np.zeros_like(p.data)
            opt.step(4)
            for p, q in zip(params, others, strict=True):
                assert (p.data == q.data).all() == (p.name != nowhere)
        backward(comm, params, 3)
        assert call(trainer, 4)  # and all goes on
        laws.same_on_all_ranks(comm, laws.digest(params))

    run_ranks(3, main)


@pytest.mark.parametrize("call", [in_one, in_two])
def test_t3_a_stranger_is_not_called_for_what_is_fresh_nowhere(call):
    def main(comm):
        params = model(comm)
        trainer = make(comm, params, Stranger())
        backward(comm, params, 0, lambda p: p.name != "p6")
        call(trainer, 1, True)
        assert [name for name, _ in trainer.optimizer.seen] == [p.name for p in params if p.name != "p6"]
        assert not params[6].fresh

    run_ranks(2, main)


def test_t3_ranks_that_do_not_ignore_alike():
    def main(comm):
        params, trainer = train(comm, 1)
        backward(comm, params, 1)
        trainer.step(4, ignore_stale_grad=comm.rank == 1)

    assert "ignore_stale_grad=False, frozen=[], rank 1 has" in same_error(2, main)


def test_t3_parameters_that_are_updated_all_at_once():
    def main(comm):
        params = model(comm)
        trainer = make(comm, params)
        laws.share(params, trainer)
        backward(comm, params, 0, lambda p: p.name != "p1")
        trainer.step(4, ignore_stale_grad=True)

    assert "no rank has a gradient of some parameter, but shared" in same_error(2, main)


@pytest.mark.parametrize("step", [in_one, in_two])
def test_t4_the_next_forward_pass_has_the_new_scale(step):
    """Upstream takes it over one check late, overflows again, and quarters it."""

    def main(comm):
        p, scaler = Parameter("p", np.zeros(4, np.float32)), LossScaler(window=2)
        trainer = make(comm, [p], SGD(1.0), loss_scaler=scaler)
        seen, applied = [], []
        for k in range(6):
            seen.append(scaler.scale / 2.0**16)
            p.grad = np.full(4, np.inf if (k, comm.rank) == (1, 1) else scaler.scale, np.float32)
            applied.append(step(trainer, comm.size))
        assert trainer.skipped == 1
        return seen, applied, p.data.tolist()

    assert run_ranks(2, main) == [([1, 1, 0.5, 0.5, 1, 1], [True, False, True, True, True, True], [-5.0] * 4)] * 2


def test_t4_sums_are_of_true_gradients():
    """In between nobody has to know of the scale; a NaN that is made there is refused, and counted once."""

    def main(comm):
        p, scaler = Parameter("p", np.zeros(2)), LossScaler(window=2)
        trainer = make(comm, [p], SGD(1.0), loss_scaler=scaler)
        for k in range(3):
            p.grad = np.full(2, scaler.scale)
            trainer.allreduce_grads()
            assert (p.grad == 2.0).all()
            if k == 2:
                p.grad[0] = np.nan
            assert trainer.update(2) == (k < 2)
        return p.data.tolist(), scaler.scale, trainer.skipped

    assert run_ranks(2, main) == [([-2.0, -2.0], 2.0**16, 1)] * 2


def test_t4_at_the_floor():
    def main(comm):
        p = Parameter("p", np.zeros(2))
        trainer = make(comm, [p], SGD(1.0), loss_scaler=LossScaler(init_scale=1.0))
        for _ in range(10):
            p.grad = np.full(2, np.nan)
            trainer.step(1)

    assert "10 steps in a row are not finite at min_scale=1.0: rank 0: p (2 of 2" in same_error(
        2, main, FloatingPointError
    )


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("step", [in_one, in_two])
def test_t5_a_refused_step_uses_gradients_up(step, scaled):
    """Upstream leaves them fresh, so that the next step applies what it has refused, if the backward pass forgot it."""

    def main(comm):
        params, trainer = train(comm, 1, loss_scaler=LossScaler(init_scale=1.0) if scaled else None)
        backward(comm, params, 1)
        if comm.rank:
            params[0].grad[...] = np.inf
        raised = contextlib.nullcontext() if scaled else pytest.raises(FloatingPointError, match="rank 1: p0")
        with raised:
            assert step(trainer, 4) is False
        assert not any(p.fresh for p in params)
        with pytest.raises(ValueError, match="stale since the last step"):
            step(trainer, 4)
        backward(comm, params, 1)
        assert step(trainer, BATCHES[1])
        return laws.digest(params) == laws.digest(train(comm, 2)[0])

    assert run_ranks(2, main) == [True] * 2


@pytest.mark.parametrize("kind", COMPRESSIONS)
@pytest.mark.parametrize("step", [in_one, in_two])
def test_t6_states_are_complete_and_nothing_in_them_is_executed(kind, step, tmp_path):
    """Upstream pickles one device's states, without residuals and without the scaler."""
    options = {"compression_params": COMPRESSIONS[kind][0], "step": step}

    def main(comm):
        expected = train(comm, 6, loss_scaler=LossScaler(1.0, window=4), **options)
        params, trainer = train(comm, 3, loss_scaler=LossScaler(1.0, window=4), **options)
        place = trainer.save_states(tmp_path)
        values = [p.data.copy() for p in params]
        train(comm, 2, 3, params, trainer, step)
        for p, value in zip(params, values, strict=True):
            p.data[...] = value
        for again in (trainer, make(comm, params, None, loss_scaler=LossScaler(1.0, window=4))):
            again.compression_params = COMPRESSIONS[kind][0]
            again.load_states(tmp_path)
        train(comm, 3, 3, params, again, step)
        assert laws.digest(params) == laws.digest(expected[0])
        laws.assert_equal_states(again.state_dict(), expected[1].state_dict())
        assert not [f for f in place.iterdir() if b"pickle" in f.read_bytes()]

    run_ranks(2, main)


def test_t6_states_of_another_optimizer_are_refused_by_name(tmp_path):
    def main(comm):
        params, trainer = train(comm, 2, optimizer=Adam(0.01))
        trainer.save_states(tmp_path)
        _, other = train(comm, 2, params=params, optimizer=optim.RMSProp(0.01))
        before = other.state_dict()
        with pytest.raises(ValueError, match="these are the states of Adam, and the optimizer is RMSProp"):
            other.load_states(tmp_path)
        laws.assert_equal_states(other.state_dict(), before)
        with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
            other.load_states(tmp_path / "nothing")

    run_ranks(2, main)


@pytest.mark.parametrize("views", [False, True])
def test_t6_what_a_parameter_left_behind_before_it_was_left_out(views, tmp_path):
    """Going on is never having stopped, with a residual of what is not trained at the moment, and is afterwards."""

    def run(comm, stop):
        params = model(comm)
        _, trainer = train(comm, 2, params=params, compression_params={"type": "2bit", "threshold": 0.25})
        params[1].grad_req = "null"
        train(comm, 1, 2, params, trainer)
        if stop:
            trainer.save(tmp_path / str(views), params)
            grads, params = [p.grad_req for p in params], model(comm)
            params[1].grad_req = grads[1]
            trainer = make(comm, params, compression_params=trainer.compression_params)
            trainer.load(tmp_path / str(views), params)
            if views:
                trainer.gradient_views(params[:1])
        train(comm, 1, 3, params, trainer)
        params[1].grad_req = "write"
        train(comm, 2, 4, params, trainer)
        return laws.digest(params), trainer.state_dict()

    def main(comm):
        (expected, states), (found, others) = (run(comm, stop) for stop in (False, True))
        laws.assert_equal_states(states, others)
        return expected == found

    assert run_ranks(2, main) == [True] * 2


def test_a_parameter_that_was_left_out_from_the_start():
    """It has no place in the plan, but in that of a new Trainer, which goes on."""

    def main(comm):
        a, b = params = [Parameter(n, np.zeros(2), np.ones(2)) for n in "ab"]
        b.grad_req = "null"
        trainer = make(comm, params, SGD(1.0, momentum=0.5))
        trainer.step(2)
        b.grad_req = "write"
        for _ in range(2):
            a.grad = np.ones(2)
            with pytest.raises(ValueError, match="rank 0: b: grad_req was 'null' at the first step; make a new"):
                trainer.step(2)
        again = make(comm, params, SGD(1.0, momentum=0.5))
        again.load_state_dict(trainer.state_dict())
        b.grad = np.ones(2)
        again.step(2)
        return a.data.tolist(), b.data.tolist()

    assert run_ranks(2, main) == [([-2.5, -2.5], [-1.0, -1.0])] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_t7_compression_works_between_processes(size):
    """Upstream aborts: dense gradients go a way that checks that compression is off."""

    def main(comm):
        p = Parameter("p", np.zeros(4))
        trainer = Trainer([p], SGD(1.0), kvstore=comm, compression_params={"type": "topk", "density": 0.25})
        p.grad = np.arange(1.0, 5.0) * (1 + comm.rank)
        trainer.step(1)
        return p.data.tolist()

    assert run_ranks(size, main) == [[0, 0, 0, -4.0 * sum(range(1, size + 1))]] * size


def test_t8_every_step_may_have_its_own_batch_size():
    """Upstream raises at the last, short batch."""

    def main(comm):
        p = Parameter("p", np.zeros(1))
        trainer = make(comm, [p], SGD(1.0))
        for batch_size in (4, 3, np.int64(2), np.float32(0.5), 4):
            p.grad = np.ones(1)
            trainer.step(batch_size)
        return float(p.data[0])

    np.testing.assert_allclose(run_ranks(2, main), [-(2 / 4 + 2 / 3 + 2 / 2 + 2 / 0.5 + 2 / 4)] * 2, rtol=1e-15)


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (0, ValueError, "batch_size must be in [1.2e-38, 8.5e+37], got 0"),
        (-4, ValueError, "batch_size must be in [1.2e-38, 8.5e+37], got -4"),
        (np.inf, ValueError, "batch_size must be in [1.2e-38, 8.5e+37], got inf"),
        (np.nan, ValueError, "batch_size must be in [1.2e-38, 8.5e+37], got nan"),
        (1e-320, ValueError, "batch_size must be in [1.2e-38, 8.5e+37], got 1e-320"),
        (10**400, ValueError, "batch_size must be a number that a float can hold, got one that is too large"),
        (None, TypeError, "batch_size must be a number, got None"),
        (True, TypeError, "batch_size must be a number, got True"),
        (8, ValueError, "has step number 2 of Trainer 1, batch_size=4, ignore_stale_grad=False, frozen=[], rank 1 has"),
    ],
)
def test_t8_batch_sizes_that_cannot_be(wrong, kind, text):
    def main(comm):
        params, trainer = train(comm, 1)
        backward(comm, params, 1)
        try:
            trainer.step(wrong if comm.rank == 1 else 4)
        finally:
            assert all(p.fresh for p in params)

    assert text in same_error(2, main, kind)
    assert same_error(2, lambda c: train(c, 1)[1].step(1, "no"), TypeError).endswith("must be True or False, got 'no'")


@pytest.mark.parametrize("step", [in_one, in_two])
def test_t9_what_is_not_finite_never_enters_a_residual(step):
    """Upstream keeps it there for ever; and residuals can neither be saved nor switched off."""

    def main(comm):
        options = {"compression_params": {"type": "topk", "density": 0.1}, "step": step}
        params, trainer = train(comm, 2, **options)
        before = trainer.state_dict()["states"]
        assert np.abs(before["residual"]["p1"]).max() > 0
        for value in (np.nan, np.inf):
            backward(comm, params, 2)
            if comm.rank:
                params[1].grad[3] = value
            with pytest.raises(FloatingPointError, match=r"rank 1: p1 \(1 of 50 entries\)"):
                step(trainer, 4)
            laws.assert_equal_states(trainer.state_dict()["states"], before)
        trainer.compression_params = None  # dense, and the residual waits
        backward(comm, params, 2)
        step(trainer, 4)
        laws.assert_equal_states(trainer.state_dict()["states"], before)
        trainer.compression_params = {"type": "topk", "density": 1.0}
        for p in params:
            p.grad = np.zeros_like(p.data)
        step(trainer, 4)
        assert not any(r.any() for r in trainer.state_dict()["states"]["residual"].values())

    run_ranks(2, main)


def test_m6_names_reach_the_optimizer():
    """Upstream hands out numbers: exclusions by name never match, nor do multipliers."""

    def main(comm):
        params = [Parameter("weight", np.ones(2)), Parameter("bias", np.ones(2))]
        rule = {"learning_rate": 1.0, "wd": 0.5, "wd_mult": {"bias": 0.0}, "lr_mult": {"weight": 0.5}}
        trainer = Trainer(params, "sgd", rule, communicator=comm)
        for p in params:
            p.grad = np.ones(2)
        trainer.step(2)
        assert [p.data[0] for p in params] == [1 - 0.5 * (1 + 0.5), 0.0]
        layerwise = Trainer(params, "lars", {"lr": 1.0, "eta": 0.5}, communicator=comm)  # but for biases
        for p in params:
            p.data[...] = 1.0
            p.grad = np.full(2, 4.0)
        layerwise.step(2)
        np.testing.assert_allclose([p.data[0] for p in params], [0.5, -3.0], rtol=1e-6)
        with pytest.raises(ValueError, match="lr_mult has 'wieght', which is no parameter's name"):
            Trainer(params, "sgd", {"lr_mult": {"wieght": 0.5}}, communicator=comm)

    run_ranks(2, main)


def test_m7_a_schedule_has_its_own_learning_rate():
    """Upstream overwrites it by the optimizer's default, or ignores the one that was given."""
    p, schedule = Parameter("p", np.zeros(1)), ExponentialDecay(0.8, 1, 0.5)
    trainer = Trainer([p], "sgd", {"lr_scheduler": schedule}, communicator=LocalCommunicator())
    for rate in (0.8, 0.4, 0.2):
        assert trainer.learning_rate == rate
        p.grad = np.ones(1)
        trainer.step(1)
    assert p.data[0] == pytest.approx(-1.4)
    for both in ({"learning_rate": 0.1, "lr_scheduler": schedule}, {"lr": 0.1, "learning_rate": 0.1}):
        with pytest.raises(ValueError, match=f"optimizer_params: {' and '.join(both)} are one thing, lr: give one"):
            Trainer([p], "sgd", both)
    with pytest.raises(ValueError, match="the learning rate is a schedule"):
        trainer.set_learning_rate(0.1)


# ----------------------------------------------------------------------------------------------- what it is made of


def test_optimizers_by_name():
    p = Parameter("p", np.zeros(2))
    for name in "sgd adam adamw rmsprop adagrad lars lamb lans lbsgd".split():
        [kind] = [getattr(optim, n) for n in optim.__all__ if n.lower() == name]
        assert type(Trainer([p], name, {"wd": 0.25}).optimizer) is kind
        assert Trainer([p], name, {"wd": 0.25}).optimizer.at("weight_decay") == 0.25
    adam = Trainer([p], "adam", {"beta1": 0.5, "beta2": 0.75, "epsilon": 1e-3, "rescale_grad": 2.0}).optimizer
    assert (adam.at("beta_1"), adam.at("beta_2"), adam.at("epsilon"), adam.rescale_grad) == (0.5, 0.75, 1e-3, 2.0)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (((), "lbnag"), ValueError, r"optimizer must be one of \['adagrad', 'adam', .*\], got 'lbnag'"),
        (((), "adamm"), ValueError, r"got 'adamm'; did you mean adam"),
        (((), "SGD"), ValueError, "got 'SGD'"),
        (((), "optimizer"), ValueError, "got 'optimizer'"),
        (((), "sgd", {"momentun": 0.9}), ValueError, "sgd has .*, got 'momentun'; did you mean momentum"),
        (((), "sgd", {"learning_rate": -1}), ValueError, "lr must be finite and in"),
        (((), SGD(), {"lr": 0.1}), ValueError, r"optimizer_params \['lr'\] are for an optimizer by name"),
        (((), 3), TypeError, "opt must have apply"),
        (((), SGD), TypeError, "got the class SGD: make an instance"),
        ((3, "sgd"), TypeError, "params must be a dict, list or tuple of distopt.Parameter, got int"),
        (((np.ones(2),), "sgd"), TypeError, "params must be distopt.Parameter, among them is ndarray"),
        (({"a": 3}, "sgd"), TypeError, "params must be distopt.Parameter, among them is int"),
        (
            ([Parameter("a", np.ones(1)), Parameter("a", np.ones(1))], "sgd"),
            ValueError,
            "a: two parameters have this name; names must be unique",
        ),
        (
            ((), "sgd", None, "dist_async"),
            ValueError,
            "kvstore must be None, a communicator, or one of .* 'dist_async'",
        ),
        (({"a": 1, 2: 3}, "sgd"), TypeError, "params must have names as keys, got 2"),
        (((), "sgd", 0.1), TypeError, "optimizer_params must be a dict or None, got float"),
        (((), "sgd", {1: 2}), ValueError, "sgd has the optimizer_params .*, got 1"),
        (((), "SGD"), ValueError, "got 'SGD'; did you mean sgd?"),
        (((), "sgd", None, "nccl"), ValueError, "kvstore must be None"),
        (((), "sgd", None, 3), ValueError, "kvstore must be None"),
        (((), "sgd", None, None, {"type": "3bit"}), ValueError, "must have a type, one of .*'2bit'.*, got '3bit'"),
        (((), "sgd", None, None, {}), ValueError, "must have a type, .* got None"),
        (((), "sgd", None, None, {"type": ["2bit"]}), ValueError, r"must have a type, .* got \['2bit'\]"),
        (((), "sgd", None, None, "2bit"), TypeError, "compression_params must be a dict or None, got str"),
        (((), "sgd", None, None, {"type": "topk"}), ValueError, "type 'topk': missing a required argument: 'density'"),
        (((), "sgd", None, None, {"type": "fp16", "x": 1}), ValueError, "type 'fp16': got an unexpected .* 'x'"),
        (((), "sgd", None, None, {"type": "topk", "density": 2}), ValueError, "density"),
        (((), "sgd", None, None, None, True), ValueError, "update_on_kvstore must be None or False"),
        (((), "sgd", None, None, None, np.ones(2)), ValueError, "update_on_kvstore must be None or False"),
    ],
)
def test_bad_arguments(arguments, kind, text):
    with pytest.raises(kind, match=text):
        Trainer(*arguments)


def test_a_communicator_that_is_none():
    with pytest.raises(TypeError, match=r"communicator must be a distopt.comm.Communicator or None, got int"):
        Trainer((), "sgd", communicator=3)


def test_compression_params_are_taken_as_they_are_given():
    """A dict that is changed later would only look as if it meant something."""
    given = {"type": "2bit", "threshold": 0.5}
    trainer = Trainer((), "sgd", compression_params=given, communicator=LocalCommunicator())
    given["threshold"] = 2.0
    assert trainer.compression_params == {"type": "2bit", "threshold": 0.5}


def test_kvstores():
    comm, p = LocalCommunicator(), Parameter("p", np.zeros(2))
    for given in ({"kvstore": comm}, {"communicator": comm}, {"kvstore": "device", "communicator": comm}):
        assert Trainer([p], "sgd", **given).communicator is comm
    for name in (None, "local", "dist_sync"):
        assert Trainer([p], "sgd", kvstore=name, update_on_kvstore=False).communicator.size == 1
    with pytest.raises(ValueError, match="two communicators: give one"):
        Trainer([p], "sgd", kvstore=comm, communicator=comm)
    with pytest.raises(TypeError, match="loss_scaler must be a LossScaler or None, got str"):
        Trainer([p], "sgd", loss_scaler="dynamic")
    scaler = LossScaler()
    for wrong in ({"threshold": -1}, {"optimizer_params": {"lr_mult": {"q": 0.5}}}):
        with pytest.raises(ValueError, match=r"threshold|lr_mult has 'q'"):
            Trainer([p], "sgd", loss_scaler=scaler, **wrong)  # which does not take it
    Trainer([p], "sgd", loss_scaler=scaler)
    with pytest.raises(ValueError, match="belongs to another DistOpt or Trainer"):
        Trainer([p], "sgd", loss_scaler=scaler)


def test_dicts_are_taken_in_the_order_of_their_keys():
    params = {"b": Parameter("x", np.zeros(1)), "a": Parameter("y", np.zeros(1))}
    trainer = Trainer(params, "sgd", communicator=LocalCommunicator())
    for p in params.values():
        p.grad = np.ones(1)
    trainer.step(1)
    assert trainer.plan.buckets[0].names == ("y", "x")


def test_learning_rates():
    def main(comm):
        p = Parameter("p", np.zeros(1))
        trainer = make(comm, [p], SGD(0.5))
        assert trainer.learning_rate == 0.5
        trainer.set_learning_rate(0.25)
        p.grad = np.ones(1)
        trainer.step(2)
        assert (trainer.learning_rate, p.data[0]) == (0.25, -0.25)
        for wrong, kind in ((-1.0, ValueError), ("0.1", TypeError), (lambda k: 0.1, TypeError)):
            with pytest.raises(kind, match="lr must be"):
                trainer.set_learning_rate(wrong)
        trainer.set_learning_rate(0.25 + comm.rank)
        p.grad = np.ones(1)
        trainer.step(2)

    assert "rank 0 has SGD's lr=0.25, rank 1 has SGD's lr=1.25" in same_error(2, main)
    wrapped = make(LocalCommunicator(), [], BatchGradients(SGD(0.5), 2))
    wrapped.set_learning_rate(0.25)
    assert wrapped.learning_rate == 0.25
    stranger = make(LocalCommunicator(), [], Stranger())
    for use in (lambda: stranger.learning_rate, lambda: stranger.set_learning_rate(0.1)):
        with pytest.raises(TypeError, match=r"needs an optimizer of distopt.optim, got Stranger"):
            use()


class RowSparse:
    """No dense array."""

    indices, data = np.zeros(1, int), np.zeros((1, 3))


def test_a_gradient_that_is_not_dense():
    def main(comm):
        p = Parameter("embedding", np.zeros((5, 3)))
        p.grad = RowSparse() if comm.rank else np.zeros((5, 3))
        make(comm, [p]).step(1)

    assert same_error(2, main, TypeError).startswith("rank 1: embedding: a gradient must be an array, got RowSparse")


def test_parameters():
    p = Parameter("p", np.zeros(2))
    assert (p.grad, p.grad_req, p.fresh) == (None, "write", False)
    with pytest.raises(ValueError, match="p: there is no gradient that could have been written to"):
        p.touch()
    p.grad = np.ones(2)
    assert p.fresh
    p.grad = None
    assert not p.fresh
    assert Parameter("q", np.zeros(1), np.zeros(1), "add").fresh
    assert repr(p) == "Parameter('p', an array (2,) float64)"
    with pytest.raises(ValueError, match=r"p: grad_req must be one of \('write', 'add', 'null'\), got 'wirte'"):
        Parameter("p", np.zeros(1), grad_req="wirte")


def test_states_that_are_loaded_before_the_update():
    """The sums were of other parameters."""

    def main(comm):
        p = Parameter("p", np.zeros(2, np.float16))
        trainer = make(comm, [p], SGD(1.0))
        own = p.grad = np.ones(2, np.float16)
        trainer.allreduce_grads()
        trainer.load_state_dict(trainer.state_dict())
        assert p.grad is own
        with pytest.raises(RuntimeError, match="update applies what allreduce_grads has summed"):
            trainer.update(2)
        p.grad = own
        assert trainer.step(2)
        return p.data.tolist()

    assert run_ranks(2, main) == [[-1.0, -1.0]] * 2


def test_a_sum_that_is_gone():
    def main(comm):
        params, trainer = train(comm, 1)
        backward(comm, params, 1)
        trainer.allreduce_grads()
        if comm.rank:
            params[3].grad = None
        trainer.update(1)

    assert same_error(2, main) == "rank 1: p3: its gradient, which allreduce_grads has summed, is None"


def test_a_parameter_that_moves_before_the_update():
    def main(comm):
        params, trainer = train(comm, 1)
        backward(comm, params, 1)
        trainer.allreduce_grads()
        kept = params[3].data
        params[3].data = kept.copy()
        with pytest.raises(ValueError, match="p3: its data is another array than when its gradient was summed"):
            trainer.update(BATCHES[1])
        params[3].data = kept
        assert trainer.update(BATCHES[1])  # the sums are still there
        return laws.digest(params) == laws.digest(train(comm, 2)[0])

    assert run_ranks(2, main) == [True] * 2


def test_an_update_without_what_was_ignored():
    def main(comm):
        params, trainer = train(comm, 1)
        backward(comm, params, 1, lambda p: p.name != "p2" or comm.rank == 0)
        trainer.allreduce_grads(ignore_stale_grad=True)
        before = laws.digest(params)
        with pytest.raises(ValueError, match=r"the gradients of p2 \(rank 1\)"):
            trainer.update(1)
        assert laws.digest(params) == before
        assert trainer.update(1, ignore_stale_grad=True)
        laws.same_on_all_ranks(comm, laws.digest(params))

    run_ranks(2, main)


def test_ranks_that_make_different_calls():
    def main(comm):
        params, trainer = train(comm, 1)
        backward(comm, params, 1)
        trainer.allreduce_grads() if comm.rank else trainer.step(1)

    assert "rank 0 has step number 2 of Trainer 1, batch" in same_error(2, main)

    def compressions(comm):
        params, trainer = train(comm, 1)
        backward(comm, params, 1)
        trainer.compression_params = {"type": "fp16"} if comm.rank else None
        with pytest.raises(
            ValueError, match=r"ranks differ: rank 0 has a step with Dense\(\), rank 1 has a step with H"
        ):
            trainer.step(BATCHES[1])
        trainer.compression_params = None
        trainer.step(BATCHES[1])
        return laws.digest(params) == laws.digest(train(comm, 2)[0])

    assert run_ranks(2, compressions) == [True] * 2


def test_two_trainers_take_turns():
    def main(comm):
        models = [model(comm) for _ in range(2)]
        trainers = [make(comm, params) for params in models]
        for k in range(2):
            for params, trainer in zip(models, trainers, strict=True):
                train(comm, 1, k, params, trainer)
        backward(comm, models[0], 2)
        backward(comm, models[1], 2)
        assert [laws.digest(m) for m in models] == [laws.digest(train(comm, 2)[0])] * 2
        trainers[comm.rank].step(1)

    assert "of Trainer 1, batch_size=1, ignore_stale_grad=False, frozen=[], rank 1 has" in same_error(2, main)


def test_after_loading_the_running_trainer_keeps_its_own_numbers(tmp_path):
    def main(comm):
        params, trainer = train(comm, 2, optimizer=SGD(0.1, 0.9, rescale_grad=3.0))
        trainer.save_states(tmp_path)
        _, again = train(comm, 1, params=params, optimizer=SGD(0.5, 0.9, rescale_grad=2.0))
        again.load_states(tmp_path)
        assert (again.optimizer.rescale_grad, again.learning_rate) == (2.0, 0.5)
        assert again.optimizer.step_counter == 2
        before = params[1].data.copy()
        moments = again.state_dict()["optimizer"]["moments"]["p1"]
        backward(comm, params, 2)
        again.step(8)
        total = sum(laws.gradients(params, 2, r)[1] for r in range(comm.size))
        np.testing.assert_allclose(params[1].data, before - 0.5 * (0.9 * moments + 2 * total / 8), rtol=1e-5, atol=1e-6)

    run_ranks(2, main)


def test_parameters_are_saved_too_if_they_are_given(tmp_path):
    def main(comm):
        params, trainer = train(comm, 2)
        trainer.save(tmp_path, params)
        params = model(comm)
        trainer = make(comm, params)
        trainer.load(tmp_path, params)
        train(comm, 2, 2, params, trainer)
        return laws.digest(params) == laws.digest(train(comm)[0])

    assert run_ranks(2, main) == [True] * 2


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_a_rank_without_batches_keeps_the_others_company(kind):
    def main(comm):
        params = model(comm)
        trainer = make(comm, params, SGD(0.1), compression_params=COMPRESSIONS[kind][0])
        for step in range(2 + 2 * comm.rank):
            backward(comm, params, step)
            trainer.step(4)
        trainer.join()
        assert trainer.step_counter == 4
        laws.same_on_all_ranks(comm, laws.digest(params))
        return [p.data for p in params]

    found = run_ranks(2, main)[0]
    if kind == "none":
        for k, p in enumerate(laws.parameters()):
            brought = [(step, r) for step in range(4) for r in range(2) if step < 2 + 2 * r]
            total = sum(laws.gradients(laws.parameters(), step, r)[k].astype(np.float64) for step, r in brought)
            np.testing.assert_allclose(found[k], p.data - 0.1 * total / 4, rtol=0, atol=1e-5)


def test_what_the_others_have_no_gradient_of_is_left_alone_in_company_too():
    def main(comm):
        params = [Parameter(n, np.ones(2)) for n in "ab"]
        trainer = make(comm, params, SGD(1.0, weight_decay=0.5))
        for step in range(1 + comm.rank):
            for p in params[: 2 - step]:
                p.grad = np.ones(2)
            trainer.step(2, ignore_stale_grad=True)
        trainer.join()
        return [p.data[0] for p in params]

    assert run_ranks(2, main) == [[-0.5 - 0.5 + 0.25, -0.5]] * 2


def test_what_cannot_be_joined():
    def main(comm, step, batch_size):
        params, trainer = train(comm, 1, step=step)
        if comm.rank:
            trainer.join()
        else:
            backward(comm, params, 1)
            step(trainer, batch_size)

    assert "rank 0 has step number 2 of Trainer 1, batch_size=3" in same_error(2, lambda c: main(c, in_one, 3))
    text = same_error(2, lambda comm: main(comm, in_two, 8), RuntimeError)
    assert text == "rank 1: join() comes after step(): the sums of allreduce_grads may be changed before update"


def test_a_closed_one_refuses():
    trainer = make(LocalCommunicator(), [Parameter("p", np.zeros(1), np.ones(1))])
    trainer.close()
    for use in (lambda: trainer.step(1), trainer.allreduce_grads, lambda: trainer.update(1)):
        with pytest.raises(RuntimeError, match="this Trainer is closed; make a new one"):
            use()


# ----------------------------------------------------------------------------------------------- on a GPU, as it seems


@pytest.mark.parametrize("step", [in_one, in_two])
@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_a_gpu_has_the_bits_of_the_host(doubles, kind, step):
    """Two ranks add in the same order; also where some gradients are fresh on one rank, or nowhere."""

    def main(comm):
        params, trainer = train(comm, 2, step=step, compression_params=COMPRESSIONS[kind][0])
        backward(comm, params, 2, lambda p: p.name != "p1" and (comm.rank == 0 or p.name != "p5"))
        step(trainer, 4, True)
        train(comm, 1, 3, params, trainer, step)
        return laws.digest(params)

    assert on_gpus(2, main) == run_ranks(2, main)


@pytest.mark.parametrize("step", [in_one, in_two])
def test_a_gpu_refuses_what_the_host_refuses(doubles, step):
    """Sums are asked for at once; a step is learnt of by the next one, and counted once."""

    def main(comm):
        params, scaler = model(comm), LossScaler(window=2)
        trainer = make(comm, params, loss_scaler=scaler)
        seen = []
        for k in range(6):
            scale = scaler.scale
            seen.append(scale)
            for p, g in zip(params, laws.gradients(params, k, comm.rank), strict=True):
                g *= np.float32(scale)
                if (k, p.name, comm.rank) in ((1, "p1", 0), (4, "p5", 1)):
                    g.flat[0] = np.inf
                p.grad = laws.put(comm, [g])[0]
            step(trainer, BATCHES[k % 4])
            assert not any(p.fresh for p in params)
        seen.append(scaler.scale)
        trainer.close()
        return seen, laws.digest(params), trainer.skipped, trainer.step_counter

    host = run_ranks(2, main)
    assert on_gpus(2, main) == host
    assert host[0][2:] == (2, 4)


@pytest.mark.parametrize("scaled", [False, True])
def test_nothing_stands_in_for_gradients_whose_sums_are_refused(doubles, scaled):
    """A GPU has written sums by the time the host hears of it."""

    def main(comm):
        p = Parameter("p", laws.put(comm, [np.zeros(2, np.float16)])[0])
        trainer = make(comm, [p], SGD(1.0), loss_scaler=LossScaler() if scaled else None)
        own = p.grad = laws.put(comm, [np.full(2, np.inf if comm.rank else 1, np.float16)])[0]
        with contextlib.nullcontext() if scaled else pytest.raises(FloatingPointError):
            assert trainer.allreduce_grads() is False
        return p.grad is own

    assert on_gpus(2, main) == run_ranks(2, main) == [True] * 2


def test_a_gpu_tells_of_untouched_parameters_before_it_updates(doubles):
    """One by one there is no kernel that looks: the host asks first."""

    def main(comm):
        params, trainer = train(comm, 2, loss_scaler=LossScaler(init_scale=1.0))
        before = laws.digest(params)
        backward(comm, params, 2, lambda p: p.name != "p1")
        if comm.rank:
            device.copy(params[5].grad, np.full(200, np.nan, np.float32))
        assert trainer.step(1, True) is False
        assert laws.digest(params) == before
        return trainer.skipped, trainer.step_counter

    assert on_gpus(2, main) == [(1, 2)] * 2


@pytest.mark.parametrize("step", [in_one, in_two])
def test_streams_may_lag_as_far_as_events_allow(doubles, step):
    def main(comm):
        expected = laws.digest(train(comm, step=step)[0])
        for order in (doubles.lagging(comm._stream.ptr), doubles.lagging(0), doubles.shuffled(5)):
            with doubles.lazily(order) as machine:
                params, trainer = train(comm, 0)
                machine.finish()
                for k in range(4):
                    with device.new_stream() if k % 2 else device.current_stream():
                        train(comm, 1, k, params, trainer, step)
                trainer._learn()
                machine.finish()
            assert laws.digest(params) == expected

    on_gpus(2, main)
