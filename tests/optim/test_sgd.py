"""SGD against the paper's equations in float64, over many steps, with a learning rate that falls on the way."""

import numpy as np
import optim_checks
import pytest

import reference
from distopt import Parameter, run_ranks
from distopt.dist_opt import DistOpt
from distopt.optim import SGD, Constant, ExponentialDecay

RULES = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "decay": {"momentum": 0.9, "weight_decay": 0.01},
    "plain with decay": {"weight_decay": 0.01},
    "schedules": {
        "momentum": ExponentialDecay(0.9, 10, 0.9),
        "weight_decay": Constant(0.01),
        "dampening": lambda k: 0.1,
    },
    "momentum that starts at 0": {"momentum": lambda k: 0.0 if k < 5 else 0.9},
}


def falling(k):
    return 0.1 if k < 20 else 0.01


def at(rule, k):
    """The rule's numbers at update k, as the reference wants them."""
    numbers = {name: v(k) if callable(v) else v for name, v in rule.items()}
    return {"momentum": None} | numbers


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("float64", 1e-14)])
def test_sgd_equals_the_float64_reference(rule, dtype, tolerance):
    rng = np.random.default_rng(0)
    value = rng.standard_normal((30, 7)).astype(dtype)
    w, b = value.astype(np.float64), np.zeros(value.shape)
    opt = SGD(falling, **rule)
    for k in range(50):
        g = rng.standard_normal(value.shape).astype(dtype)
        w, b = reference.sgd(w, b, g.astype(np.float64), lr=falling(k), **at(rule, k))
        assert opt.lr_value == falling(k)
        opt.apply("w", value, g)
        opt.step()
    np.testing.assert_allclose(value, w, rtol=0, atol=tolerance * abs(w).max())


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_fused_and_single_updates_agree_to_the_bit(rule):
    optim_checks.fused_equals_single(lambda: SGD(falling, **rule))


def test_multipliers_rescaling_and_clipping_have_the_worked_values():
    opt = SGD(0.5, weight_decay=0.1, rescale_grad=2.0, clip_gradient=1.0, lr_mult={"b": 0.1}, wd_mult={"b": 0.0})
    a, b, c = (np.array([1.0, 2.0, 3.0]) for _ in range(3))
    g = np.array([0.25, -4.0, 4.0])
    opt([(Parameter("a", a), g), (Parameter("b", b), g), (Parameter("c", c), g)])
    d = np.array([0.5, -1.0, 1.0])
    np.testing.assert_allclose(a, [1, 2, 3] - 0.5 * (d + 0.1 * np.array([1, 2, 3])), rtol=1e-15)
    np.testing.assert_allclose(b, [1, 2, 3] - 0.05 * d, rtol=1e-15)
    np.testing.assert_array_equal(c, a)
    for off in (None, 0.0, -1.0):
        assert SGD(clip_gradient=off).clip_gradient == np.inf


def test_states_resume_to_the_same_bits_and_wrong_ones_are_refused():
    first = optim_checks.states_go_on(lambda: SGD(falling, 0.9))
    with pytest.raises(ValueError, match=r"the states of SGD must be rule, step_counter, moments, got \['m'"):
        first.set_states({"step_counter": 1, "m": {}, "v": {}})
    wrong = {"rule": "SGD", "step_counter": 1, "moments": {"w": np.zeros(7, np.float32)}}
    shapes = r"state moments of w must be shaped \(40,\), as the parameter, got \(7,\)"
    with pytest.raises(ValueError, match=shapes):
        first.set_states(wrong)
    again = SGD(falling, 0.9)
    again.set_states(wrong)
    with pytest.raises(ValueError, match=shapes):
        again.apply("w", np.zeros(40, np.float32), np.zeros(40, np.float32))


def test_momentum_follows_parameters_by_name_when_buckets_change():
    def main(comm):
        results = []
        for thresholds in ([10] * 6, [10, 10, 0, 100, 0, 10]):
            params = [Parameter(f"p{k}", np.ones(k + 1, np.float32)) for k in range(8)]
            opt = DistOpt(SGD(0.1, 0.9), comm)
            for k, threshold in enumerate(thresholds):
                opt.backward_and_update([(p, p.data * (k + comm.rank)) for p in params], threshold)
            results.append(np.concatenate([p.data for p in params]))
        np.testing.assert_array_equal(*results)

    run_ranks(2, main)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"lr": -0.1}, ValueError, r"lr must be finite and in \[0.0, inf\], got -0.1"),
        ({"lr": np.nan}, ValueError, "lr must be finite"),
        ({"lr": "0.1"}, TypeError, "lr must be a number or a schedule"),
        ({"lr": True}, TypeError, "lr must be a number"),
        ({"lr": lambda k: -1.0}, ValueError, "lr must be finite .* at update 0"),
        ({"momentum": -0.9}, ValueError, "momentum must be finite"),
        ({"momentum": 1.5}, ValueError, r"momentum must be finite and in \[0.0, 1.0\]"),
        ({"weight_decay": -1}, ValueError, "weight_decay must be finite"),
        ({"dampening": 2.0}, ValueError, "dampening"),
        ({"nesterov": True}, ValueError, "nesterov must be with momentum above 0 and no dampening, got"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, ValueError, "nesterov"),
        ({"rescale_grad": np.inf}, ValueError, "rescale_grad"),
    ],
)
def test_impossible_hyper_parameters_of_sgd_are_refused(wrong, error, text):
    with pytest.raises(error, match=text):
        SGD(**wrong)


def test_numpy_numbers_are_numbers():
    assert SGD(np.float32(0.5), np.float64(0.9)).lr_value == 0.5


def test_exponential_decay_is_a_pure_function_smooth_or_in_stairs():
    smooth, stairs = ExponentialDecay(1.0, 10, 0.5), ExponentialDecay(1.0, 10, 0.5, staircase=True)
    assert [smooth(0), smooth(10), stairs(9), stairs(10), stairs(25)] == [1.0, 0.5, 1.0, 0.5, 0.25]
    assert smooth(5) == pytest.approx(0.5**0.5)
    assert [smooth(30), smooth(0)] == [0.125, 1.0]  # a pure function: any order of calls
    assert Constant(3.0)(99) == 3.0
    with pytest.raises(ValueError, match="decay_steps must be positive, got 0"):
        ExponentialDecay(1.0, 0, 0.5)


def test_apply_refuses_gradients_of_another_shape_or_dtype_and_read_only_parameters():
    opt = SGD()
    with pytest.raises(
        ValueError, match=r"w: the gradient must be like the parameter, \(3,\) float64, got \(2, 3\) float64"
    ):
        opt.apply("w", np.zeros(3), np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"got .* float32"):
        opt.apply("w", np.zeros(3), np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="the parameter is read-only"):
        opt.apply("w", np.frombuffer(bytes(24)), np.zeros(3))


def test_multipliers_may_change():
    opt = SGD(1.0, lr_mult={"w": 0.0})
    value = np.zeros(2)
    opt.apply("w", value, np.ones(2))
    assert not value.any()
    opt.lr_mult.clear()
    opt.apply("w", value, np.ones(2))
    assert (value == -1).all()


def test_hyper_parameters_may_be_assigned():
    opt, value = SGD(1.0, 0.5), np.zeros(1)
    opt.lr = 0.25
    opt.momentum = lambda k: 0.0
    opt.apply("w", value, np.ones(1))
    assert (value[0], opt.lr_value) == (-0.25, 0.25)
    with pytest.raises(ValueError, match="momentum must be finite"):
        opt.momentum = 2.0
    for options in ({"lr_mult": {"w": np.nan}}, {"wd_mult": {"w": -1.0}}, {"clip_gradient": np.nan}):
        with pytest.raises(ValueError, match="must be finite"):
            SGD(**options)


def test_a_schedule_that_returns_no_valid_number_is_named_in_the_error():
    opt = SGD(lambda k: 0.5 if k < 1 else None)
    opt.step()
    with pytest.raises(TypeError, match="lr must be a number at update 1, got None"):
        opt.apply("w", np.zeros(1), np.ones(1))
    for rate, error in ((-0.5, ValueError), (np.nan, ValueError), ("0.5", TypeError)):
        with pytest.raises(error, match="decay_rate must be"):
            ExponentialDecay(0.1, 2, rate)


def test_assigning_a_momentum_to_sgd_made_without_one_is_refused():
    opt = SGD(1.0)
    opt.momentum = 0.0
    for momentum in (0.9, lambda k: 0.9):
        with pytest.raises(ValueError, match="momentum must be 0 in an SGD that was made without"):
            opt.momentum = momentum
    with pytest.raises(TypeError, match="nesterov must be True or False, got 'no'"):
        SGD(1.0, 0.9, nesterov="no")


def test_a_parameter_of_another_shape_under_a_known_name_is_refused():
    opt = SGD(1.0, 0.9)
    opt.apply("w", np.zeros(4), np.ones(4))
    with pytest.raises(ValueError, match=r"state moments of w must be shaped \(2,\), as the parameter, got \(4,\)"):
        opt.apply("w", np.zeros(2), np.ones(2))
