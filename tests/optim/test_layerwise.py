"""LARS, LAMB and LANS against their papers' equations in float64, and against themselves.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import numpy as np
import optim_checks
import pytest

import reference
from distopt import DistOpt, Parameter, kernels, run_ranks
from distopt.kernels.layout import BucketLayout
from distopt.optim import LAMB, LANS, LARS

RULES = {"lars": (LARS, 1), "lamb": (LAMB, 2), "lans": (LANS, 2)}
# A large epsilon and a falling learning rate tell placements apart.
COMMON = {
    "defaults": {},
    "large epsilon": {"epsilon": 1e-2},
    "decay": {"weight_decay": 0.1},
    "clipped": {"clip": 0.05, "weight_decay": 0.01},
    "rescaled": {"rescale": 0.25, "weight_decay": 0.01},
    "excluded": {"excluded": True, "weight_decay": 0.01},
    "schedules": {"epsilon": lambda k: 1e-2 * 0.5**k, "weight_decay": lambda k: 0.0 if k < 5 else 0.1},
}
OWN = {
    "lars": {"momentum": {"momentum": 0.9, "eta": 0.02}, "momentum later": {"momentum": lambda k: 0.9 * (k > 9)}},
    "lamb": {
        "bounds": {"lower_bound": 0.5, "upper_bound": 2.0},
        "lower bound": {"lower_bound": 50.0},
        "no correction": {"bias_correction": False},
        "betas": {"beta_1": 0.5, "beta_2": lambda k: 0.9 + 0.001 * k},
    },
    "lans": {"bounds": {"lower_bound": 0.5, "upper_bound": 2.0}, "betas": {"beta_1": 0.5, "beta_2": 0.9}},
}
CASES = [(rule, name, options) for rule in RULES for name, options in (COMMON | OWN[rule]).items()]
OURS = {"clip": "clip_gradient", "rescale": "rescale_grad"}


def falling(k):
    return 0.1 if k < 20 else 0.01


def make(rule, options, lr=falling):
    """The optimizer for options that are named as the reference names them."""
    given = {OURS.get(name, name): value for name, value in options.items() if name != "excluded"}
    if options.get("excluded"):
        given["exclude"] = lambda name: name == "w"
    return RULES[rule][0](lr, **given)


@pytest.mark.sampled(15)
@pytest.mark.parametrize(("rule", "name", "options"), CASES, ids=[f"{rule}, {name}" for rule, name, _ in CASES])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("float64", 1e-13)])
def test_layerwise_rules_equal_the_float64_reference(rule, name, options, dtype, tolerance):
    rng = np.random.default_rng(0)
    value = rng.standard_normal((90, 101)).astype(dtype)  # more than two blocks of a norm
    state = [value.astype(np.float64), *(np.zeros(value.shape) for _ in range(RULES[rule][1]))]
    opt = make(rule, options)
    for k in range(50):
        g = rng.standard_normal(value.shape).astype(dtype)
        numbers = {n: v(k) if callable(v) else v for n, v in options.items()} | {"lr": falling(k)}
        numbers |= {} if rule == "lars" else {"t": k + 1}
        state = getattr(reference, rule)(*state, g.astype(np.float64), **numbers)
        opt.apply("w", value, g)
        opt.step()
    np.testing.assert_allclose(value, state[0], rtol=0, atol=tolerance * abs(state[0]).max())


@pytest.mark.parametrize("rule", RULES)
def test_fused_and_single_updates_agree_to_the_bit(rule):
    optim_checks.fused_equals_single(lambda: make(rule, {"weight_decay": 0.1}))


@pytest.mark.parametrize("rule", RULES)
def test_states_resume_to_the_same_bits(rule):
    optim_checks.states_go_on(lambda: make(rule, {"weight_decay": 0.1}))


@pytest.mark.parametrize("rule", RULES)
def test_norms_have_the_same_bits_however_buckets_are_shared_out(rule):
    """However chunks are shared out to ranks."""
    rng = np.random.default_rng(3)
    shapes, offsets = [(5000,), (3,), (0,), (9000,), ()], [0, 5008, 5024, 5024, 14032]
    start = [np.asarray(rng.standard_normal(s), np.float32) for s in shapes]
    table = BucketLayout([f"p{k}" for k in range(5)], shapes, offsets, "float32")
    flats = rng.standard_normal((3, table.extent)).astype(np.float32)
    found = []
    for ranks in (1, 2, 3, 5):
        values, opt = [v.copy() for v in start], make(rule, {"weight_decay": 0.1})
        for flat in flats:
            opt.prepare(1.0)
            opt.update_bucket(table.point_to(values), [(r, ranks, flat) for r in range(ranks)])
            opt.step()
        found.append(np.concatenate([v.ravel() for v in values]))
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_or_parameters_of_zeros_keep_everything_finite(rule):
    """M1: a gradient of zeros, a parameter of zeros, or both, now or later."""
    for w, g in ((1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (1.0, 1e-40)):
        value, opt = np.full(50, w, np.float32), make(rule, {"weight_decay": 0.1})
        for k in range(4):
            opt.apply("w", value, np.full(50, g if k != 2 else 0.0, np.float32))
            opt.step()
        assert np.isfinite(value).all(), (w, g)
        assert all(np.isfinite(a).all() for slot in opt.slots for a in opt.get_states()[slot].values())


def test_both_halves_of_lans_decay_the_old_parameter():
    """M2: MXNet's step() applies the first half before it forms the second."""
    start, grads = np.array([1.0, 2.0, -1.0]), np.random.default_rng(6).standard_normal((3, 3))
    mine, ours, theirs = start.copy(), (start, 0.0, 0.0), start
    opt, m, v = LANS(0.5, weight_decay=0.5), 0.0, 0.0
    for t, g in enumerate(grads, 1):
        ours = reference.lans(*ours, g, t=t, lr=0.5, weight_decay=0.5)
        h = g / np.linalg.norm(g)
        m, v = 0.9 * m + 0.1 * h, 0.999 * v + 0.001 * h**2
        den, length = np.sqrt(v / (1 - 0.999**t)) + 1e-6, np.linalg.norm(theirs)
        for share, x in ((0.9, m / (1 - 0.9**t)), (0.1, h)):
            u = x / den + 0.5 * theirs
            theirs = theirs - 0.5 * share * length / np.linalg.norm(u) * u
        opt.apply("w", mine, g)
        opt.step()
    np.testing.assert_allclose(mine, ours[0], rtol=1e-13)
    assert abs(mine - theirs).max() > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_an_update_counts_once_however_many_tensors(rule):
    """M4: MXNet's LAMB counts twice, one tensor at a time: t = 2, 4, ..., and its schedule runs twice as fast."""
    seen, params = set(), [Parameter(f"p{k}", np.ones(3)) for k in range(5)]

    def rate(k):
        seen.add(k)
        return 0.1

    opt = make(rule, {}, rate)
    for _ in range(3):
        opt([(p, np.ones(3)) for p in params])
    assert seen == {0, 1, 2}
    assert opt.step_counter == 3


def test_rescale_grad_does_not_change_lans():
    """The gradient is brought to length 1, with its sign."""
    rng = np.random.default_rng(4)
    grads = rng.standard_normal((5, 40))
    found = []
    for rescale in (1.0, 2.0**-10, 64.0, -1.0):
        value, opt = np.ones(40), LANS(0.1, weight_decay=0.01, rescale_grad=rescale)
        for g in grads:
            opt.apply("w", value, np.sign(rescale) * g)
            opt.step()
        found.append(value)
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


def test_lars_has_the_worked_value():
    w, g = np.array([0.5, -1.25, 2.0]), np.array([0.1, -0.2, 0.3])
    opt = LARS(1.0, weight_decay=0.01, rescale_grad=0.5)
    expected = w - 0.001 * 2.410913 / (0.187083 + 0.01 * 2.410913 + 1e-8) * (0.5 * g + 0.01 * w)
    opt.apply("w", w, g)
    np.testing.assert_allclose(w, expected, rtol=1e-9)


def test_lars_leaves_biases_and_batch_norm_out_of_its_ratio_by_default():
    """Excluded by name, they have the whole learning rate, momentum and decay; other rules exclude by option only."""
    opt = LARS(0.1, momentum=0.9, weight_decay=0.01)
    params = [Parameter(n, np.full(3, 2.0)) for n in ("a.weight", "a.bias", "bn.gamma", "bn.beta")]
    opt([(p, np.ones(3)) for p in params])
    assert [round(float(p.data[0]), 6) for p in params[1:]] == [round(2 - 0.1 * 1.02, 6)] * 3
    assert params[0].data[0] > 1.999
    opt = LAMB(0.1, exclude=["bias"])
    opt([(p, np.ones(3)) for p in params])
    with pytest.raises(TypeError, match="exclude must be a predicate on the name, or a list of suffixes, got 'bias'"):
        LARS(exclude="bias")


def test_a_zero_gradient_decays_the_parameter_at_the_whole_rate():
    """As in the paper and in MXNet: q = 1 without a gradient."""
    value = np.ones(3)
    LARS(29.0, weight_decay=1e-4).apply("w", value, np.zeros(3))
    np.testing.assert_allclose(value, 1 - 29.0 * 1e-4, rtol=1e-15)


def test_wd_mult_enters_the_ratio_of_lars_and_lr_mult_the_step():
    """wd_mult is part of LARS's ratio (1.4), and lr_mult of the step."""
    w, g, expected = np.ones(3), np.full(3, 0.5), np.ones(3)
    LARS(0.1, weight_decay=0.5, wd_mult={"w": 0.5}, lr_mult={"w": 3.0}).apply("w", w, g)
    expected, _ = reference.lars(expected, 0.0, g, lr=0.3, weight_decay=0.25)
    np.testing.assert_allclose(w, expected, rtol=1e-15)


def test_squares_are_added_in_blocks_in_a_fixed_order():
    x = np.random.default_rng(5).standard_normal(10000).astype(np.float32)
    table, chunks, sums = BucketLayout(["w"], [x.shape], [0], "float32").point_to([x]), np.zeros(6), np.zeros(2)
    kernels.lars_squares(table, 2 * x, chunks)
    kernels.fold_partials(table, chunks, sums, 2)
    assert sums.tolist() == [reference.sum_of_tensor(y.astype(np.float64) ** 2) for y in (x, 2 * x)]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LARS(eta=-1), "eta must be finite"),
        (lambda: LARS(momentum=-0.1), r"momentum must be finite and in \[0.0, 1.0\]"),  # M9
        (lambda: LARS(lr=np.nan), "lr must be finite"),
        (lambda: LAMB(beta_1=1.0), r"beta_1 must be finite and in \[0.0, 0.99"),
        (lambda: LAMB(epsilon=-1e-6), "epsilon must be finite"),
        (lambda: LAMB(lower_bound=2.0, upper_bound=1.0), "lower_bound must be at most upper_bound, got 2.0 and 1.0"),
        (lambda: LANS(lower_bound=np.nan), "lower_bound must be finite"),
        (lambda: LANS(beta_2=-0.1), "beta_2 must be finite"),
        (lambda: LANS(weight_decay=-1.0), "weight_decay must be finite"),
    ],
)
def test_impossible_hyper_parameters_of_layerwise_rules_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_bounds_of_none_zero_or_below_are_no_bounds():
    """M10: 0 and None are both no bound, on every path."""
    for none in (None, 0, 0.0, -1.0):
        value = np.full(3, 2.0)
        LAMB(0.1, lower_bound=none, upper_bound=none).apply("w", value, np.ones(3))
        expected, _, _ = reference.lamb(np.full(3, 2.0), 0.0, 0.0, np.ones(3), t=1, lr=0.1)
        np.testing.assert_allclose(value, expected, rtol=1e-14)


@pytest.mark.parametrize(
    ("makes", "text"),
    [
        ((lambda: LAMB(upper_bound=1.0), lambda: LAMB(upper_bound=2.0)), "'upper': 2.0"),
        ((lambda: LARS(exclude=["a"]), lambda: LARS()), r"exclude=\('gamma', 'beta', 'bias'\)"),
        ((lambda: LANS(wd_mult={"a": 0.0}), lambda: LANS()), r"wd_mult=\{\}"),
        ((lambda: LANS(multi_precision=True), lambda: LANS()), "multi_precision=False"),
    ],
)
def test_ranks_whose_options_differ_are_refused_before_anything_changes(makes, text):
    def main(comm):
        w = Parameter("w", np.ones(3))
        with pytest.raises(ValueError, match=rf"ranks differ: rank 0 has .*, rank 1 has .*{text}"):
            DistOpt(makes[comm.rank](), comm)([(w, np.ones(3))])
        return w.data.tolist()

    assert run_ranks(2, main) == [[1.0] * 3] * 2
