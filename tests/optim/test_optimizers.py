"""What every optimizer of distopt does, whatever its rule.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import ml_dtypes
import numpy as np
import optim_checks
import pytest

import laws
from distopt import DistOpt, Parameter, run_ranks
from distopt.optim import LAMB, LANS, LARS, LBSGD, SGD, AdaGrad, Adam, AdamW, RMSProp, Signum

RULES = {
    "sgd": lambda **options: SGD(**{"lr": 0.125, "weight_decay": 0.25} | options),
    "momentum": lambda **options: SGD(**{"lr": 0.125, "momentum": 0.9, "weight_decay": 0.25} | options),
    "rmsprop": lambda **options: RMSProp(**{"lr": 0.125, "weight_decay": 0.25} | options),
    "adagrad": lambda **options: AdaGrad(**{"lr": 0.125, "weight_decay": 0.25} | options),
    "adam": lambda **options: Adam(**{"lr": 0.125, "weight_decay": 0.25} | options),
    "adamw": lambda **options: AdamW(**{"lr": 0.125, "weight_decay": 0.25} | options),
    "signum": lambda **options: Signum(**{"lr": 0.125, "momentum": 0.9, "weight_decay": 0.25} | options),
    "lars": lambda **options: LARS(**{"lr": 0.125, "momentum": 0.9, "weight_decay": 0.25} | options),
    "lamb": lambda **options: LAMB(**{"lr": 0.125, "weight_decay": 0.25} | options),
    "lans": lambda **options: LANS(**{"lr": 0.125, "weight_decay": 0.25} | options),
    "lbsgd": lambda **options: LBSGD(**{"lr": 0.125, "momentum": 0.9, "weight_decay": 0.25} | options),
}
every_rule = pytest.mark.parametrize("make", RULES.values(), ids=RULES)


def run(opt, change=lambda g: g, steps=5, dtype="float64"):
    """A parameter after some steps."""
    rng, w = np.random.default_rng(0), np.linspace(-1, 1, 60).astype(dtype)
    for _ in range(steps):
        opt.apply("w", w, change(rng.standard_normal(60)).astype(dtype))
        opt.step()
    return w


@every_rule
def test_rescaling_is_scaling_the_gradient(make):
    np.testing.assert_array_equal(run(make(rescale_grad=0.25)), run(make(), lambda g: 0.25 * g))


@every_rule
def test_clipping_is_elementwise_and_after_rescaling(make):
    """But for LARS, whose norm is of what is not clipped (1.4), and LANS, which clips what has length 1 (1.6)."""
    found = run(make(rescale_grad=0.5, clip_gradient=0.25))
    expected = run(make(), lambda g: np.clip(0.5 * g, -0.25, 0.25))
    assert (found == expected).all() == (type(make()) not in (LARS, LANS))
    for off in (None, 0.0, -1.0):
        np.testing.assert_array_equal(run(make(clip_gradient=off)), run(make()))


@every_rule
def test_lr_mult_and_wd_mult_multiply_the_rate_and_the_weight_decay(make):
    found = run(make(lr_mult={"w": 0.5}, wd_mult={"w": 2.0, "other": 9.0}))
    np.testing.assert_array_equal(found, run(make(lr=0.0625, weight_decay=0.5)))


@every_rule
def test_schedules_are_read_at_every_update(make):
    def falling(k):
        return 0.125 if k < 3 else 0.0625

    changed, w = make(), None
    scheduled = run(make(lr=falling, weight_decay=lambda k: 0.25))
    rng, w = np.random.default_rng(0), np.linspace(-1, 1, 60)
    for k in range(5):
        changed.lr = falling(k)
        changed.apply("w", w, rng.standard_normal(60))
        changed.step()
    np.testing.assert_array_equal(scheduled, w)


@every_rule
def test_the_gradient_is_not_changed(make):
    """M14: MXNet's step() rescales the caller's array, so that a second call rescales it again."""
    g = np.linspace(-1, 1, 60)
    before, opt = g.copy(), make(rescale_grad=0.5, clip_gradient=0.1)
    opt.apply("w", np.ones(60), g)
    np.testing.assert_array_equal(g, before)


@every_rule
def test_gradients_of_zeros_and_of_everything_small_stay_finite(make):
    for g in (0.0, 1e-45, 1e-30):
        w = run(make(), lambda x, g=g: np.full(60, g), dtype="float32")
        assert np.isfinite(w).all()


@pytest.mark.sampled(2)
@every_rule
def test_three_hundred_tensors_of_mixed_dtypes_equal_updates_one_by_one(make):
    """M12: MXNet's arrays end at 45, 50 or 60 tensors, unchecked, and take another dtype for the first one's."""
    dtypes = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
    rng = np.random.default_rng(1)
    values = [rng.standard_normal(k % 7).astype(dtypes[k % 4]) for k in range(300)]
    grads = [[rng.standard_normal(v.size).astype(v.dtype) for v in values] for _ in range(3)]

    def main(comm):
        params = [Parameter(f"p{k}", v.copy()) for k, v in enumerate(values)]
        opt = DistOpt(make(multi_precision=True), comm)
        for step in grads:
            opt(zip(params, step, strict=True))
        return params

    [params] = run_ranks(1, main)
    alone = make(multi_precision=True)
    for step in grads:
        for k, (v, g) in enumerate(zip(values, step, strict=True)):
            alone.apply(f"p{k}", v, g)
        alone.step()
    assert laws.digest(params) == laws.digest([Parameter("", v) for v in values])


@every_rule
def test_float64_parameters_are_updated_in_float64(make):
    w = run(make())
    single = run(make(), dtype="float32")
    assert 0 < abs(w - single).max() < 1e-4
    assert all(a.dtype == np.float64 for slot in make().slots for a in _states(make()).get(slot, {}).values())


def _states(opt):
    run(opt)
    return opt.get_states()


@every_rule
@pytest.mark.parametrize("name", ["lr", "weight_decay"])
@pytest.mark.parametrize("wrong", [-0.1, np.nan, np.inf])
def test_every_optimizer_refuses_impossible_rates(make, name, wrong):
    with pytest.raises(ValueError, match=rf"{name} must be finite and in \[0.0, inf\], got "):
        make(**{name: wrong})


@every_rule
@pytest.mark.parametrize(
    ("name", "wrong", "error", "text"),
    [
        ("clip_gradient", lambda k: 1.0, TypeError, "clip_gradient must be a number"),
        ("rescale_grad", lambda k: 1.0, TypeError, "rescale_grad must be a number"),
        ("clip_gradient", np.nan, ValueError, "clip_gradient must be finite"),
        ("lr_mult", {"w": lambda k: 1.0}, TypeError, "lr_mult of w must be a number"),
        ("wd_mult", {"w": -1.0}, ValueError, "wd_mult of w must be finite"),
        ("lr_mult", ["w"], TypeError, "lr_mult must be numbers by parameter name"),
        ("lr_mult", {0: 1.0}, TypeError, "lr_mult must be numbers by parameter name"),
    ],
)
def test_options_must_be_plain_numbers_when_made_and_when_assigned(make, name, wrong, error, text):
    """A schedule would only be asked once."""
    with pytest.raises(error, match=text):
        make(**{name: wrong})
    opt = make()
    with pytest.raises(error, match=text):
        setattr(opt, name, wrong)


@every_rule
def test_options_may_be_assigned(make):
    opt = make()
    opt.rescale_grad, opt.clip_gradient, opt.lr_mult, opt.wd_mult = 0.5, 0.25, {"w": 0.5}, {"w": 2.0}
    given = make(rescale_grad=0.5, clip_gradient=0.25, lr_mult={"w": 0.5}, wd_mult={"w": 2.0})
    np.testing.assert_array_equal(run(opt), run(given))
    for off in (None, -1.0, np.inf):
        opt.clip_gradient = off
        assert opt.clip_gradient == np.inf


@every_rule
def test_states_resume_the_run(make):
    optim_checks.states_go_on(make)


@every_rule
def test_states_are_refused_before_anything_changes(make):
    opt = make()
    run(opt, dtype="float32")
    good = opt.get_states()
    bad = [None, {}, good | {"rule": "Other"}, good | {"step_counter": -3}, good | {"step_counter": 1.5}]
    for slot in opt.slots:
        for arrays in (None, {"w": "x"}, {"w": np.zeros(60, complex)}, {"w": np.zeros(7)}):
            bad.append(good | {"step_counter": 99, slot: arrays})
    for states in bad:
        with pytest.raises((TypeError, ValueError)):
            opt.set_states(states)
    np.testing.assert_equal(opt.get_states(), good)


def test_a_master_of_another_shape_than_its_parameter_is_refused():
    opt = SGD(multi_precision=True)
    opt.apply("w", np.ones(60, np.float16), np.ones(60, np.float16))
    with pytest.raises(ValueError, match=r"state master of w must be shaped \(60,\), as the parameter, got \(7,\)"):
        opt.set_states(opt.get_states() | {"master": {"w": np.zeros(7, np.float32)}})


def differing(*makers):
    """Ranks with an optimizer each: the error of the first step, which all must raise, and that nothing has moved."""

    def main(comm):
        params = [Parameter(n, np.ones(3, np.float32)) for n in "ab"]
        opt = DistOpt(makers[comm.rank](), comm)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            opt([(p, np.ones(3, np.float32)) for p in params])
        assert all((p.data == 1).all() for p in params)
        return str(caught.value)

    texts = run_ranks(len(makers), main)
    assert texts[0] == texts[1]
    return texts[0]


@pytest.mark.parametrize("rule", [LARS, LAMB, LANS])
def test_ranks_agree_on_what_a_predicate_leaves_out(rule):
    """Predicates of one name may differ, or raise on one rank only."""
    rules = [lambda left=left: rule(exclude=lambda name: name in left) for left in ("", "b")]
    assert "left_out=('b',)" in differing(*rules)
    assert "division by zero" in differing(lambda: rule(), lambda: rule(exclude=lambda name: 1 / 0))


def test_the_order_in_which_multipliers_are_given_does_not_matter():
    def main(comm):
        w = Parameter("w", np.zeros(2))
        mult = {"w": 0.5, "v": 0.25} if comm.rank else {"v": 0.25, "w": 0.5}
        DistOpt(SGD(1.0, lr_mult=mult), comm)([(w, np.ones(2))])
        return w.data.tolist()

    assert run_ranks(2, main) == [[-0.5] * 2] * 2


def test_ranks_agree_on_multipliers_that_are_assigned_later():
    def main(comm):
        w = Parameter("w", np.zeros(2))
        opt = DistOpt(SGD(1.0), comm)
        opt([(w, np.ones(2))])
        if comm.rank:
            opt.opt.lr_mult = {"w": 0.5}
        with pytest.raises(ValueError, match="ranks differ"):
            opt([(w, np.ones(2))])
        opt.opt.lr_mult = {"w": 0.5}
        opt([(w, np.ones(2))])
        return w.data.tolist()

    assert run_ranks(2, main) == [[-1.5] * 2] * 2


def test_states_of_another_model_are_refused_before_the_step():
    """Where they are loaded, not in the middle of an update."""

    def main(comm):
        w, states = Parameter("w", np.zeros(2)), None
        for size in (3, 2):
            w, opt = Parameter("w", np.zeros(size)), DistOpt(SGD(1.0, 0.5), comm)
            opt([(w, np.ones(size))])
            if states is None:
                states = opt.state_dict()
        with pytest.raises(ValueError, match=r"state moments of w must be shaped \(2,\), as the parameter, got \(3,\)"):
            opt.load_state_dict(states)
        opt([(w, np.ones(2))])
        return w.data.tolist()

    assert run_ranks(2, main) == [[-2.5] * 2] * 2
