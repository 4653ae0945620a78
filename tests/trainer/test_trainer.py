"""Trainer: Gluon's way to train, without upstream's bugs T1 to T9, M6 and M7.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import contextlib
import sys
import threading
import time

import numpy as np
import pytest

import laws
import reference
import tiers
from distopt import DistOpt, LossScaler, Parameter, Trainer, buckets, device, optim, run_ranks
from distopt.comm import Elastic, LocalCommunicator
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
    for p, grad in zip(params, laws.to_device(comm, laws.gradients(params, step, comm.rank)), strict=True):
        if fresh(p):
            p.grad = grad


def model(comm, dtype="float32"):
    return laws.move_to_device(comm, laws.parameters(dtype=dtype, rank=comm.rank))


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

    errors = run_ranks(size, catch)
    assert len(set(errors)) == 1, errors
    return errors[0]


# ----------------------------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("dtype", laws.TOLERANCE)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_are_one_rank_on_the_whole_batch(size, dtype):
    """A sum over ranks, divided by the size of the global batch; here in float64."""

    def main(comm):
        params = model(comm, dtype)
        laws.same_on_all_ranks(comm, laws.digest(train(comm, params=params)[0]))
        return [p.data for p in params]

    weights, lr = run_ranks(size, main)[0], [0.1, 0.1, 0.05, 0.05]
    for k, p in enumerate(laws.parameters(dtype=dtype)):
        w, b = p.data.astype(np.float64), np.zeros(p.data.shape)
        for step in range(4):
            total = sum(laws.gradients(laws.parameters(), step, r)[k].astype(np.float64) for r in range(size))
            if dtype == "float64":
                total = sum(laws.gradients(laws.parameters(dtype=dtype), step, r)[k] for r in range(size))
            w, b = reference.sgd(w, b, total / BATCHES[step], lr=lr[step], momentum=0.9, weight_decay=1e-3)
        np.testing.assert_allclose(weights[k], w, rtol=0, atol=10 * laws.TOLERANCE[dtype])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_a_batch_of_one_example_per_rank_equals_dist_opt(kind, size):
    compression, compressor = COMPRESSIONS[kind]

    def main(comm):
        params, others = model(comm), model(comm)
        trainer = make(comm, params, compression_params=compression)
        opt = DistOpt(laws.sgd(), comm, threshold=60)
        for step in range(4):
            backward(comm, params, step)
            trainer.step(comm.size)
            opt.step(laws.pairs(comm, others, step), compressor)
        return laws.digest(params) == laws.digest(others)

    assert run_ranks(size, main) == [True] * size


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "kind"), tiers.in_turn(laws.OPTIMIZERS, tuple(COMPRESSIONS)))
def test_step_equals_allreduce_grads_and_update_to_the_bit(name, kind):
    """To the bit, with a batch size that changes at every step."""

    def main(comm):
        options = {"compression_params": COMPRESSIONS[kind][0]}
        runs = [train(comm, step=step, optimizer=laws.OPTIMIZERS[name](), **options) for step in (in_one, in_two)]
        digests = {laws.digest(params) for params, _ in runs}
        laws.assert_equal_states(*(trainer.state_dict() for _, trainer in runs))
        return len(digests)

    for size in (1, 3):
        assert run_ranks(size, main) == [1] * size


class Stranger:
    """Knows nothing of buckets."""

    def __init__(self):
        self.seen = []

    def apply(self, name, value, grad):
        self.seen.append((name, grad.copy()))
        value -= grad


@pytest.mark.parametrize("step", [in_one, in_two])
def test_a_custom_optimizer_gets_the_sum_divided_by_the_batch_size_once(step):
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

    def write_sums(buffers, sums, grads, refused):
        time.sleep(0.05 * (threading.current_thread() is not first[0]))
        return buckets.write_sums(buffers, sums, grads, refused)

    first = []

    def rank(comm):
        if comm.rank == 0:
            first.append(threading.current_thread())
        comm.barrier()
        return main(comm)

    monkeypatch.setattr(sys.modules["distopt.trainer.trainer"], "write_sums", write_sums)
    np.testing.assert_allclose(run_ranks(2, rank), 2.0, atol=1e-5)


def test_gradients_that_cannot_hold_a_sum_are_replaced_by_new_arrays():
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
def test_only_the_gradient_that_cannot_hold_its_sum_is_replaced(size, flaw):
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
def test_sums_of_16_bit_gradients_are_kept_in_float32_until_the_update(size, dtype, multi_precision):
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


def test_a_step_leaves_gradients_of_grad_req_add_to_the_user():
    """A step leaves the gradient as it is; the user sets it to zero."""

    def main(comm):
        p = Parameter("p", np.zeros(2), np.zeros(2), grad_req="add")
        trainer = make(comm, [p], SGD(1.0))
        for expected in (-1.0, -3.0):
            p.grad[...] += 1.0
            p.touch()
            trainer.step(2)
            assert p.data[0] == expected  # sums of 2 and of 4, by 2
        with pytest.raises(ValueError, match="p: grad_req must be 'write' for gradient_views, got 'add'"):
            trainer.gradient_views([p])

    run_ranks(2, main)


@pytest.mark.parametrize("fixed", [False, True])
def test_sums_are_not_written_into_memory_shared_with_other_arrays(fixed):
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


def test_gradient_views_may_be_asked_for_some_parameters_only():
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


def test_gradient_views_refused_on_one_rank_are_an_error_on_all():
    def main(comm):
        p = Parameter("p", np.zeros(2), grad_req="add" if comm.rank else "write")
        make(comm, [p]).gradient_views([p])

    assert (
        same_error(2, main)
        == "rank 1: p: grad_req must be 'write' for gradient_views, got 'add', whose gradient must stay"
    )


def test_parameters_of_grad_req_null_are_left_out_on_all_ranks():
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
def test_processes_have_the_bits_of_threads(tmp_path):
    def main(comm):
        return laws.digest(train(comm, compression_params={"type": "topk", "density": 0.1})[0])

    expected = run_ranks(2, main)
    results = run_mpi(2, over_mpi, tmp_path)
    assert [str(f["digest"]) for f in results] == expected
    assert {str(f["text"])[:55] for f in results} == {"stale since the last step: the gradients of p1 (rank 1)"}


# --------------------------------------------------------------------------------- upstream bugs T1 to T9, M6, M7


def test_a_shared_parameter_given_twice_does_not_shift_multipliers_or_states():
    """T1: upstream counts it twice in one list and once in another, so later multipliers and states are others'."""

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


def a_stale_gradient(comm, call):
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
def test_a_stale_gradient_is_found_before_anything_moves(call):
    """T2: upstream has summed in place by then, and marked some as used: a second try sums twice, or fails again."""
    assert run_ranks(3, lambda comm: a_stale_gradient(comm, call)) == [True] * 3


def test_a_stale_gradient_is_found_before_views_are_divided_by_the_scale():
    """T2: views are divided in place, so a second try would divide twice."""

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
def test_a_gradient_overwritten_by_packing_is_stale_after_another_rank_raised(scaled, call):
    """T2: a view that was divided by the scale, and one with another's gradient, would count wrongly if tried again."""

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
        with pytest.raises(ValueError, match=r"rank 1: c: the gradient must be of the parameter's shape \(2,\), got"):
            call(trainer, 1)
        assert [p.fresh for p in params] == [not scaled, False, True]
        c.grad = np.ones(2)
        with pytest.raises(ValueError, match=r"b \(ranks 0, 1\)"):
            call(trainer, 1)
        fill()
        call(trainer, 1)
        return [p.data.tolist() for p in params]

    assert run_ranks(2, main) == [[[-2.0, -2.0]] * 3] * 2


def test_sums_are_not_summed_again():
    """T2: nor does ``update`` take what was never summed, which would let ranks drift apart."""

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
        with pytest.raises(RuntimeError, match=r"^rank 0: update must come after allreduce_grads"):
            trainer.update(1)

    run_ranks(2, main)


@pytest.mark.parametrize("call", [in_one, in_two])
@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_ranks_agree_on_what_is_ignored(kind, call):
    """T3: updated if fresh on some rank, the others counting as zeros; what is fresh nowhere is left alone by all."""

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
def test_a_custom_optimizer_is_not_called_for_parameters_fresh_on_no_rank(call):
    """T3: an optimizer of the user's own sees fresh parameters only."""

    def main(comm):
        params = model(comm)
        trainer = make(comm, params, Stranger())
        backward(comm, params, 0, lambda p: p.name != "p6")
        call(trainer, 1, True)
        assert [name for name, _ in trainer.optimizer.seen] == [p.name for p in params if p.name != "p6"]
        assert not params[6].fresh

    run_ranks(2, main)


def test_ranks_that_differ_in_ignore_stale_grad_are_refused():
    """T3: the error is the same on all ranks."""

    def main(comm):
        params, trainer = train(comm, 1)
        backward(comm, params, 1)
        trainer.step(4, ignore_stale_grad=comm.rank == 1)

    assert "ignore_stale_grad=False, frozen=[], rank 1 has" in same_error(2, main)


def test_shared_parameters_cannot_ignore_stale_gradients():
    """T3: parameters in shared memory are updated all at once."""

    def main(comm):
        params = model(comm)
        trainer = make(comm, params)
        laws.share(params, trainer)
        backward(comm, params, 0, lambda p: p.name != "p1")
        trainer.step(4, ignore_stale_grad=True)

    assert "no rank has a gradient of some parameter, but shared" in same_error(2, main)


@pytest.mark.parametrize("step", [in_one, in_two])
def test_the_next_forward_pass_has_the_new_scale(step):
    """T4: upstream takes it over one check late, overflows again, and quarters it."""

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


def test_allreduce_grads_gives_sums_without_the_loss_scale():
    """T4: what runs in between need not know the scale; a NaN made there is refused, and counted once."""

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


def test_overflows_at_the_lowest_scale_end_in_an_error():
    """T4: the scale has a lower bound."""

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
def test_a_refused_step_uses_gradients_up(step, scaled):
    """T5: upstream leaves them fresh, so the next step applies what was refused, if the backward pass forgot it."""

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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", COMPRESSIONS)
@pytest.mark.parametrize("step", [in_one, in_two])
def test_states_are_complete_and_nothing_in_them_is_executed(kind, step, tmp_path):
    """T6: upstream pickles one device's states, without residuals and without the scaler."""
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


def test_states_of_another_optimizer_are_refused_by_name(tmp_path):
    """T6: nor are they loaded in part."""

    def main(comm):
        params, trainer = train(comm, 2, optimizer=Adam(0.01))
        trainer.save_states(tmp_path)
        _, other = train(comm, 2, params=params, optimizer=optim.RMSProp(0.01))
        before = other.state_dict()
        with pytest.raises(ValueError, match="the states must be those of RMSProp, got those of Adam"):
            other.load_states(tmp_path)
        laws.assert_equal_states(other.state_dict(), before)
        with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
            other.load_states(tmp_path / "nothing")

    run_ranks(2, main)


@pytest.mark.parametrize("views", [False, True])
def test_a_residual_of_a_frozen_parameter_is_in_the_checkpoint(views, tmp_path):
    """T6: going on is never having stopped, with a residual of what is not trained at the moment, and is afterwards."""

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
        (expected, states), (continued, others) = (run(comm, stop) for stop in (False, True))
        laws.assert_equal_states(states, others)
        return expected == continued

    assert run_ranks(2, main) == [True] * 2


def test_a_parameter_left_out_at_the_first_step_needs_a_new_trainer():
    """The new Trainer resumes from the old one's states."""

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
def test_compression_works_between_ranks(size):
    """T7: upstream aborts: dense gradients go a way that checks that compression is off."""

    def main(comm):
        p = Parameter("p", np.zeros(4))
        trainer = Trainer([p], SGD(1.0), kvstore=comm, compression_params={"type": "topk", "density": 0.25})
        p.grad = np.arange(1.0, 5.0) * (1 + comm.rank)
        trainer.step(1)
        return p.data.tolist()

    assert run_ranks(size, main) == [[0, 0, 0, -4.0 * sum(range(1, size + 1))]] * size


def test_every_step_may_have_its_own_batch_size():
    """T8: upstream raises at the last, short batch."""

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
def test_wrong_batch_sizes_are_refused_on_all_ranks(wrong, kind, text):
    """T8: gradients stay fresh."""

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
def test_what_is_not_finite_never_enters_a_residual(step):
    """T9: upstream keeps it there for ever; and residuals can neither be saved nor switched off."""

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


def test_multipliers_and_exclusions_by_name_reach_the_optimizer():
    """M6: upstream hands out numbers: exclusions by name never match, nor do multipliers."""

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
        with pytest.raises(ValueError, match="keys of lr_mult must be names of parameters, got 'wieght'"):
            Trainer(params, "sgd", {"lr_mult": {"wieght": 0.5}}, communicator=comm)

    run_ranks(2, main)


def test_a_schedule_has_its_own_learning_rate():
    """M7: upstream overwrites it by the optimizer's default, or ignores the one that was given."""
    p, schedule = Parameter("p", np.zeros(1)), ExponentialDecay(0.8, 1, 0.5)
    trainer = Trainer([p], "sgd", {"lr_scheduler": schedule}, communicator=LocalCommunicator())
    for rate in (0.8, 0.4, 0.2):
        assert trainer.learning_rate == rate
        p.grad = np.ones(1)
        trainer.step(1)
    assert p.data[0] == pytest.approx(-1.4)
    for both in ({"lr": 0.1, "lr_scheduler": schedule}, {"lr": 0.1, "learning_rate": 0.1}):
        with pytest.raises(ValueError, match=f"got {' and '.join(both)}, which both mean lr; give one"):
            Trainer([p], "sgd", both)
    with pytest.raises(ValueError, match=r"lr_scheduler must have a base_lr, .*, got ExponentialDecay"):
        Trainer([p], "sgd", {"learning_rate": 0.1, "lr_scheduler": schedule})
    with pytest.raises(ValueError, match="the learning rate must be a number, got a schedule"):
        trainer.set_learning_rate(0.1)


# ----------------------------------------------------------------------------------------------- what it is made of


def test_every_optimizer_can_be_made_by_name_with_gluons_options():
    p = Parameter("p", np.zeros(2))
    for name in "sgd adam adamw rmsprop adagrad lars lamb lans lbsgd muon".split():
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
        (
            ((), "sgd", {"momentun": 0.9}),
            ValueError,
            "optimizer_params of sgd must be among .*, got 'momentun'; did you mean momentum",
        ),
        (((), "sgd", {"learning_rate": -1}), ValueError, "lr must be finite and in"),
        (((), SGD(), {"lr": 0.1}), ValueError, r"optimizer_params must be empty for an optimizer object, got \['lr'\]"),
        (((), 3), TypeError, "opt must be an object with apply"),
        (((), SGD), TypeError, "got the class SGD; make an instance"),
        ((3, "sgd"), TypeError, "params must be a dict, list or tuple of distopt.Parameter, got int"),
        (((np.ones(2),), "sgd"), TypeError, "params must be distopt.Parameter, got ndarray among them"),
        (({"a": 3}, "sgd"), TypeError, "params must be distopt.Parameter, got int among them"),
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
        (({"a": 1, 2: 3}, "sgd"), TypeError, "keys of params must be names, got 2"),
        (((), "sgd", 0.1), TypeError, "optimizer_params must be a dict or None, got float"),
        (((), "sgd", {1: 2}), ValueError, "optimizer_params of sgd must be among .*, got 1"),
        (((), "SGD"), ValueError, "got 'SGD'; did you mean sgd?"),
        (((), "sgd", None, "nccl"), ValueError, "kvstore must be None"),
        (((), "sgd", None, 3), ValueError, "kvstore must be None"),
        (
            ((), "sgd", None, None, {"type": "3bit"}),
            ValueError,
            "the type of compression_params must be one of .*'2bit'.*, got '3bit'",
        ),
        (((), "sgd", None, None, {}), ValueError, "the type of compression_params must be one of .* got None"),
        (
            ((), "sgd", None, None, {"type": ["2bit"]}),
            ValueError,
            r"the type of compression_params must be one of .* got \['2bit'\]",
        ),
        (((), "sgd", None, None, "2bit"), TypeError, "compression_params must be a dict or None, got str"),
        (((), "sgd", None, None, {"type": "topk"}), ValueError, "type 'topk': missing a required argument: 'density'"),
        (((), "sgd", None, None, {"type": "fp16", "x": 1}), ValueError, "type 'fp16': got an unexpected .* 'x'"),
        (((), "sgd", None, None, {"type": "topk", "density": 2}), ValueError, "density"),
        (((), "sgd", None, None, None, True), ValueError, "update_on_kvstore must be None or False"),
        (((), "sgd", None, None, None, np.ones(2)), ValueError, "update_on_kvstore must be None or False"),
    ],
)
def test_wrong_arguments_are_refused(arguments, kind, text):
    with pytest.raises(kind, match=text):
        Trainer(*arguments)


def test_a_communicator_of_another_type_is_refused():
    with pytest.raises(TypeError, match=r"communicator must be a distopt.comm.Communicator or None, got int"):
        Trainer((), "sgd", communicator=3)


def test_compression_params_are_copied_when_given():
    """Changing the dict later has no effect."""
    compression = {"type": "2bit", "threshold": 0.5}
    trainer = Trainer((), "sgd", compression_params=compression, communicator=LocalCommunicator())
    compression["threshold"] = 2.0
    assert trainer.compression_params == {"type": "2bit", "threshold": 0.5}


def test_kvstore_is_a_communicator_or_a_name_and_a_scaler_serves_one_trainer():
    comm, p = LocalCommunicator(), Parameter("p", np.zeros(2))
    for options in ({"kvstore": comm}, {"communicator": comm}, {"kvstore": "device", "communicator": comm}):
        assert Trainer([p], "sgd", **options).communicator is comm
    for name in (None, "local", "dist_sync"):
        assert Trainer([p], "sgd", kvstore=name, update_on_kvstore=False).communicator.size == 1
    with pytest.raises(ValueError, match="got two communicators; give one"):
        Trainer([p], "sgd", kvstore=comm, communicator=comm)
    with pytest.raises(TypeError, match="loss_scaler must be a LossScaler or None, got str"):
        Trainer([p], "sgd", loss_scaler="dynamic")
    scaler = LossScaler()
    for wrong in ({"threshold": -1}, {"optimizer_params": {"lr_mult": {"q": 0.5}}}):
        with pytest.raises(ValueError, match=r"threshold|lr_mult must be names of parameters, got 'q'"):
            Trainer([p], "sgd", loss_scaler=scaler, **wrong)  # which does not take it
    Trainer([p], "sgd", loss_scaler=scaler)
    with pytest.raises(ValueError, match="got one that belongs to another"):
        Trainer([p], "sgd", loss_scaler=scaler)


def test_parameters_of_a_dict_are_ordered_by_key():
    params = {"b": Parameter("x", np.zeros(1)), "a": Parameter("y", np.zeros(1))}
    trainer = Trainer(params, "sgd", communicator=LocalCommunicator())
    for p in params.values():
        p.grad = np.ones(1)
    trainer.step(1)
    assert trainer.plan.buckets[0].names == ("y", "x")


def test_set_learning_rate_changes_the_rate_of_a_distopt_optimizer():
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
        with pytest.raises(TypeError, match=r"the optimizer must be one of distopt.optim, got Stranger"):
            use()


class RowSparse:
    """No dense array."""

    indices, data = np.zeros(1, int), np.zeros((1, 3))


def test_a_row_sparse_gradient_is_refused():
    def main(comm):
        p = Parameter("embedding", np.zeros((5, 3)))
        p.grad = RowSparse() if comm.rank else np.zeros((5, 3))
        make(comm, [p]).step(1)

    assert same_error(2, main, TypeError).startswith("rank 1: embedding: a gradient must be an array, got RowSparse")


def test_a_parameter_is_fresh_once_its_gradient_is_assigned():
    p = Parameter("p", np.zeros(2))
    assert (p.grad, p.grad_req, p.fresh) == (None, "write", False)
    with pytest.raises(ValueError, match="p: grad must be an array to be touched, got None"):
        p.touch()
    p.grad = np.ones(2)
    assert p.fresh
    p.grad = None
    assert not p.fresh
    assert Parameter("q", np.zeros(1), np.zeros(1), "add").fresh
    assert repr(p) == "Parameter('p', an array (2,) float64)"
    with pytest.raises(ValueError, match=r"p: grad_req must be one of \('write', 'add', 'null'\), got 'wirte'"):
        Parameter("p", np.zeros(1), grad_req="wirte")


def test_loading_states_between_allreduce_grads_and_update_discards_the_sums():
    """The sums were of other parameters."""

    def main(comm):
        p = Parameter("p", np.zeros(2, np.float16))
        trainer = make(comm, [p], SGD(1.0))
        own = p.grad = np.ones(2, np.float16)
        trainer.allreduce_grads()
        trainer.load_state_dict(trainer.state_dict())
        assert p.grad is own
        with pytest.raises(RuntimeError, match="update must come after allreduce_grads"):
            trainer.update(2)
        p.grad = own
        assert trainer.step(2)
        return p.data.tolist()

    assert run_ranks(2, main) == [[-1.0, -1.0]] * 2


def test_update_refuses_a_summed_gradient_that_was_set_to_none():
    def main(comm):
        params, trainer = train(comm, 1)
        backward(comm, params, 1)
        trainer.allreduce_grads()
        if comm.rank:
            params[3].grad = None
        trainer.update(1)

    assert same_error(2, main) == "rank 1: p3: the gradient must be the sum of allreduce_grads, got None"


def test_update_refuses_a_parameter_whose_array_changed_since_allreduce_grads():
    def main(comm):
        params, trainer = train(comm, 1)
        backward(comm, params, 1)
        trainer.allreduce_grads()
        kept = params[3].data
        params[3].data = kept.copy()
        with pytest.raises(ValueError, match="p3: data must be the array of when its gradient was summed"):
            trainer.update(BATCHES[1])
        params[3].data = kept
        assert trainer.update(BATCHES[1])  # the sums are still there
        return laws.digest(params) == laws.digest(train(comm, 2)[0])

    assert run_ranks(2, main) == [True] * 2


def test_update_must_ignore_the_stale_gradients_that_allreduce_grads_ignored():
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


def test_ranks_that_make_different_calls_or_compress_differently_are_refused():
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
def test_a_joined_rank_takes_part_in_the_others_steps(kind):
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

    results = run_ranks(2, main)[0]
    if kind == "none":
        for k, p in enumerate(laws.parameters()):
            brought = [(step, r) for step in range(4) for r in range(2) if step < 2 + 2 * r]
            total = sum(laws.gradients(laws.parameters(), step, r)[k].astype(np.float64) for step, r in brought)
            np.testing.assert_allclose(results[k], p.data - 0.1 * total / 4, rtol=0, atol=1e-5)


def test_a_joined_rank_leaves_parameters_without_gradients_unchanged():
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


def test_join_refuses_another_batch_size_and_allreduce_grads():
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


def test_a_closed_trainer_refuses_every_call():
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
def test_a_gpu_refuses_the_steps_that_the_host_refuses(doubles, step):
    """The result of allreduce_grads is known at once, that of a step at the next one; each counts once."""

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
                p.grad = laws.to_device(comm, [g])[0]
            step(trainer, BATCHES[k % 4])
            assert not any(p.fresh for p in params)
        seen.append(scaler.scale)
        trainer.close()
        return seen, laws.digest(params), trainer.skipped, trainer.step_counter

    host = run_ranks(2, main)
    assert on_gpus(2, main) == host
    assert host[0][2:] == (2, 4)


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_whose_sum_is_refused_keep_their_own_arrays(doubles, scaled):
    """A GPU has written sums before the host knows that they are refused."""

    def main(comm):
        p = Parameter("p", laws.to_device(comm, [np.zeros(2, np.float16)])[0])
        trainer = make(comm, [p], SGD(1.0), loss_scaler=LossScaler() if scaled else None)
        own = p.grad = laws.to_device(comm, [np.full(2, np.inf if comm.rank else 1, np.float16)])[0]
        with contextlib.nullcontext() if scaled else pytest.raises(FloatingPointError):
            assert trainer.allreduce_grads() is False
        return p.grad is own

    assert on_gpus(2, main) == run_ranks(2, main) == [True] * 2


def test_a_gpu_refuses_a_non_finite_step_before_it_updates_one_by_one(doubles):
    """Updates one by one have no kernel that checks the flag: the host reads it first."""

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
def test_training_has_the_same_bits_however_far_streams_lag(doubles, step):
    def main(comm):
        expected = laws.digest(train(comm, step=step)[0])
        for order in (doubles.lagging(comm._stream.ptr), doubles.lagging(0), doubles.shuffled(5)):
            with doubles.lazily(order) as machine:
                params, trainer = train(comm, 0)
                machine.finish()
                for k in range(4):
                    with device.new_stream() if k % 2 else device.current_stream():
                        train(comm, 1, k, params, trainer, step)
                trainer.engine.nonfinite.poll()
                machine.finish()
            assert laws.digest(params) == expected

    on_gpus(2, main)


def test_compression_gathers_unless_it_is_told_otherwise():
    """MXNet's servers add up all that was sent; in two phases owners of shards compress the sum again."""

    def main(comm):
        found = []
        for more in ({}, {"exchange": "gather"}, {"exchange": "two_phase"}):
            p = Parameter("w", np.zeros(4000, np.float32))
            trainer = Trainer([p], SGD(1.0), kvstore=comm, compression_params={"type": "topk", "density": 0.01} | more)
            for step in range(3):
                p.grad = np.random.default_rng([step, comm.rank]).standard_normal(4000).astype(np.float32)
                trainer.step(1)
            found.append(p.data)
        return found

    for by_default, gathered, in_phases in run_ranks(3, main):
        assert by_default.tobytes() == gathered.tobytes() != in_phases.tobytes()
        assert np.count_nonzero(gathered) > np.count_nonzero(in_phases)


def test_an_unknown_exchange_of_compression_is_refused():
    with pytest.raises(ValueError, match="the exchange of compression_params must be one of auto, gather, two_phase"):
        Trainer([], "sgd", compression_params={"type": "2bit", "exchange": "ring"})


@pytest.mark.parametrize("step", [in_one, in_two])
@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_go_on_without_a_lost_rank(step, victim):
    def lossy(comm):
        elastic, member = Elastic(comm), comm.rank
        params = model(elastic)
        trainer = make(elastic, params)
        for k in range(4):
            if (member, k) == (victim, 2):
                return None
            for p, grad in zip(params, laws.gradients(params, k, member), strict=True):
                p.grad = grad
            step(trainer, 6)
        elastic.leave()
        return [p.data for p in params]

    def alone(comm):  # what the others bring, in one rank
        params = model(comm)
        trainer = make(comm, params)
        for k in range(4):
            of = [laws.gradients(params, k, r) for r in range(3) if r != victim or k < 2]
            for p, grads in zip(params, zip(*of, strict=True), strict=True):
                p.grad = sum(grads[1:], grads[0])
            step(trainer, 6)
        return [p.data for p in params]

    found = [had for had in run_ranks(3, lossy) if had]
    (expected,) = run_ranks(1, alone)
    assert len(found) == 2
    for values in found:
        for a, b in zip(values, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
