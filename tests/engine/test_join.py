"""join(): ranks that have no batches left take part in the steps of the others."""

import numpy as np
import pytest

import laws
import reference
from distopt import DistOpt, Parameter, run_ranks
from distopt.compress import Chunks, ErrorFeedback, Packed, TopK, TwoBit
from distopt.optim import SGD

BATCHES = (3, 5, 2)


def uneven(comm, mode, batches=BATCHES, **options):
    params, opt = laws.train(comm, steps=0, mode=mode, **options)
    for step in range(batches[comm.rank]):
        laws.MODES[mode](opt, laws.pairs(comm, params, step))
    opt.join()
    return params, opt


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"deterministic": True}, {"nonfinite": "skip"}])
def test_the_mean_is_over_those_that_have_batches(options):
    def main(comm):
        params, opt = uneven(comm, "dense", **options)
        assert opt.step_counter == max(BATCHES)
        return [p.data for p in params]

    found = run_ranks(3, main)
    lr = [0.1, 0.1, 0.05, 0.05, 0.025]
    for k, p in enumerate(laws.parameters(rank=0)):
        w, b = p.data.astype(np.float64), np.zeros(p.data.shape)
        for step in range(5):
            live = [r for r in range(3) if step < BATCHES[r]]
            g = reference.mean([laws.gradients(laws.parameters(), step, r)[k] for r in live])
            w, b = reference.sgd(w, b, g, lr=lr[step], momentum=0.9, weight_decay=1e-3)
        for rank in range(3):
            np.testing.assert_allclose(found[rank][k], w, rtol=0, atol=1e-5)
            np.testing.assert_array_equal(found[rank][k], found[0][k])


@pytest.mark.sampled(7)
@pytest.mark.parametrize("num_batches", [1, 2, 3])
@pytest.mark.parametrize("mode", [mode for mode in laws.MODES if mode not in laws.APART])
def test_ranks_stay_equal_and_may_go_on(mode, num_batches):
    def main(comm):
        params, opt = uneven(comm, mode, num_batches=num_batches)
        for step in range(5, 8):
            laws.MODES[mode](opt, laws.pairs(comm, params, step))
        opt.join()
        laws.same_on_all_ranks(comm, laws.digest(params) + str(opt.step_counter))
        assert opt.step_counter == 8 // num_batches

    run_ranks(3, main)


@pytest.mark.parametrize("num_batches", [1, 2])
def test_partial_steps_average_those_that_have_batches(num_batches):
    """One bucket: after a step all have the mean of the live ranks' parameters."""

    def main(comm):
        w = Parameter("w", np.zeros(4))
        opt = DistOpt(SGD(1.0), comm, num_batches=num_batches)
        for _ in range(num_batches * (1 + comm.rank)):
            opt.backward_and_partial_update([(w, np.full(4, 6.0 * (1 + comm.rank)))])
        opt.join()
        return w.data.tolist()

    # -6, -12, -18 -> -12; then rank 0 is done: -24 and -30 -> -27; then rank 2 alone: -45
    assert run_ranks(3, main) == [[-45.0] * 4] * 3


def test_a_finished_rank_still_sends_its_residual():
    """Sum of all gradients, each divided by how many ranks were live when it came, arrives in the end."""

    def main(comm):
        w = Parameter("w", np.zeros(8))
        opt = DistOpt(SGD(1.0), comm)
        for _ in range(1 if comm.rank else 9):
            grad = np.arange(1.0, 9.0) if comm.rank else np.zeros(8)
            opt.backward_and_sparse_update([(w, grad)], spars=1 / 8, topK=True)
        opt.join()
        assert not opt.state_dict()["states"]["residual"]["w"].any()
        return w.data.tolist()

    # the largest, 8, went when both were live; the others while rank 0 was alone
    assert run_ranks(2, main) == [[-0.5, -1.0, -1.5, -2.0, -2.5, -3.0, -3.5, -4.0]] * 2


@pytest.mark.sampled(5)
@pytest.mark.parametrize("options", [{}, {"num_batches": 2}, {"num_batches": 2, "sync_on_apply": False}], ids=str)
@pytest.mark.parametrize("exchange", ["gather", "two_phase", "nodes"])
@pytest.mark.parametrize("compressor", [TopK(0.1), Packed(Chunks(4, 64), value="int8"), TwoBit(0.5)], ids=repr)
def test_what_waits_arrives_with_the_weight_that_it_came_with(compressor, exchange, options):
    """Also while ranks have joined, and once all go on: what was applied and waits is the sum of all means."""

    def main(comm):
        comm._hosts = [rank // 2 for rank in range(comm.size)]
        w, expected = Parameter("w", np.zeros(300)), np.zeros(300)
        opt, batches = DistOpt(SGD(1.0), comm, **options), options.get("num_batches", 1)
        for part, lengths in enumerate([(4, 2, 6, 4), (4, 4, 4, 4)]):
            for step in range(max(lengths)):
                live = [rank for rank in range(comm.size) if step < lengths[rank]]
                of_rank = {rank: np.random.default_rng([part, step, rank]).standard_normal(300) for rank in live}
                expected += sum(of_rank.values()) / (len(live) * batches)
                if comm.rank in live:
                    opt.step([(w, of_rank[comm.rank])], ErrorFeedback(compressor), False, exchange)
            opt.join()
            states = opt.state_dict()["states"]
            kept = [states[name]["w"] for name in ("residual", "owed") if name in states]
            waits = laws.summed(comm, sum(kept, np.zeros(300)))
            np.testing.assert_allclose(w.data - waits / (comm.size * batches), -expected, rtol=0, atol=1e-12)

    run_ranks(4, main)


def test_the_mean_of_an_accumulation_window_counts_the_gradients_that_came():
    def main(comm):
        w = Parameter("w", np.zeros(1))
        opt = DistOpt(SGD(1.0), comm, num_batches=2)
        opt([(w, np.array([3.0]))])
        if comm.rank == 0:
            opt([(w, np.array([6.0]))])
        opt.join()
        return w.data.tolist(), opt.state_dict()["contributions"]

    assert run_ranks(2, main) == [([-4.0], 0.0)] * 2  # (3 + 3 + 6) / 3


def test_an_accumulation_window_resumes_and_ends_with_a_finished_rank():
    def main(comm):
        results = []
        for stop in (False, True):
            w = Parameter("w", np.zeros(1))
            opt = DistOpt(SGD(1.0), comm, num_batches=3)
            opt([(w, np.array([3.0]))])
            if stop:
                state = opt.state_dict()
                opt = DistOpt(SGD(1.0), comm, num_batches=3)
                opt.load_state_dict(state)
            opt([(w, np.array([6.0]))])
            if comm.rank == 0:
                opt([(w, np.array([6.0]))])
            opt.join()
            results.append(w.data.tolist())
        return results

    np.testing.assert_allclose(run_ranks(2, main), -4.8, rtol=1e-15)  # (3 + 3 + 6 + 6 + 6) / 5


def test_join_refuses_steps_of_another_mode_and_a_rank_that_never_stepped():
    def other_mode(comm):
        params, opt = laws.train(comm, steps=2)
        if comm.rank:
            opt.join()
        else:
            opt.backward_and_update_half(laws.pairs(comm, params, 2))

    with pytest.raises(ValueError, match=r"ranks differ: rank 0 has a step with Half.*, rank 1 has a step with Dense"):
        run_ranks(2, other_mode)

    def never_stepped(comm):
        params, opt = laws.train(comm, steps=0)
        if comm.rank:
            opt.join()
        else:
            opt(laws.pairs(comm, params, 0))

    with pytest.raises(RuntimeError, match=r"rank 1: join\(\) must come after this rank's first step"):
        run_ranks(2, never_stepped)


def test_join_of_all_ranks_at_once_or_of_one_alone_changes_nothing():
    def main(comm):
        params, opt = laws.train(comm, steps=2)
        opt.join()
        return laws.digest(params), opt.step_counter

    for size in (1, 2):
        expected = run_ranks(size, lambda comm: (laws.digest(laws.train(comm, steps=2)[0]), 2))
        assert run_ranks(size, main) == expected
