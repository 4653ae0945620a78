"""gradient_hook: a callable that gets the mean gradients before the update."""

import ml_dtypes
import numpy as np
import pytest

import laws
from distopt import DistOpt, LossScaler, Parameter, run_ranks, simulate
from distopt.optim import SGD
from launch import needs_mpi, run_mpi


def nothing(means):
    """Change no gradient."""


def means_of(params, step, size):
    """The float64 mean over ranks of each parameter's gradient."""
    ranks = [laws.gradients(params, step, rank) for rank in range(size)]
    return [np.mean([np.asarray(g, np.float64) for g in grads], axis=0) for grads in zip(*ranks, strict=True)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_hook_gets_every_parameter_with_its_mean_in_the_plans_order(size):
    def main(comm):
        seen = []
        params = laws.parameters(rank=comm.rank)
        opt = DistOpt(SGD(), comm, threshold=60, gradient_hook=lambda means: seen.append(means))
        for step in range(2):
            seen.clear()
            opt(laws.pairs(comm, params, step))
            [means] = seen
            assert [param for param, _ in means] == params
            for (_, mean), wanted in zip(means, means_of(params, step, size), strict=True):
                assert mean.shape == wanted.shape
                np.testing.assert_allclose(mean, wanted, rtol=0, atol=laws.TOLERANCE["float32"])

    run_ranks(size, main)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("mode", laws.MODES)
def test_a_hook_that_changes_nothing_changes_no_bit_in_any_mode(mode, size):
    def main(comm):
        return {laws.digest(laws.train(comm, mode=mode, gradient_hook=h)[0]) for h in (None, nothing)}

    assert all(len(digests) == 1 for digests in run_ranks(size, main))


NORM_OF_SUMS = ("lars", "lans", "lbsgd lars")  # times the scale, where the others scale each entry


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rule", [*laws.OPTIMIZERS, *(f"in {name}" for name in laws.WRAPPERS)])
@pytest.mark.parametrize("size", [2, 3])
def test_a_hook_that_changes_nothing_changes_no_bit_for_any_optimizer(rule, size):
    make = laws.OPTIMIZERS[rule] if rule in laws.OPTIMIZERS else laws.WRAPPERS[rule.removeprefix("in ")]

    def main(comm):
        without, hooked = (laws.train(comm, make=make, gradient_hook=h)[0] for h in (None, nothing))
        if size == 3 and rule in NORM_OF_SUMS:  # a third is rounded
            for p, q in zip(without, hooked, strict=True):
                np.testing.assert_allclose(p.data, q.data, rtol=0, atol=laws.TOLERANCE["float32"])
        else:
            assert laws.digest(hooked) == laws.digest(without)

    run_ranks(size, main)


@pytest.mark.parametrize(
    "options",
    [
        {"num_batches": 2},
        {"num_batches": 2, "sync_on_apply": False},
        {"overlap": True, "deterministic": True},
        {"nonfinite": "propagate"},
        {"clip_norm": 1e9, "dtype": "float64"},
        {"nonfinite": LossScaler},
    ],
)
def test_a_hook_that_changes_nothing_changes_no_bit_with_any_option(options):
    def main(comm):
        digests = set()
        for hook in (None, nothing):
            chosen = dict(options)
            if options.get("nonfinite") is LossScaler:
                chosen["nonfinite"] = LossScaler(2.0)
            digests.add(laws.digest(laws.train(comm, gradient_hook=hook, **chosen)[0]))
        return len(digests)

    assert run_ranks(3, main) == [1, 1, 1]


def center(means):
    """Take its mean from every matrix's gradient, and half of the parameter's value."""
    for param, mean in means:
        if mean.ndim > 1:
            mean -= mean.mean() + param.data / 2


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("nonfinite", ["raise", "propagate"])
def test_what_a_hook_writes_is_applied(shared, nonfinite):
    def main(comm):
        params, opt = laws.train(comm, steps=0, make=lambda: SGD(0.1), gradient_hook=center, nonfinite=nonfinite)
        if shared:
            laws.share(params, opt)
        for step in range(3):
            opt(laws.pairs(comm, params, step))
        comm.barrier()
        found = [p.data.copy() for p in params]
        comm.barrier()
        return found

    wanted = [p.data.astype(np.float64) for p in laws.parameters(rank=0)]
    for step in range(3):
        means = means_of(laws.parameters(), step, 3)
        center([(Parameter("w", w), m) for w, m in zip(wanted, means, strict=True)])
        for w, m in zip(wanted, means, strict=True):
            w -= 0.1 * m
    for found in run_ranks(3, main):
        for x, w in zip(found, wanted, strict=True):
            np.testing.assert_allclose(x, w, rtol=0, atol=20 * laws.TOLERANCE["float32"])


def test_sharing_the_parameters_changes_no_bit():
    run_ranks(3, lambda comm: laws.sharding_changes_no_bit(comm, gradient_hook=center))


def test_virtual_ranks_call_the_hook_once_a_step():
    def main(comm):
        return laws.digest(laws.train(comm, gradient_hook=center)[0])

    calls = []
    sim = simulate(3, laws.sgd(), threshold=60, gradient_hook=lambda means: calls.append(center(means)))
    params = laws.parameters()
    for step in range(4):
        sim(lambda rank, step=step: laws.pairs(laws.VirtualRank(rank, 3), params, step))
    assert len(calls) == 4
    assert run_ranks(3, main) == [laws.digest(params)] * 3


def test_the_hook_runs_before_clipping():
    def ten_times(means):
        for _, mean in means:
            mean *= 10

    p = Parameter("p", np.zeros(2))
    opt = DistOpt(SGD(1.0), clip_norm=25.0, gradient_hook=ten_times)
    opt([(p, np.array([3.0, 4.0]))])
    assert opt.gradient_norm == 50.0
    np.testing.assert_allclose(p.data, [-15.0, -20.0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_means_of_16_bit_parameters_are_float32(dtype):
    dtypes = []
    opt = DistOpt(SGD(1.0), gradient_hook=lambda means: dtypes.extend(mean.dtype for _, mean in means))
    opt([(Parameter("p", np.zeros(2, dtype)), np.ones(2, dtype))])
    assert dtypes == [np.float32]


@pytest.mark.parametrize("mode", ["dense", "topk", "partial"])
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"num_batches": 2}])
def test_what_a_hook_raises_on_one_rank_all_raise_and_no_parameter_changes(mode, options):
    def main(comm, fails):
        def hook(means):
            if fails and opt.step_counter == 1 and not raised and comm.rank == 1:
                raise KeyError("odd")

        raised = []
        params, opt = laws.train(comm, steps=0, mode=mode, gradient_hook=hook, **options)
        batches = options.get("num_batches", 1)
        for step in range(batches):
            laws.MODES[mode](opt, laws.pairs(comm, params, step))
        before = laws.digest(params)
        if fails:
            for step in range(90, 90 + batches - 1):
                laws.MODES[mode](opt, laws.pairs(comm, params, step))
            with pytest.raises(RuntimeError, match=r"^rank 1: KeyError: 'odd'$"):
                laws.MODES[mode](opt, laws.pairs(comm, params, 99))
            raised.append(True)
            assert (laws.digest(params), opt.step_counter) == (before, 1)
        for step in range(batches, 3 * batches):
            laws.MODES[mode](opt, laws.pairs(comm, params, step))
        return laws.digest(params)

    failed, well = (run_ranks(2, lambda comm, fails=fails: main(comm, fails)) for fails in (True, False))
    assert (failed == well) == (mode != "topk")  # whose residual has gone on


def test_an_exit_from_a_hook_ends_the_training_until_a_checkpoint_is_loaded():
    def interrupt(means):
        raise KeyboardInterrupt

    p = Parameter("p", np.zeros(1))
    opt = DistOpt(SGD(1.0), num_batches=2, gradient_hook=interrupt)
    opt([(p, np.ones(1))])
    with pytest.raises(KeyboardInterrupt):
        opt([(p, np.ones(1))])
    with pytest.raises(RuntimeError, match="the update of step 1 failed halfway with KeyboardInterrupt; load a"):
        opt([(p, np.ones(1))])
    assert p.data[0] == 0


@pytest.mark.parametrize(
    ("hook", "error", "text"),
    [
        (
            lambda means: [(p, m / 2) for p, m in means],
            TypeError,
            "gradient_hook must return None, after changing the gradients in place, got list",
        ),
        (
            lambda means: means[0][1].fill(np.nan),
            FloatingPointError,
            "gradients must be finite after gradient_hook, got 3 entries that are not",
        ),
    ],
)
def test_wrong_hooks_are_an_error_on_every_rank(hook, error, text):
    def main(comm):
        p = Parameter("p", np.ones(3))
        opt = DistOpt(SGD(), comm, gradient_hook=hook if comm.rank else nothing)
        with pytest.raises(error, match=f"^rank 1: {text}$"):
            opt([(p, np.ones(3))])
        return p.data.tolist()

    assert run_ranks(2, main) == [[1.0] * 3] * 2


def test_a_non_finite_mean_from_a_hook_is_applied_with_nonfinite_propagate():
    p = Parameter("p", np.ones(3))
    DistOpt(SGD(), gradient_hook=lambda means: means[0][1].fill(np.inf), nonfinite="propagate")([(p, np.ones(3))])
    assert (p.data == -np.inf).all()


@pytest.mark.parametrize("mode", ["dense", "partial", "topk"])
def test_a_rank_without_batches_takes_part(mode):
    def main(comm):
        params, opt = laws.train(comm, steps=2 + comm.rank, mode=mode, gradient_hook=center)
        opt.join()
        return opt.step_counter, laws.digest(params) if mode != "partial" else ""

    assert len(set(run_ranks(3, main))) == 1


def test_a_run_with_a_hook_resumes_to_the_same_bits():
    run_ranks(2, lambda comm: laws.resume(comm, mode="topk", gradient_hook=center))


def test_a_hook_refuses_update_by_hand_capture_and_ranks_without_it():
    with pytest.raises(TypeError, match=r"gradient_hook must be callable with \(param, mean\) pairs, or None, got 3"):
        DistOpt(gradient_hook=3)
    opt, p = DistOpt(gradient_hook=nothing), Parameter("p", np.zeros(1))
    with pytest.raises(ValueError, match="gradient_hook must be None for update, which has the gradient of one"):
        opt.update(p, np.ones(1))
    with pytest.raises(ValueError, match="gradient_hook must be None in a captured step"):
        opt.capture(lambda: [(p, np.ones(1))])

    def main(comm):
        with pytest.raises(ValueError, match="rank 0 has no gradient hook, rank 1 has a gradient hook"):
            DistOpt(SGD(), comm, gradient_hook=nothing if comm.rank else None)([(p, np.ones(1))])

    run_ranks(2, main)


def real_processes(comm):
    laws.sharding_changes_no_bit(comm, gradient_hook=center)
    return {"digest": np.array(laws.digest(laws.train(comm, gradient_hook=center, deterministic=True)[0]))}


@needs_mpi
@pytest.mark.mpi
def test_processes_with_a_hook_have_the_bits_of_threads(tmp_path):
    wanted = run_ranks(2, lambda comm: laws.digest(laws.train(comm, gradient_hook=center, deterministic=True)[0]))
    assert [str(found["digest"]) for found in run_mpi(2, real_processes, tmp_path)] == wanted
