"""clip_norm: clipping by the global norm of the mean gradient, against numpy in float64."""

import math
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import laws
from distopt import DistOpt, LossScaler, Parameter, Trainer, run_ranks, simulate
from distopt.comm import Metered
from distopt.optim import SGD, Adam
from launch import needs_mpi, run_mpi

CLIP = 2.0


class Recorder:
    """A stranger that keeps the means that it is given; its parameters move alike with any."""

    def __init__(self):
        self.steps = [{}]

    def apply(self, name, value, grad):
        self.steps[-1][name] = grad.astype(np.float64)
        value -= 1

    def step(self):
        self.steps.append({})


def norm_of(means):
    """In float64, of all of them as one vector."""
    return math.sqrt(sum(float(np.sum(np.square(m))) for m in means.values()))


def coefficient(norm, clip=CLIP):
    """torch's."""
    return min(1.0, clip / (norm + 1e-6))


def recorded(comm, mode, clip_norm, steps=4, **options):
    """The means of each step, and the norms that the optimizer tells."""
    opt = DistOpt(Recorder(), comm, threshold=60, clip_norm=clip_norm, **options)
    params, norms = laws.parameters(dtype=options.pop("dtype", "float32"), rank=comm.rank), []
    for step in range(steps):
        if laws.MODES[mode](opt, laws.pairs(comm, params, step)):
            norms.append(opt.gradient_norm)
    return opt.opt.steps[:-1], norms


@given(
    size=st.integers(1, 3),
    clip=st.floats(1e-3, 1e3),
    threshold=st.sampled_from([0, 1, 60, 10**6]),
    dtype=st.sampled_from(["float32", "float64"]),
    steps=st.integers(1, 3),
)
def test_dense_is_sgd_on_the_clipped_mean(size, clip, threshold, dtype, steps):
    def main(comm):
        params = laws.parameters(dtype=dtype, rank=comm.rank)
        opt = DistOpt(SGD(0.1, weight_decay=0.01), comm, threshold=threshold, clip_norm=clip)
        norms = []
        for step in range(steps):
            opt(laws.pairs(comm, params, step))
            norms.append(opt.gradient_norm)
        return [p.data for p in params], norms

    wanted = [p.data.astype(np.float64) for p in laws.parameters(dtype=dtype, rank=0)]
    norms = []
    for step in range(steps):
        ranks = [laws.gradients(laws.parameters(dtype=dtype), step, rank) for rank in range(size)]
        means = [np.mean([np.asarray(g, np.float64) for g in grads], axis=0) for grads in zip(*ranks, strict=True)]
        norms.append(norm_of(dict(enumerate(means))))
        c = coefficient(norms[-1], clip)
        wanted = [w - 0.1 * (c * m + 0.01 * w) for w, m in zip(wanted, means, strict=True)]
    for found, told in run_ranks(size, main):
        np.testing.assert_allclose(told, norms, rtol=20 * laws.TOLERANCE[dtype])
        for x, w in zip(found, wanted, strict=True):
            np.testing.assert_allclose(x, w, rtol=0, atol=20 * laws.TOLERANCE[dtype])


def assert_clipped(plain, clipped, norms):
    """Are these the means of a run without clipping, times the coefficients of their norms?"""
    assert len(plain) == len(clipped) == len(norms) > 0
    for means, scaled, norm in zip(plain, clipped, norms, strict=True):
        assert norm == pytest.approx(norm_of(means), rel=1e-6)
        for name, mean in means.items():
            np.testing.assert_allclose(scaled[name], coefficient(norm) * mean, rtol=3e-7, atol=1e-30)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("mode", laws.MODES)
def test_every_mode_applies_its_mean_times_the_clipping_coefficient(mode, size):
    def main(comm):
        plain, _ = recorded(comm, mode, None)
        clipped, norms = recorded(comm, mode, CLIP)
        assert_clipped(plain, clipped, norms)
        return norms

    found = run_ranks(size, main)
    assert max(found[0]) > CLIP
    if mode not in laws.APART:  # whose norms are each rank's own
        assert found == [found[0]] * size


@pytest.mark.parametrize(
    "options",
    [
        {"num_batches": 2},
        {"num_batches": 2, "sync_on_apply": False},
        {"overlap": True},
        {"deterministic": True},
        {"nonfinite": "propagate"},
        {"nonfinite": "skip", "check_every": 1},
    ],
)
def test_clipping_works_with_every_option(options):
    def main(comm):
        plain, _ = recorded(comm, "dense", None, **options)
        clipped, norms = recorded(comm, "dense", CLIP, **options)
        assert_clipped(plain, clipped, norms)
        return norms

    found = run_ranks(3, main)
    assert found == [found[0]] * 3


def test_a_loss_scale_is_divided_out_before_the_norm_is_taken():
    def main(comm, scaled):
        params, opt = laws.parameters(rank=comm.rank), DistOpt(SGD(0.1), comm, clip_norm=CLIP)
        if scaled:
            scaler = LossScaler(2.0**10)
            opt = DistOpt(SGD(0.1), comm, clip_norm=CLIP, nonfinite=scaler)
        for step in range(3):
            factor = np.float32(scaler.scale if scaled else 1.0)
            grads = [np.asarray(factor * g) for g in laws.gradients(params, step, comm.rank)]
            if step == 1 and scaled:
                opt([(p, np.full_like(p.data, np.inf)) for p in params])  # is dropped, and halves the scale
                grads = [np.asarray(g / 2) for g in grads]
            opt(zip(params, grads, strict=True))
        return laws.digest(params), opt.gradient_norm

    assert run_ranks(2, lambda comm: main(comm, True)) == run_ranks(2, lambda comm: main(comm, False))


def test_a_norm_below_the_bound_changes_no_bit_and_infinity_only_measures():
    def main(comm):
        digests = set()
        for clip in (None, 1e9, math.inf):
            params, opt = laws.train(comm, clip_norm=clip)
            digests.add(laws.digest(params))
            assert (opt.gradient_norm is None) == (clip is None)
        return len(digests)

    assert run_ranks(2, main) == [1, 1]


@given(st.integers(1, 3), st.sampled_from(["float32", "float64"]), st.data())
def test_the_norm_has_the_same_bits_on_every_rank_in_every_plan_and_for_virtual_ranks(size, dtype, data):
    threshold = data.draw(st.integers(0, 300))
    shapes = data.draw(st.lists(st.integers(0, 9000).map(lambda n: (n,)), min_size=1, max_size=6))

    def main(comm, threshold):
        options = {"shapes": shapes, "dtype": dtype, "threshold": threshold, "clip_norm": 0.5, "deterministic": True}
        params, opt = laws.train(comm, steps=2, **options)
        return opt.gradient_norm, laws.digest(params)

    wanted = run_ranks(size, lambda comm: main(comm, 10**6))
    assert wanted == [wanted[0]] * size
    assert run_ranks(size, lambda comm: main(comm, threshold)) == wanted
    sim, params = simulate(size, laws.sgd(), threshold=threshold, clip_norm=0.5), laws.parameters(shapes, dtype)
    for step in range(2):
        sim(lambda rank, step=step: laws.pairs(laws.VirtualRank(rank, size), params, step))
    assert (sim.gradient_norm, laws.digest(params)) == wanted[0]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_parameters_of_16_bits_are_clipped_by_the_norm_of_their_float32_sums(dtype):
    def main(comm):
        p, opt = Parameter("p", np.zeros(3, dtype)), DistOpt(Recorder(), comm, clip_norm=1.0)
        opt([(p, np.array([3.0, 0.0, 4.0], dtype) * dtype(comm.rank + 1))])
        return opt.gradient_norm, opt.opt.steps[0]["p"].tolist()

    for norm, mean in run_ranks(2, main):
        assert norm == 7.5
        np.testing.assert_allclose(mean, np.array([4.5, 0, 6]) / (7.5 + 1e-6), rtol=1e-3)


def test_sharing_the_parameters_changes_no_bit():
    def main(comm):
        for make in (laws.sgd, laws.OPTIMIZERS["lamb"]):
            for nonfinite in ("raise", "propagate"):
                laws.sharding_changes_no_bit(comm, make=make, clip_norm=CLIP, nonfinite=nonfinite)

    run_ranks(3, main)


def test_a_clipped_run_resumes_to_the_same_bits():
    run_ranks(2, lambda comm: laws.resume(comm, mode="topk", clip_norm=CLIP))


def test_a_rank_without_batches_clips_as_the_others():
    def main(comm):
        params, opt = laws.train(comm, steps=2 + comm.rank, clip_norm=CLIP)
        opt.join()
        laws.same_on_all_ranks(comm, laws.digest(params))
        return opt.gradient_norm

    found = run_ranks(2, main)
    assert found[0] == found[1] > CLIP


def test_norms_of_nothing_zeros_and_huge_numbers_are_exact():
    opt = DistOpt(Recorder(), clip_norm=1.0)
    assert opt.gradient_norm is None
    opt([(Parameter("p", np.zeros(0)), np.zeros(0)), (Parameter("q", np.zeros(2)), np.zeros(2))])
    assert (opt.gradient_norm, opt.opt.steps[0]["q"].tolist()) == (0.0, [0.0, 0.0])
    large = np.float32(2.0**127)  # whose square is beyond float32
    opt = DistOpt(Recorder(), clip_norm=1.0)
    opt([(Parameter("p", np.zeros(4, np.float32)), np.full(4, large))])
    assert opt.gradient_norm == 2.0**128
    np.testing.assert_allclose(opt.opt.steps[0]["p"], 0.5, rtol=1e-6)
    opt = DistOpt(Recorder(), clip_norm=1.0)
    opt([])
    assert opt.gradient_norm == 0.0


def test_a_norm_beyond_float64_raises_and_does_not_count_as_a_step():
    def main(comm):
        opt, p = DistOpt(Recorder(), comm, clip_norm=1.0), Parameter("p", np.ones(2))
        with pytest.raises(FloatingPointError, match=r"the squares of the gradients must add up to at most 1\.8e308"):
            opt([(p, np.full(2, 1e160))])
        assert opt([(p, np.full(2, 3.0))])
        return opt.step_counter, opt.gradient_norm

    assert run_ranks(2, main) == [(1, pytest.approx(18**0.5))] * 2
    opt, p = DistOpt(Recorder(), clip_norm=1.0), Parameter("p", np.ones(2))
    with pytest.raises(FloatingPointError, match="the squares of the gradients"):
        opt.backward_and_partial_update([(p, np.full(2, 1e160))])


def test_what_is_not_finite_spreads_without_a_check():
    opt, p = DistOpt(Recorder(), clip_norm=1.0, nonfinite="propagate"), Parameter("p", np.zeros(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt([(p, np.array([1.0, np.nan]))])
    assert np.isnan(opt.opt.steps[0]["p"]).all()


def test_a_trainer_clips_the_sum_over_the_batch():
    def main(comm, by_hand):
        ps = [Parameter(f"p{k}", np.zeros(3)) for k in range(2)]
        trainer = Trainer(ps, "sgd", {"lr": 1.0}, communicator=comm, clip_norm=1.0)
        for p in ps:
            p.grad = np.full(3, 8.0 * (comm.rank + 1))
        if by_hand:
            trainer.allreduce_grads()
            trainer.update(4)
        else:
            trainer.step(4)
        return trainer.gradient_norm, np.concatenate([p.data for p in ps]).tolist()

    for by_hand in (False, True):
        for norm, data in run_ranks(2, lambda comm, by_hand=by_hand: main(comm, by_hand)):
            assert norm == pytest.approx(6 * math.sqrt(6), rel=1e-15)
            np.testing.assert_allclose(data, -6 / (norm + 1e-6), rtol=1e-15)


def test_a_trainer_leaves_parameters_without_fresh_gradients_out_of_the_norm():
    def main(comm):
        a, b = Parameter("a", np.zeros(4)), Parameter("b", np.zeros(4))
        two_bit = {"type": "2bit", "threshold": 1.0}
        trainer = Trainer([a, b], Recorder(), communicator=comm, compression_params=two_bit, clip_norm=100.0)
        a.grad, b.grad = np.full(4, 1.0), np.full(4, 9.0)
        trainer.step(1)
        first = trainer.gradient_norm
        a.grad = np.full(4, 1.0)  # and b has a residual, which would be sent
        trainer.step(1, ignore_stale_grad=True)
        return first, trainer.gradient_norm, trainer.optimizer.steps[1]["a"].tolist()

    assert run_ranks(2, main) == [(math.sqrt(32), 4.0, [2.0] * 4)] * 2


@pytest.mark.parametrize(
    ("clip", "error", "text"),
    [
        (0, ValueError, "clip_norm must be above 0, got 0"),
        (-1.0, ValueError, "clip_norm must be above 0, got -1.0"),
        (math.nan, ValueError, "clip_norm must be above 0, got nan"),
        ("1", TypeError, "clip_norm must be a number, got '1'"),
        (True, TypeError, "clip_norm must be a number, got True"),
    ],
)
def test_wrong_clip_norms_are_refused(clip, error, text):
    for make in (
        lambda: DistOpt(clip_norm=clip),
        lambda: Trainer([Parameter("p", np.zeros(1))], "sgd", clip_norm=clip),
        lambda: simulate(2, clip_norm=clip),
    ):
        with pytest.raises(error, match=f"^{text}$"):
            make()


def test_ranks_with_different_clip_norms_are_refused():
    def main(comm):
        p = Parameter("p", np.zeros(1))
        with pytest.raises(ValueError, match=r"ranks differ: rank 0 has clip_norm=1\.0, rank 1 has clip_norm=2\.0"):
            DistOpt(SGD(), comm, clip_norm=1.0 + comm.rank)([(p, np.ones(1))])

    run_ranks(2, main)


def test_updates_that_cannot_be_clipped_are_refused():
    opt, p = DistOpt(SGD(), clip_norm=1.0), Parameter("p", np.zeros(1))
    with pytest.raises(ValueError, match="clip_norm must be None for update, which has the gradient of one parameter"):
        opt.update(p, np.ones(1))
    with pytest.raises(ValueError, match="clip_norm must be None in a captured step"):
        opt.capture(lambda: [(p, np.ones(1))])
    with pytest.raises(AttributeError):
        opt.clip_norm = 2.0
    assert p.data[0] == 0


def real_processes(comm):
    laws.sharding_changes_no_bit(comm, make=lambda: Adam(0.01), clip_norm=CLIP)
    params, opt = laws.train(comm, clip_norm=CLIP, deterministic=True)
    laws.same_on_all_ranks(comm, laws.digest(params) + repr(opt.gradient_norm))
    return {"digest": np.array(laws.digest(params)), "norm": np.array(opt.gradient_norm)}


@needs_mpi
@pytest.mark.mpi
def test_clipped_runs_of_processes_have_the_bits_of_threads(tmp_path):
    wanted = run_ranks(2, lambda comm: laws.train(comm, clip_norm=CLIP, deterministic=True))
    for found in run_mpi(2, real_processes, tmp_path):
        assert (str(found["digest"]), float(found["norm"])) == (laws.digest(wanted[0][0]), wanted[0][1].gradient_norm)


def test_a_norm_costs_one_message_at_most():
    def main(comm):
        calls = []
        for mode in ("topk", "dense"):
            metered = Metered(comm)
            laws.train(metered, mode=mode, clip_norm=CLIP)
            calls.append([entry.step for entry in metered.ledger.entries if entry.phase == "update"])
        return calls

    assert run_ranks(1, main) == [[[], []]]
    for whole, in_shares in run_ranks(2, main):
        assert whole == []  # every rank has the whole sum
        assert in_shares == [1, 2, 3, 4]  # the steps, in which each rank squares its share
