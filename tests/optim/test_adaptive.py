"""RMSProp, AdaGrad, Adam and AdamW against the papers' equations in float64, and against themselves.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import numpy as np
import optim_checks
import pytest

import reference
from distopt.optim import AdaGrad, Adam, AdamW, Constant, ExponentialDecay, RMSProp

RULES = {"rmsprop": (RMSProp, 1), "adagrad": (AdaGrad, 1), "adam": (Adam, 2), "adamw": (AdamW, 2)}
# A large epsilon and a falling learning rate tell the placements of both apart.
OPTIONS = {
    "defaults": {},
    "large epsilon": {"epsilon": 1e-2},
    "decay": {"weight_decay": 0.1},
    "schedules": {"epsilon": ExponentialDecay(1e-2, 5, 0.5), "weight_decay": lambda k: 0.0 if k < 5 else 0.1},
}


def falling(k):
    return 0.1 if k < 20 else 0.01


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 3e-5), ("float64", 1e-13)])
def test_adaptive_rules_equal_the_float64_reference(rule, options, dtype, tolerance):
    kind, slots = RULES[rule]
    rng = np.random.default_rng(0)
    value = rng.standard_normal((30, 7)).astype(dtype)
    state = [value.astype(np.float64), *(np.zeros(value.shape) for _ in range(slots))]
    opt = kind(falling, **options)
    for k in range(50):
        g = rng.standard_normal(value.shape).astype(dtype)
        numbers = {name: v(k) if callable(v) else v for name, v in options.items()}
        numbers |= {"lr": falling(k)} | ({"t": k + 1} if "adam" in rule else {})
        state = getattr(reference, rule)(*state, g.astype(np.float64), **numbers)
        opt.apply("w", value, g)
        opt.step()
    np.testing.assert_allclose(value, state[0], rtol=0, atol=tolerance * abs(state[0]).max())


@pytest.mark.parametrize("rule", RULES)
def test_fused_and_single_updates_agree_to_the_bit(rule):
    optim_checks.fused_equals_single(lambda: RULES[rule][0](0.1))


@pytest.mark.parametrize("rule", RULES)
def test_states_resume_to_the_same_bits(rule):
    optim_checks.states_go_on(lambda: RULES[rule][0](falling))


def test_adam_and_rmsprop_have_the_worked_values():
    """Ten digits by hand: the placement of epsilon shows in the last ones."""
    w = np.array([0.5])
    Adam(0.1).apply("w", w, np.array([0.1 + 0.01 * 0.5]))
    assert w[0] == pytest.approx(0.4000000095, abs=5e-11)
    w = np.array([0.5])
    RMSProp(0.1, epsilon=1e-2).apply("w", w, np.array([0.1]))
    assert w[0] == pytest.approx(0.5 - 0.1 * 0.1 / np.sqrt(0.001 + 0.01), abs=1e-15)
    assert w[0] == pytest.approx(0.4046537411, abs=5e-11)


def test_bias_correction_uses_the_present_value_of_scheduled_betas():
    """b^t is the present value to the power of t, as in SINGA, not the running product."""
    w, m, v = np.array([1.0]), np.zeros(1), np.zeros(1)
    mine, opt = w.copy(), Adam(0.1, beta_1=lambda k: 0.9 - 0.1 * k, beta_2=Constant(0.99))
    for k in range(4):
        g = np.array([0.3 + k])
        w, m, v = reference.adam(w, m, v, g, t=k + 1, lr=0.1, beta_1=0.9 - 0.1 * k, beta_2=0.99)
        opt.apply("w", mine, g)
        opt.step()
    np.testing.assert_allclose(mine, w, rtol=1e-14)


def test_decay_of_adamw_is_not_bias_corrected():
    """M13: MXNet's decays by lr sqrt(1 - b2^t) / (1 - b1^t), and one of its paths decays the new weight."""
    w = np.array([1.0])
    AdamW(0.1, weight_decay=0.5).apply("w", w, np.zeros(1))
    assert w[0] == pytest.approx(1 - 0.1 * 0.5, abs=1e-15)
    w, m, v = np.array([1.0]), np.zeros(1), np.zeros(1)
    mine, opt = w.copy(), AdamW(0.1, correct_bias=False, weight_decay=0.5, epsilon=1e-2)
    for k in range(5):
        w, m, v = reference.adamw(w, m, v, 0.3 + k, t=k + 1, lr=0.1, weight_decay=0.5, epsilon=1e-2, correct_bias=False)
        opt.apply("w", mine, np.array([0.3 + k]))
        opt.step()
    np.testing.assert_allclose(mine, w, rtol=1e-14)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Adam(beta_1=1.0), r"beta_1 must be finite and in \[0.0, 0.99"),
        (lambda: Adam(beta_2=-0.1), "beta_2"),
        (lambda: Adam(epsilon=-1), "epsilon"),
        (lambda: RMSProp(rho=1.5), r"rho must be finite and in \[0.0, 1.0\]"),
        (lambda: RMSProp(epsilon=np.nan), "epsilon"),
        (lambda: AdaGrad(lr=-1), "lr"),
        (lambda: AdamW(beta_1=1.0), "beta_1"),
        (lambda: AdamW(epsilon=np.inf), "epsilon"),
    ],
)
def test_impossible_hyper_parameters_of_adaptive_rules_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()
