"""Apache SINGA's bugs: each test here fails on what upstream does.  (S1, S2, S5, S8, S10: see test_compress.py.)

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import inspect
import warnings

import numpy as np
import pytest

import reference
from distopt import DistOpt, Parameter, run_ranks
from distopt.comm import Metered
from distopt.optim import SGD, Adam, ExponentialDecay, RMSProp
from laws import constant_pairs


def test_a_buffer_is_not_used_again_before_its_last_reader_is_done():
    """S3: many half all-reduces back to back, of sizes that share the staging memory."""

    def main(comm):
        opt = DistOpt(communicator=comm, buffSize=64)
        xs = [np.full(60, k + comm.rank, np.float32) for k in range(50)]
        for x in xs:
            opt.fused_all_reduce_half([x])
        opt.wait()
        return [float(x[59]) for x in xs]

    assert run_ranks(2, main) == [[2 * k + 1 for k in range(50)]] * 2


@pytest.mark.parametrize(
    "verb", ["all_reduce", "all_reduce_half", "fused_all_reduce", "fused_all_reduce_half", "sparsification"]
)
def test_any_tensor_size_works_with_any_buffer_size(verb):
    """S4: a tensor larger than buffSize, a threshold larger than it, and a density above one half."""

    def main(comm):
        opt, x = DistOpt(communicator=comm, buffSize=8, threshold=1000), np.full(100, comm.rank + 1.0, np.float32)
        if verb == "sparsification":
            opt.sparsification(x, None, 0.9, True)
            return np.count_nonzero(x == 3)
        getattr(opt, verb)([x] if "fused" in verb else x)
        return np.count_nonzero(x == 3)

    assert run_ranks(2, main) == [90 if verb == "sparsification" else 100] * 2


def test_half_takes_float64_and_clips_only_when_asked():
    """S5: half mode is not for float32 alone."""

    def main(comm):
        p = Parameter("p", np.zeros(2))
        opt = DistOpt(SGD(1.0), comm)
        opt.backward_and_update_half([(p, np.array([300.0, 1.0]))])
        plain = p.data.copy()
        opt.backward_and_update_half([(p, np.array([300.0, 1.0]))], clipping=True)
        return plain.tolist(), (plain - p.data).tolist()

    assert run_ranks(2, main) == [([-300.0, -1.0], [100.0, 1.0])] * 2


def test_residuals_follow_their_parameters():
    """S6: another order of arrival, threshold or selector, and a checkpoint, lose nothing and mix nothing."""

    def main(comm):
        params = [Parameter(f"p{k}", np.zeros(k + 2)) for k in range(5)]
        opt, total = DistOpt(SGD(1.0), comm), [np.zeros(k + 2) for k in range(5)]
        for step in range(12):
            rng = [np.random.default_rng([step, r]) for r in range(comm.size)]
            grads = [[r.standard_normal(p.data.size) for p in params] for r in rng]
            for k in range(5):
                total[k] += sum(g[k] for g in grads)
            loss = list(zip(params, grads[comm.rank], strict=True))[:: 1 if step % 2 else -1]
            if step == 7:
                state, opt = opt.state_dict(), DistOpt(SGD(1.0), comm)
                opt.load_state_dict(state)
            threshold = (0, 4, 1000)[step % 3]
            opt.backward_and_sparse_update(loss, threshold, 0.2 if step % 4 else 1.5, topK=bool(step % 4))
        for p, t in zip(params, total, strict=True):
            residual = opt.state_dict()["states"]["residual"][p.name]
            comm.all_reduce(residual)
            np.testing.assert_allclose(residual - comm.size * p.data, t, atol=1e-12)

    run_ranks(3, main)


def test_corr_may_be_switched_between_steps():
    """S7: the residual waits while corr is off."""

    def main(comm):
        p = Parameter("p", np.zeros(4))
        opt = DistOpt(SGD(1.0), comm)
        for corr in (False, True, False, True):
            opt.backward_and_sparse_update([(p, np.array([4.0, 3.0, 2.0, 1.0]))], spars=0.25, topK=True, corr=corr)
        return p.data.tolist(), opt.state_dict()["states"]["residual"]["p"].tolist()

    assert run_ranks(2, main) == [([-12.0, -6.0, 0.0, 0.0], [4.0, 0.0, 4.0, 2.0])] * 2


def test_partial_synchronisation_goes_on_when_there_are_fewer_buckets():
    """S9: upstream's counter stops for ever once it is past the number of buckets."""

    def main(comm):
        params = [Parameter(f"p{k}", np.full(4, float(comm.rank))) for k in range(6)]
        opt = DistOpt(SGD(0.0), comm, broadcast=False)
        for _ in range(5):  # six buckets: five of them are averaged
            opt.backward_and_partial_update(constant_pairs(params), threshold=0)
        spread = [float(p.data[0]) for p in params]
        for p in params:
            p.data[:] = comm.rank
        for _ in range(2):  # two buckets
            opt.backward_and_partial_update(constant_pairs(params), threshold=10)
        return spread, [float(p.data[0]) for p in params]

    first, second = run_ranks(2, main)
    assert first == ([0.5] * 5 + [0.0], [0.5] * 6)
    assert second == ([0.5] * 5 + [1.0], [0.5] * 6)


def test_parameters_do_not_change_during_backward():
    """S9: partial mode updates after the last gradient."""

    def main(comm):
        p, seen = Parameter("p", np.ones(2)), []
        q = Parameter("q", np.ones(2))

        def backward():
            yield q, np.ones(2)
            seen.append(q.data.tolist())
            yield p, np.ones(2)

        opt = DistOpt(SGD(1.0), comm)
        opt.backward_and_partial_update(backward())
        return seen

    assert run_ranks(2, main) == [[[1.0, 1.0]]] * 2


@pytest.mark.parametrize("mode", ["half", "sparse", "partial"])
def test_parameters_of_mixed_dtypes_are_updated_in_one_step(mode):
    """S11: float32 and float64 parameters in one step."""

    def main(comm):
        params = [Parameter("a", np.zeros(5, "f4")), Parameter("b", np.zeros(5)), Parameter("c", np.zeros(5, "f4"))]
        opt = DistOpt(SGD(1.0), comm)
        for _ in range(3):
            loss = constant_pairs(params, comm.rank + 1.0)
            if mode == "half":
                opt.backward_and_update_half(loss)
            elif mode == "sparse":
                opt.backward_and_sparse_update(loss, spars=1.0, topK=True)
            else:
                opt.backward_and_partial_update(loss, threshold=0)
        return [float(p.data[0]) for p in params]

    ranks = run_ranks(2, main)
    assert np.mean(ranks, axis=0).tolist() == [-4.5] * 3
    assert mode == "partial" or ranks[0] == ranks[1]


def test_two_instances_work_side_by_side_and_errors_are_exceptions():
    """S12: nothing is started or ended by a constructor."""

    def main(comm):
        for _ in range(2):
            opt, p = DistOpt(SGD(1.0), comm), Parameter("p", np.zeros(2))
            opt(constant_pairs([p]))
        with pytest.raises(ValueError, match="shape"):
            opt([(p, np.ones(3))])

    run_ranks(2, main)


def test_no_shared_default_no_warnings_and_a_counter_that_counts():
    """S13: the counter is an integer, beyond 2**24 too."""
    assert inspect.signature(DistOpt).parameters["opt"].default is None
    opt, p = DistOpt(), Parameter("p", np.zeros(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.update(p, np.ones(1))
    opt.opt.step_counter = 2**24
    opt.opt.step()
    assert opt.opt.step_counter == 2**24 + 1


def test_parameters_start_as_those_of_rank_0():
    """S14: the first step broadcasts them."""

    def main(comm):
        p = Parameter("p", np.full(2, float(comm.rank)))
        DistOpt(SGD(1.0), comm)(constant_pairs([p]))
        return p.data.tolist()

    assert run_ranks(3, main) == [[-1.0, -1.0]] * 3


@pytest.mark.parametrize("kind", [RMSProp, Adam])
def test_a_scheduled_epsilon_is_used(kind):
    """S15: at every update."""
    rule = {"epsilon": ExponentialDecay(1e-2, 1, 0.1), "lr": 0.1}
    opt, mine = kind(**rule), np.array([1.0])
    state = [np.array([1.0]), *(np.zeros(1) for _ in kind.slots)]
    for k in range(4):
        numbers = {"lr": 0.1, "epsilon": 1e-2 * 0.1**k} | ({"t": k + 1} if kind is Adam else {})
        state = getattr(reference, kind.__name__.lower())(*state, np.array([1e-3]), **numbers)
        opt.apply("w", mine, np.array([1e-3]))
        opt.step()
    np.testing.assert_allclose(mine, state[0], rtol=1e-13)


def test_every_schedule_goes_on_after_set_states():
    """S15: upstream refreshes the learning rate only: dampening, decay, rho and betas stay at their first values."""

    def make():
        falls = ExponentialDecay(0.9, 2, 0.5)
        return SGD(0.1, momentum=falls, dampening=falls, weight_decay=falls)

    values, opts = [np.ones(3), np.ones(3)], [make(), make()]
    for k in range(8):
        opts[0].apply("w", values[0], np.full(3, 0.5))
        opts[0].step()
        if k == 3:
            opts[1].set_states(opts[0].get_states())
            values[1] = values[0].copy()
        if k > 3:
            opts[1].apply("w", values[1], np.full(3, 0.5))
            opts[1].step()
    np.testing.assert_array_equal(*values)


def test_a_momentum_that_is_0_for_now_keeps_its_buffer():
    """S15: and a weight decay that is 0 at first counts as soon as it is not."""
    opt, w = SGD(0.1, momentum=lambda k: 0.9 if k != 1 else 0.0), np.zeros(1)
    for _ in range(2):
        opt.apply("w", w, np.ones(1))
        opt.step()
    assert opt.get_states()["moments"]["w"] == 1.0
    starts_at_0, w = SGD(0.1, weight_decay=lambda k: 0.0 if k == 0 else 1.0), np.ones(1)
    for _ in range(2):
        starts_at_0.apply("w", w, np.zeros(1))
        starts_at_0.step()
    assert w[0] == pytest.approx(0.9)


def test_threshold_mode_makes_one_gather_per_bucket():
    """S16: threshold mode: per bucket one gather, whose lengths are agreed before its payload, on one communicator."""

    def main(comm):
        metered = Metered(comm)
        params = [Parameter(f"p{k}", np.zeros(4)) for k in range(3)]
        opt = DistOpt(SGD(1.0), metered, broadcast=False)
        for step in range(5):
            grads = [np.arange(4.0) + k + step * (comm.rank + 1) for k in range(3)]
            opt.backward_and_sparse_update(list(zip(params, grads, strict=True)), 0, spars=3.0)
        return metered.report()["all_gather"]["calls"], [p.data.tolist() for p in params]

    found = run_ranks(2, main)
    assert found[0] == found[1]
    assert found[0][0] == 15
