"""LBSGD against MXNet's equations in float64, and where MXNet's own code goes wrong.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import numpy as np
import optim_checks
import pytest

import reference
from distopt import DistOpt, Parameter, run_ranks
from distopt.optim import LBSGD

OPTIONS = {
    "defaults": {},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 0.1},
    "rescaled, clipped": {"rescale": 0.25, "clip": 0.05, "momentum": 0.9},
}
OURS = {"clip": "clip_gradient", "rescale": "rescale_grad"}


def falling(k):
    return 0.1 if k < 20 else 0.01


def make(strategy="linear", lr=falling, scale=3, **options):
    given = {OURS.get(name, name): value for name, value in options.items()}
    return LBSGD(
        lr, warmup_strategy=strategy, batch_scale=scale, updates_per_epoch=32, warmup_epochs=2, begin_epoch=0.5, **given
    )


@pytest.mark.parametrize("strategy", ["linear", "power2", "sqrt", "lars"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("float64", 1e-13)])
def test_lbsgd_equals_the_float64_reference(strategy, options, dtype, tolerance):
    """Warm-up, and what comes after it; schedules count updates (L5), the warm-up counts calls."""
    rng = np.random.default_rng(0)
    value = rng.standard_normal((30, 7)).astype(dtype)
    w, b = value.astype(np.float64), np.zeros(value.shape)
    opt = make(strategy, **options)
    for k in range(50):
        grads = rng.standard_normal((3, *value.shape)).astype(dtype)
        for g in grads:
            before = value.copy()
            opt.apply("w", value, g)
            opt.step()
            assert (value == before).all() == (opt.batches > 0)
        calls = 16 + 3 * (k + 1)
        numbers = options | {"lr": falling(k), "strategy": strategy, "scale": 3, "calls": calls, "warmup": 64}
        w, b = reference.lbsgd(w, b, grads.astype(np.float64), **numbers)
    np.testing.assert_allclose(value, w, rtol=0, atol=tolerance * abs(w).max())


@pytest.mark.parametrize("strategy", ["linear", "lars"])
def test_fused_and_single_updates_agree_to_the_bit(strategy):
    optim_checks.fused_equals_single(lambda: make(strategy, weight_decay=0.1))


@pytest.mark.parametrize("scale", [1, 2, 4])
def test_states_resume_in_the_middle_of_an_accumulation_window(scale):
    """L7: the sum so far is in the states."""
    grads = np.random.default_rng(2).standard_normal((9, 40)).astype(np.float32)
    for stop in range(1, 8):
        values, first, second = np.zeros((2, 40), np.float32), make(scale=scale), make(scale=scale)
        for k, g in enumerate(grads):
            first.apply("w", values[0], g)
            first.step()
            if k == stop:
                second.set_states(first.get_states())
                values[1] = values[0]
            if k > stop:
                second.apply("w", values[1], g)
                second.step()
        np.testing.assert_array_equal(values[0], values[1])
        assert (first.step_counter, first.batches) == (9 // scale, 9 % scale)


def test_a_reused_gradient_buffer_is_not_aliased():
    """L1: executors write each gradient to the same array; MXNet's first window becomes g2 + g2."""
    w, g, opt = np.array([0.5]), np.empty(1), LBSGD(0.1, batch_scale=2, warmup_epochs=0)
    for value in (0.1, 0.2):
        g[:] = value
        opt.apply("w", w, g)
        opt.step()
    assert w[0] == pytest.approx(0.5 - 0.1 * 2 * 0.15)


def test_all_parameters_of_a_step_have_one_learning_rate():
    """L2: MXNet reads the schedule before it counts, so that the first parameter lags behind."""
    opt = LBSGD(lambda k: 1.0 / (k + 1), warmup_epochs=0)
    params = [Parameter(n, np.zeros(1)) for n in "ab"]
    for k in range(3):
        opt([(p, np.ones(1)) for p in params])
        assert params[0].data == params[1].data == pytest.approx(-sum(1 / (j + 1) for j in range(k + 1)))


def test_no_parameter_changes_before_the_accumulation_window_is_full():
    """L3: MXNet runs its update at lr = 0, and 0 * inf is NaN."""
    w, opt = np.ones(2), LBSGD(batch_scale=2)
    opt.apply("w", w, np.array([np.inf, np.nan]))
    np.testing.assert_array_equal(w, 1.0)


def test_every_accumulation_window_is_full_whatever_the_first_epoch():
    """L4: MXNet's first window is short, and still divided by batch_scale, unless earlier epochs fit."""
    w = np.zeros(1)
    opt = LBSGD(1.0, batch_scale=4, updates_per_epoch=5, begin_epoch=1, warmup_epochs=0)
    for call in range(8):
        opt.apply("w", w, np.ones(1))
        opt.step()
        assert w[0] == -4.0 * ((call + 1) // 4)


def test_16_bit_gradients_are_accumulated_in_float32():
    """L6: in float16, 2048 + 1 is 2048."""
    w, opt = np.zeros(1, np.float16), LBSGD(1.0, batch_scale=4, warmup_epochs=0)
    for g in (2048, 1, 1, 1):
        opt.apply("w", w, np.full(1, g, np.float16))
        opt.step()
    assert w[0] == np.float16(-2051)


def test_three_calls_are_one_update_on_any_number_of_ranks_and_refused_calls_do_not_count():
    """Three calls to an update, on any number of ranks; refused calls do not count."""

    def main(comm):
        params = [Parameter("w", np.zeros(5, np.float32))]
        opt = DistOpt(LBSGD(1.0, batch_scale=3, warmup_epochs=0), comm, nonfinite="skip")
        for call in range(7):
            bad = np.nan if call == 4 and comm.rank == comm.size - 1 else 1.0
            opt([(params[0], np.full(5, bad, np.float32))])
        return params[0].data[0], opt.opt.step_counter, opt.opt.batches

    for size in (1, 2, 3):
        assert run_ranks(size, main) == [(-6.0, 2, 0)] * size


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"warmup_strategy": "cubic"}, ValueError, "warmup_strategy must be one of linear, power2, sqrt, lars"),  # L6
        ({"batch_scale": 0}, ValueError, "batch_scale must be at least 1, got 0"),
        ({"batch_scale": np.inf}, TypeError, "batch_scale must be an integer, got inf"),
        ({"batch_scale": True}, TypeError, "batch_scale must be an integer, got True"),
        ({"warmup_epochs": -1}, ValueError, "warmup_epochs must be finite"),
        ({"updates_per_epoch": np.nan}, ValueError, "updates_per_epoch must be finite"),
        ({"begin_epoch": "1"}, TypeError, "begin_epoch must be a number"),
        ({"updates_per_epoch": lambda k: 32}, TypeError, "updates_per_epoch must be a number"),
        ({"momentum": -0.5}, ValueError, "momentum must be finite"),
    ],
)
def test_impossible_hyper_parameters_of_lbsgd_are_refused(wrong, error, text):
    with pytest.raises(error, match=text):
        LBSGD(**wrong)


def test_states_of_another_window_are_refused():
    longer, shorter = LBSGD(batch_scale=4), LBSGD(batch_scale=2)
    for _ in range(3):
        longer.step()
    with pytest.raises(ValueError, match=r"batches must be in \[0, 1\], got 3"):
        shorter.set_states(longer.get_states())
