"""Gradients that are missing: zeros where another rank has one, and a parameter is left alone where none has."""

import numpy as np
import pytest

import laws
from distopt import DistOpt, LocalSteps, Parameter, run_ranks
from distopt.compress import ErrorFeedback, Int8, OneBit, TopK
from distopt.optim import SGD, AdamW, Muon

SIZE, STEPS, N = 3, 6, 8
GRADS = np.random.default_rng(0).standard_normal((STEPS, 2, SIZE, 2, N))  # by step, batch, rank, parameter
NOBODY = {(2, 0), (2, 1), (3, 0), (3, 1)}  # steps and batches in which no rank has a gradient of the second parameter


def has_one(step, batch, rank):
    return (step, batch) not in NOBODY and (rank + step) % SIZE != 0


def two():
    return [Parameter(name, np.zeros(N)) for name in "ab"]


def batch_of(params, step, batch, rank):
    a, b = GRADS[step, batch, rank]
    return [(params[0], a.copy()), (params[1], b.copy() if has_one(step, batch, rank) else None)]


def by_hand(batches, momentum=0.9, lr=0.1, decay=0.05):
    """SGD of one process: a parameter without a gradient in a step stays, and so does its momentum."""
    values, buffers = np.zeros((2, N)), np.zeros((2, N))
    for step in range(STEPS):
        for k in range(2):
            present = [(b, r) for b in range(batches) for r in range(SIZE) if k == 0 or has_one(step, b, r)]
            if present:
                mean = sum(GRADS[step, b, r, k] for b, r in present) / SIZE / batches
                buffers[k] = momentum * buffers[k] + mean + decay * values[k]
                values[k] -= lr * buffers[k]
    return values


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("batches", "sync_on_apply"), [(1, True), (2, True), (2, False)])
def test_a_parameter_that_no_rank_has_a_gradient_of_is_left_alone(batches, sync_on_apply, overlap):
    def main(comm):
        params = two()
        options = {"num_batches": batches, "sync_on_apply": sync_on_apply, "overlap": overlap}
        opt = DistOpt(SGD(0.1, 0.9, weight_decay=0.05), comm, allow_missing=True, threshold=0, **options)
        for step in range(STEPS):
            for batch in range(batches):
                opt(batch_of(params, step, batch, comm.rank))
        return [p.data for p in params]

    first, *others = run_ranks(SIZE, main)
    np.testing.assert_allclose(first, by_hand(batches), atol=1e-12)
    assert all(np.array_equal(first, other) for other in others)


def test_one_that_comes_in_the_second_batch_counts():
    def main(comm):
        params = two()
        opt = DistOpt(AdamW(0.1), comm, allow_missing=True, num_batches=2)
        opt([(params[0], np.ones(N)), (params[1], None)])
        opt([(params[0], np.ones(N)), (params[1], np.ones(N) if comm.rank == 1 else None)])
        return params[1].data[0]

    assert run_ranks(2, main) == [pytest.approx(-0.1, rel=1e-3)] * 2


@pytest.mark.sampled(5)
@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
@pytest.mark.parametrize("compressor", [TopK(0.2), Int8(), OneBit()], ids=["topk", "int8", "one bit"])
@pytest.mark.parametrize(("batches", "sync_on_apply"), [(1, True), (2, True), (2, False)])
def test_what_it_has_not_sent_stays(compressor, exchange, batches, sync_on_apply):
    """SGD with a rate of 1 moves by all that has arrived: what was brought, but for the residuals."""

    def main(comm):
        params = two()
        opt = DistOpt(SGD(1.0), comm, allow_missing=True, num_batches=batches, sync_on_apply=sync_on_apply)
        brought = np.zeros((2, N))
        for step in range(STEPS):
            waits = waiting(opt)
            for batch in range(batches):
                pairs = batch_of(params, step, batch, comm.rank)
                for k, (_, grad) in enumerate(pairs):
                    brought[k] += 0 if grad is None else grad
                opt.step(pairs, ErrorFeedback(compressor), exchange=exchange)
            if step in (2, 3):
                np.testing.assert_allclose(waiting(opt)[1], waits[1], atol=1e-12)
        return [p.data for p in params], brought / batches, waiting(opt) / (1 if sync_on_apply else batches)

    def waiting(opt):
        """What this rank has not sent of the two parameters, of its own and as an owner of sums."""
        states = opt.state_dict()["states"]
        kept = [states.get(kind, {}) for kind in ("residual", "owed")]
        return np.stack([sum(arrays.get(name, np.zeros(N)) for arrays in kept) for name in "ab"])

    ranks = run_ranks(SIZE, main)
    arrived = sum(brought - (waits / batches if sync_on_apply else waits) for _, brought, waits in ranks)
    np.testing.assert_allclose(-SIZE * np.array(ranks[0][0]), arrived, atol=1e-6)


def test_a_partial_step_leaves_alone_what_this_rank_has_no_gradient_of():
    def main(comm):
        params = two()
        opt = DistOpt(SGD(1.0, 0.9), comm, allow_missing=True, threshold=0)
        opt([(p, np.ones(N)) for p in params])
        opt.backward_and_partial_update([(params[0], np.zeros(N))] + [(params[1], np.zeros(N))] * comm.rank)
        return params[1].data[0]  # the first bucket was averaged

    assert run_ranks(2, main) == [-1.0, pytest.approx(-1.9)]


def test_local_steps_leave_alone_what_this_rank_has_no_gradient_of():
    def main(comm):
        params = two()
        opt = LocalSteps(SGD(1.0, 0.9), comm, every=2, outer=SGD(1.0), allow_missing=True)
        opt([(p, np.ones(N)) for p in params])
        opt([(params[0], np.zeros(N))])
        return [p.data[0] for p in params]

    assert run_ranks(2, main) == [[pytest.approx(-1.9), pytest.approx(-1.0)]] * 2


def test_a_rank_that_has_joined_does_not_count():
    def main(comm):
        params = two()
        opt = DistOpt(SGD(1.0, 0.9), comm, allow_missing=True)
        opt([(p, np.ones(N)) for p in params])
        if comm.rank == 0:
            opt([(params[0], np.ones(N))])
            opt([(p, np.ones(N)) for p in params])
        opt.join()
        return params[1].data[0]

    assert run_ranks(2, main) == [pytest.approx(-1.0 - 1.9)] * 2


def test_where_ranks_share_an_update_it_is_refused_by_name():
    def views(comm):
        params = two()
        opt = DistOpt(SGD(0.1), comm, allow_missing=True)
        for p, view in zip(params, opt.parameter_views(params), strict=True):
            p.data = view
        opt([(params[0], np.ones(N))])

    def muon(comm):
        params = [Parameter(name, np.zeros((2, 2))) for name in "ab"]
        DistOpt(Muon(0.1, sharded=True), comm, allow_missing=True)([(params[0], np.ones((2, 2))), (params[1], None)])

    for main in (views, muon):
        text = laws.texts_of(2, main, ValueError)
        assert text == "no rank has a gradient of b, but where ranks share an update they update all parameters"
