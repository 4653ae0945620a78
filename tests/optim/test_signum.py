"""Signum against its equations in float64, and as the second half of DeMo."""

import numpy as np
import optim_checks
import pytest

from distopt import DistOpt, Parameter, run_ranks
from distopt.compress import DCT, Chunks, ErrorFeedback
from distopt.optim import Signum


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-13)])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.9, 0.1)])
def test_signum_equals_the_equations_in_float64(momentum, decay, dtype, tolerance):
    rng = np.random.default_rng(0)
    w = rng.standard_normal(70).astype(dtype)
    expected, b, opt = w.astype(np.float64), np.zeros(70), Signum(0.1, momentum, decay)
    for _ in range(20):
        g = rng.integers(-2, 3, 70).astype(dtype)  # sums of which are zero at times
        b = momentum * b + g
        expected = (1 - 0.1 * decay) * expected - 0.1 * np.sign(b)
        opt.apply("w", w, g)
        opt.step()
    np.testing.assert_allclose(w, expected, rtol=0, atol=tolerance)


def test_the_sign_of_zero_is_zero_and_that_of_nan_is_nan():
    w = np.ones(5)
    Signum(0.5).apply("w", w, np.array([0.0, -0.0, np.inf, -1e-300, np.nan]))
    np.testing.assert_array_equal(w, [1, 1, 0.5, 1.5, np.nan])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_updates_of_a_bucket_and_states_that_resume(momentum):
    optim_checks.fused_equals_single(lambda: Signum(0.1, momentum))
    optim_checks.states_go_on(lambda: Signum(0.1, momentum))


@pytest.mark.parametrize(
    "make", [lambda: Signum(-1), lambda: Signum(1, momentum=1.5), lambda: Signum(1, weight_decay=-1)]
)
def test_impossible_numbers_are_refused(make):
    with pytest.raises(ValueError, match="must be"):
        make()


def test_a_momentum_cannot_begin_later():
    with pytest.raises(ValueError, match="momentum"):
        Signum(0.1).momentum = 0.9


@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
def test_all_frequencies_are_the_sign_of_the_mean_gradient(exchange):
    """DeMo with k = all keeps no momentum: what is sent leaves it, so it is Signum without."""
    shapes = [(70, 40), (90,)]

    def gradients(step, rank):
        rng = np.random.default_rng([step, rank])
        return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]

    def main(comm):
        params = [Parameter(f"p{k}", np.zeros(shape, np.float32)) for k, shape in enumerate(shapes)]
        opt = DistOpt(Signum(0.1), comm)
        for step in range(3):
            pairs = list(zip(params, gradients(step, comm.rank), strict=True))
            opt.step(pairs, DCT(ErrorFeedback(Chunks(64, 64), decay=0.999)), False, exchange)
        return [p.data for p in params]

    found = run_ranks(2, main)
    for k in range(len(shapes)):
        means = [sum(gradients(step, rank)[k].astype(np.float64) for rank in range(2)) / 2 for step in range(3)]
        clear = np.min(np.abs(means), axis=0) > 1e-4  # beside zero, rounding decides
        assert clear.mean() > 0.99
        np.testing.assert_allclose(found[0][k][clear], -0.1 * sum(map(np.sign, means))[clear], rtol=0, atol=1e-6)
        assert found[0][k].tobytes() == found[1][k].tobytes()
