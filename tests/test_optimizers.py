"""What holds for every optimizer, whatever its rule."""

import ml_dtypes
import numpy as np
import pytest

import laws
import optim_checks
from distopt import DistOpt, Parameter, run_ranks
from distopt.optim import LAMB, LANS, LARS, LBSGD, SGD, AdaGrad, Adam, AdamW, RMSProp

RULES = {
    "sgd": lambda **options: SGD(**{"lr": 0.125, "weight_decay": 0.25} | options),
    "momentum": lambda **options: SGD(**{"lr": 0.125, "momentum": 0.9, "weight_decay": 0.25} | options),
    "rmsprop": lambda **options: RMSProp(**{"lr": 0.125, "weight_decay": 0.25} | options),
    "adagrad": lambda **options: AdaGrad(**{"lr": 0.125, "weight_decay": 0.25} | options),
    "adam": lambda **options: Adam(**{"lr": 0.125, "weight_decay": 0.25} | options),
    "adamw": lambda **options: AdamW(**{"lr": 0.125, "weight_decay": 0.25} | options),
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
def test_clipping_is_elementwise_and_behind_rescaling(make):
    """But for LARS, whose norm is of what is not clipped (1.4), and LANS, which clips what has length 1 (1.6)."""
    found = run(make(rescale_grad=0.5, clip_gradient=0.25))
    expected = run(make(), lambda g: np.clip(0.5 * g, -0.25, 0.25))
    assert (found == expected).all() == (type(make()) not in (LARS, LANS))
    for off in (None, 0.0, -1.0):
        np.testing.assert_array_equal(run(make(clip_gradient=off)), run(make()))


@every_rule
def test_multipliers_are_of_the_rate_and_the_decay(make):
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


@every_rule
def test_any_number_of_tensors_of_any_dtypes(make):
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
def test_float64_is_float64_throughout(make):
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
def test_bad_hyper_parameters(make, name, wrong):
    with pytest.raises(ValueError, match=rf"{name} must be finite and in \[0.0, inf\], got "):
        make(**{name: wrong})


@every_rule
def test_states_go_on(make):
    optim_checks.states_go_on(make)
