"""Schedules against closed forms in numpy, at every update; what upstream's get wrong; and what is refused.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distopt.optim import (
    SGD,
    Constant,
    Cosine,
    DecayScheduler,
    ExponentialDecay,
    Factor,
    MultiFactor,
    Poly,
    from_strategy,
)
from distopt.optim.schedules import resnet50_32k

K = np.arange(400)


def warmed(values, steps, begin=0.0, mode="linear", base=0.8):
    """The first ``steps`` of these values become a warm-up."""
    ramp = begin + (base - begin) * K / max(1, steps) if mode == "linear" else np.full(len(K), begin)
    return np.where(steps > K, ramp, values)


def looped_factor(base, step, factor, stop):
    """As MXNet states it: one multiplication after the other."""
    values, lr = [], base
    for k in K:
        if k and k % step == 0:
            lr = max(lr * factor, stop)
        values.append(lr)
    return np.array(values)


def declined(left, steps, most, final):
    """``left`` of the decline from 0.8, from the warm-up on."""
    return final + (0.8 - final) * left((np.minimum(K, most) - steps) / (most - steps))


def squared(p):
    return (1 - p) ** 2


def cosine(p):
    return (1 + np.cos(np.pi * p)) / 2


WARMUPS = {
    "none": {},
    "linear": {"warmup_steps": 30, "warmup_begin_lr": 0.05},
    "from zero": {"warmup_steps": 1},
    "constant": {"warmup_steps": 25, "warmup_begin_lr": 0.1, "warmup_mode": "constant"},
}
MULTI = 0.8 * 0.1 ** sum((s <= K).astype(int) for s in (1, 40, 200))
KINDS = {
    "factor": (lambda **w: Factor(0.8, 17, 0.5, **w), lambda ws: looped_factor(0.8, 17, 0.5, 1e-8)),
    "stop": (lambda **w: Factor(0.8, 50, 0.3, stop_lr=0.02, **w), lambda ws: looped_factor(0.8, 50, 0.3, 0.02)),
    "multi": (lambda **w: MultiFactor(0.8, [1, 40, 200], 0.1, **w), lambda ws: MULTI),
    "poly": (lambda **w: Poly(0.8, 300, **w), lambda ws: declined(squared, ws, 300, 0.0)),
    "cube": (
        lambda **w: Poly(0.8, 299, 3, 0.01, **w),
        lambda ws: declined(lambda p: (1 - p) ** 3, ws, 299, 0.01),
    ),
    "cosine": (lambda **w: Cosine(0.8, 300, 0.01, **w), lambda ws: declined(cosine, ws, 300, 0.01)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", WARMUPS.values(), ids=WARMUPS)
def test_schedules_equal_their_closed_forms_with_any_warm_up(kind, warmup):
    make, expected = KINDS[kind]
    steps, begin = warmup.get("warmup_steps", 0), warmup.get("warmup_begin_lr", 0.0)
    values = warmed(expected(steps), steps, begin, warmup.get("warmup_mode", "linear"))
    schedule = make(**warmup)
    found = [schedule(int(k)) for k in K]
    assert {type(v) for v in found} == {float}
    np.testing.assert_allclose(found, values, rtol=1e-13, atol=1e-16)


def test_factor_multifactor_poly_and_cosine_have_the_published_values():
    """Factor drops at k = step, 2 step; MultiFactor at its steps; Poly and Cosine end at max_update."""
    factor, multi = Factor(1.0, 10, 0.5), MultiFactor(1.0, [10, 30], 0.1)
    assert [factor(k) for k in (9, 10, 19, 20)] == [1.0, 0.5, 0.5, 0.25]
    assert [multi(k) for k in (9, 10, 29, 30)] == pytest.approx([1.0, 0.1, 0.1, 0.01])
    assert [Poly(1.0, 10)(k) for k in (0, 5, 9, 10)] == pytest.approx([1.0, 0.25, 0.01, 0.0])
    assert [Cosine(1.0, 10)(k) for k in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])


def test_the_32k_recipe_drops_where_its_warm_up_ends_and_poly_does_not():
    assert [resnet50_32k(k) for k in (0, 100, 199)] == pytest.approx([2.0, 15.5, 28.865])
    assert resnet50_32k(200) == pytest.approx(25.87, abs=5e-3)
    assert resnet50_32k(1800) == pytest.approx(1e-4 + (29 - 1e-4) / 4)
    assert resnet50_32k(3600) == resnet50_32k(10**6) == 1e-4
    clean = Poly(29.0, 3600, final_lr=1e-4, warmup_steps=200, warmup_begin_lr=2.0)
    assert [clean(199), clean(200)] == pytest.approx([28.865, 29.0])
    assert [clean(k) for k in range(200)] == [resnet50_32k(k) for k in range(200)]
    with pytest.raises(ValueError, match="k must be at least 0, got -1"):
        resnet50_32k(-1)


# ------------------------------------------------------------------------------------------------------- properties

rates = st.floats(1e-6, 1e3)
makers = st.sampled_from(
    [
        lambda base, most, final, warmup: Factor(base, max(1, most // 3), 0.5, min(final, base), **warmup),
        lambda base, most, final, warmup: MultiFactor(base, [most, most + 7], 0.3, **warmup),
        lambda base, most, final, warmup: Poly(base, most, 2, final, **warmup),
        lambda base, most, final, warmup: Poly(base, most, 0.5, final, **warmup),
        lambda base, most, final, warmup: Cosine(base, most, final, **warmup),
    ]
)


@st.composite
def schedules(draw):
    base, final, steps = draw(rates), draw(rates), draw(st.integers(0, 50))
    warmup = {
        "warmup_steps": steps,
        "warmup_begin_lr": base * draw(st.floats(0, 1)),
        "warmup_mode": draw(st.sampled_from(["linear", "constant"])),
    }
    return draw(makers)(base, steps + draw(st.integers(1, 300)), final, warmup)


@given(schedules(), st.lists(st.integers(0, 500), min_size=1, max_size=30), st.randoms())
def test_any_order_of_calls_gives_the_same_values(schedule, ks, random):
    in_order = {k: schedule(k) for k in sorted(ks)}
    random.shuffle(ks)
    assert [schedule(k) for k in ks] == [in_order[k] for k in ks]


@given(schedules())
def test_values_stay_between_where_they_begin_and_where_they_end(schedule):
    ends = [schedule.base_lr, schedule.warmup_begin_lr, schedule(10**6)]
    values = [schedule(k) for k in range(500)]
    assert min(ends) * (1 - 1e-12) <= min(values)
    assert max(values) <= max(ends) * (1 + 1e-12)


@given(schedules())
def test_a_warm_up_rises_to_where_a_decline_begins(schedule):
    steps = schedule.warmup_steps
    values = [schedule(k) for k in range(steps + 1)]
    assert values[:-1] == sorted(values[:-1])
    if isinstance(schedule, Poly | Cosine):
        assert values[-1] == pytest.approx(schedule.base_lr, rel=1e-12)
        if steps and schedule.warmup_mode == "linear":  # one more of its equal steps leads there
            step = (schedule.base_lr - schedule.warmup_begin_lr) / steps
            assert values[-1] - values[-2] == pytest.approx(step, rel=1e-6, abs=1e-9 * schedule.base_lr)


# ------------------------------------------------------------------------------------------------------- upstream bugs


@pytest.mark.parametrize("make", [Poly, Cosine])
def test_beyond_max_update_it_is_final_lr_even_at_the_first_call(make):
    """M8: upstream returns the full base_lr, or whatever it computed last."""
    schedule = make(0.8, 100, final_lr=0.01)
    assert [schedule(150), schedule(100), schedule(10**9)] == [0.01] * 3
    assert schedule(0) == pytest.approx(0.8)
    assert schedule(50) > 0.2
    assert schedule(150) == 0.01


@pytest.mark.parametrize("schedule", [Factor(0.8, 10, 0.5), MultiFactor(0.8, [10, 20], 0.5)], ids=["factor", "multi"])
def test_a_schedule_asked_for_an_earlier_update_returns_the_earlier_rate(schedule):
    """M8: upstream multiplies its base_lr, and never back."""
    assert [schedule(k) for k in (25, 5, 15, 0)] == pytest.approx([0.2, 0.8, 0.4, 0.8])


@pytest.mark.parametrize("make", [Poly, Cosine])
@pytest.mark.parametrize("most", [10, 9])
def test_a_decline_needs_an_update_after_the_warm_up(make, most):
    """M8: upstream divides by zero."""
    with pytest.raises(ValueError, match=f"max_update must be above warmup_steps=10, got {most}"):
        make(0.8, most, warmup_steps=10)


@pytest.mark.parametrize("kind", KINDS)
def test_another_base_lr_is_that_of_the_whole_schedule(kind):
    """M7: upstream's override never reaches Poly, Cosine and the warm-up."""
    schedule = KINDS[kind][0](warmup_steps=20)
    before = [schedule(int(k)) for k in K]
    assert SGD(schedule).lr_value == 0.0  # and the optimizer's own default does not override the schedule
    assert SGD(KINDS[kind][0]()).lr_value == pytest.approx(0.8)
    schedule.base_lr = 0.4
    after = [schedule(int(k)) for k in K]
    np.testing.assert_allclose(after[:20], np.array(before[:20]) / 2, rtol=1e-13)
    assert after[20] == pytest.approx(before[20] / 2, rel=0.03)


# ------------------------------------------------------------------------------------------------------ what is refused

FOUR = {
    "Factor": lambda base=0.8, **w: Factor(base, 10, 0.5, **w),
    "MultiFactor": lambda base=0.8, **w: MultiFactor(base, [10], 0.5, **w),
    "Poly": lambda base=0.8, **w: Poly(base, 100, **w),
    "Cosine": lambda base=0.8, **w: Cosine(base, 100, **w),
}
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("make", FOUR.values(), ids=FOUR)
@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"base": -0.1}, ValueError, r"base_lr must be finite and in \[0.0, inf\], got -0.1"),
        ({"base": NAN}, ValueError, "base_lr must be finite"),
        ({"base": INF}, ValueError, "base_lr must be finite"),
        ({"base": "0.8"}, TypeError, "base_lr must be a number, got '0.8'"),
        ({"base": True}, TypeError, "base_lr must be a number, got True"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps must be at least 0, got -1"),
        ({"warmup_steps": 2.0}, TypeError, "warmup_steps must be an integer, got 2.0"),
        ({"warmup_begin_lr": 0.9}, ValueError, r"warmup_begin_lr must be finite and in \[0.0, 0.8\], got 0.9"),
        ({"warmup_begin_lr": -0.1}, ValueError, "warmup_begin_lr must be finite"),
        ({"warmup_begin_lr": NAN}, ValueError, "warmup_begin_lr must be finite"),
        ({"warmup_begin_lr": None}, TypeError, "warmup_begin_lr must be a number"),
        ({"warmup_mode": "cubic"}, ValueError, r"warmup_mode must be one of \('linear', 'constant'\), got 'cubic'"),
        ({"warmup_mode": None}, ValueError, "warmup_mode must be one of"),
        ({"warmup": 5}, TypeError, "unexpected keyword argument 'warmup'"),
    ],
)
def test_impossible_warm_ups_are_refused(make, wrong, error, text):
    with pytest.raises(error, match=text):
        make(**wrong)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Factor(0.8, 0, 0.5), ValueError, "step must be at least 1, got 0"),
        (lambda: Factor(0.8, 1.5, 0.5), TypeError, "step must be an integer, got 1.5"),
        (lambda: Factor(0.8, 10, 1.1), ValueError, r"factor must be finite and in \[0.0, 1.0\], got 1.1"),
        (lambda: Factor(0.8, 10, -0.1), ValueError, "factor must be finite"),
        (lambda: Factor(0.8, 10, NAN), ValueError, "factor must be finite"),
        (lambda: Factor(0.8, 10, 0.5, 0.9), ValueError, r"stop_lr must be finite and in \[0.0, 0.8\], got 0.9"),
        (lambda: Factor(0.8, 10, 0.5, -1), ValueError, "stop_lr must be finite"),
        (lambda: MultiFactor(0.8, [10, 10], 0.5), ValueError, r"each above the one before it, got \[10, 10\]"),
        (lambda: MultiFactor(0.8, (20, 10), 0.5), ValueError, r"each above the one before it, got \[20, 10\]"),
        (lambda: MultiFactor(0.8, [], 0.5), ValueError, r"step must be one or more integers, .* got \[\]"),
        (lambda: MultiFactor(0.8, [0, 10], 0.5), ValueError, "step must be at least 1, got 0"),
        (lambda: MultiFactor(0.8, [1.5], 0.5), TypeError, "step must be an integer, got 1.5"),
        (lambda: MultiFactor(0.8, 10, 0.5), TypeError, "step must be a list of integers, got 10"),
        (lambda: MultiFactor(0.8, "10", 0.5), TypeError, "step must be a list of integers, got '10'"),
        (lambda: MultiFactor(0.8, [10], 2), ValueError, "factor must be finite"),
        (lambda: Poly(0.8, 0), ValueError, "max_update must be at least 1, got 0"),
        (lambda: Poly(0.8, 1e3), TypeError, "max_update must be an integer, got 1000.0"),
        (lambda: Poly(0.8, True), TypeError, "max_update must be an integer, got True"),
        (lambda: Poly(0.8, 10, 0), ValueError, "pwr must be finite and above 0, got 0"),
        (lambda: Poly(0.8, 10, -2), ValueError, "pwr must be finite and above 0, got -2"),
        (lambda: Poly(0.8, 10, INF), ValueError, "pwr must be finite and above 0, got inf"),
        (lambda: Poly(0.8, 10, "2"), TypeError, "pwr must be a number, got '2'"),
        (lambda: Poly(0.8, 10, 2, -0.1), ValueError, "final_lr must be finite"),
        (lambda: Cosine(0.8, 10, NAN), ValueError, "final_lr must be finite"),
        (lambda: Cosine(0.8, -5), ValueError, "max_update must be at least 1, got -5"),
    ],
)
def test_impossible_numbers_of_schedules_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize("make", [*FOUR.values(), lambda: from_strategy("5:0.1", 10)], ids=[*FOUR, "strategy"])
def test_k_must_be_an_integer_of_at_least_0(make):
    schedule = make()
    assert schedule(np.int64(3)) == schedule(3)
    with pytest.raises(ValueError, match="k must be at least 0, got -1"):
        schedule(-1)
    with pytest.raises(TypeError, match=r"k must be an integer, got 1\.5"):
        schedule(1.5)


def test_numpy_numbers_are_numbers():
    assert repr(Poly(np.float64(0.5), np.int64(10), np.float32(2))) == repr(Poly(0.5, 10, 2.0))


def test_a_schedule_shows_its_numbers():
    assert repr(Constant(0.5)) == "Constant(init_value=0.5)"
    assert repr(ExponentialDecay(1.0, 10, 0.5)) == (
        "ExponentialDecay(init_value=1.0, decay_steps=10, decay_rate=0.5, staircase=False)"
    )
    warmup = "warmup_steps=5, warmup_begin_lr=0.1, warmup_mode='constant'"
    given = {"warmup_steps": 5, "warmup_begin_lr": 0.1, "warmup_mode": "constant"}
    found = {name: repr(make(**given)) for name, make in FOUR.items()}
    assert found == {
        "Factor": f"Factor(base_lr=0.8, {warmup}, step=10, factor=0.5, stop_lr=1e-08)",
        "MultiFactor": f"MultiFactor(base_lr=0.8, {warmup}, step=(10,), factor=0.5)",
        "Poly": f"Poly(base_lr=0.8, {warmup}, max_update=100, final_lr=0.0, pwr=2.0)",
        "Cosine": f"Cosine(base_lr=0.8, {warmup}, max_update=100, final_lr=0.0)",
    }
    assert repr(from_strategy("5:0.1->0.4,30:0.4,60:0.04", 10, "exponential")) == (
        "Strategy(ramp=Ramp(begin=0.1, end=0.4, steps=50, mode='exponential'), boundaries=(300,), values=(0.4, 0.04))"
    )


def test_schedules_have_init_value_and_serve_as_any_hyper_parameter():
    """They have an ``init_value``, and an optimizer takes them for any hyper-parameter."""
    for schedule in (*(make() for make in FOUR.values()), from_strategy("5:0.8", 10)):
        assert isinstance(schedule, DecayScheduler)
        assert schedule.init_value == pytest.approx(0.8)
    assert Poly(0.8, 10, warmup_steps=5, warmup_begin_lr=0.2).init_value == 0.2
    opt, w = SGD(Poly(0.5, 4), momentum=MultiFactor(0.9, [2], 0.5)), np.zeros(1)
    for k in range(4):
        assert (opt.lr_value, opt.at("momentum")) == (Poly(0.5, 4)(k), 0.9 if k < 2 else 0.45)
        opt.apply("w", w, np.ones(1))
        opt.step()


# ------------------------------------------------------------------------------------------------------- MoXing's text


def piecewise(k, boundaries, values):
    """TensorFlow's piecewise_constant, in its own words: values[i] for boundaries[i - 1] < k <= boundaries[i]."""
    if k <= boundaries[0]:
        return values[0]
    if k > boundaries[-1]:
        return values[-1]
    return next(v for lo, hi, v in zip(boundaries, boundaries[1:], values[1:], strict=False) if lo < k <= hi)


@pytest.mark.parametrize("warmup", ["linear", "exponential"])
def test_a_strategy_text_gives_the_published_rates(warmup):
    """'5:0.001->0.4,30:0.4,60:0.04,80:0.004,90:0.0004' with 4 steps an epoch."""
    schedule = from_strategy("5:0.001->0.4,30:0.4,60:0.04,80:0.004,90:0.0004", 4, warmup)
    for k in range(500):
        if k <= 20:
            linear, exponential = 0.001 + (0.4 - 0.001) * k / 20, 0.001 * (0.4 / 0.001) ** (k / 20)
            expected = linear if warmup == "linear" else exponential
        else:
            expected = piecewise(k, [120, 240, 320], [0.4, 0.04, 0.004, 0.0004])
        assert schedule(k) == pytest.approx(expected, rel=1e-13), k


def test_a_strategy_without_a_warm_up_is_piecewise_constant():
    schedule = from_strategy(" 30:0.1, 60:0.01 ,80:0.001,90:0.0001", 10)
    for k in range(1000):
        assert schedule(k) == piecewise(k, [300, 600, 800], [0.1, 0.01, 0.001, 0.0001]), k


def test_the_last_update_of_a_stage_has_the_rate_of_that_stage():
    schedule = from_strategy("5:0.1->0.7,30:0.5,60:0.05", 10)
    assert [schedule(k) for k in (50, 51, 300, 301)] == [0.7, 0.5, 0.5, 0.05]
    for begin, end in itertools.product((0.1, 0.3, 0.001), (0.4, 0.7, 3.3)):
        for warmup in ("linear", "exponential"):
            assert from_strategy(f"3:{begin}->{end},9:1", 7, warmup)(21) == end  # to the bit


def test_the_last_boundary_is_not_used():
    assert from_strategy("30:0.4,60:0.04", 10)(10**9) == from_strategy("30:0.4,31:0.04", 10)(301) == 0.04


def test_a_strategy_of_one_stage_keeps_its_last_rate():
    assert {from_strategy("30:0.4", 10)(k) for k in (0, 300, 301, 10**6)} == {0.4}
    ramp = from_strategy("5:0.1->0.4", 10)  # upstream: float('0.1->0.4') fails
    assert [ramp(k) for k in (0, 25, 50, 51, 10**6)] == pytest.approx([0.1, 0.25, 0.4, 0.4, 0.4])


def test_a_warm_up_stage_of_no_steps_is_skipped():
    schedule = from_strategy("0:0.1->0.4,30:0.2", 10)  # upstream divides by zero
    assert [schedule(k) for k in (0, 1)] == [0.4, 0.2]


def test_stages_may_end_at_fractions_of_epochs():
    schedule = from_strategy("0.5:0.1->0.3,0.75:0.2,2:0.1", 10)  # upstream: int('0.5') fails
    assert [schedule(k) for k in (0, 5, 6, 7, 8)] == [0.1, 0.3, 0.2, 0.2, 0.1]
    assert from_strategy("0.29:1,1:2", 100).boundaries == (29,)  # int(0.29 * 100) is 28


@pytest.mark.parametrize(
    ("text", "stage", "why"),
    [
        ("", 1, "must be EPOCH:LR, or EPOCH:FROM->TO for a warm-up, got ''"),
        ("30", 1, "must be EPOCH:LR, .* got '30'"),
        ("30:0.1,", 2, "must be EPOCH:LR, .* got ''"),
        ("30:0.1,60:0.2->0.3->0.4", 2, "must be EPOCH:LR"),
        ("30:", 1, "a learning rate must be a number, got ''"),
        ("30:fast", 1, "a learning rate must be a number, got 'fast'"),
        ("5:->0.4", 1, "a learning rate must be a number, got ''"),
        ("x:0.1", 1, "an epoch must be a number, got 'x'"),
        ("30:0.1,60:-0.1", 2, r"a learning rate must be in \[0, 1000000000\], got -0.1"),
        ("30:nan", 1, "a learning rate must be in .* got nan"),
        ("30:inf", 1, "a learning rate must be in .* got inf"),
        ("-5:0.1", 1, "an epoch must be in .* got -5"),
        ("1e999999999:0.1", 1, "an epoch must be in"),
        ("0:0.1,30:0.2", 1, "must end at update 1 or later, got epoch 0, which ends at 0"),
        ("30:0.1,30:0.2", 2, "must end at update 301 or later, got epoch 30, which ends at 300"),
        ("60:0.1,30:0.2", 2, "must end at update 601 or later, got epoch 30, which ends at 300"),
        ("5:0.1->0.2,5:0.2", 2, "must end at update 51 or later"),
        ("1:0.1,1.05:0.2", 2, "must end at update 11 or later, got epoch 1.05, which ends at 10"),
        ("30:0.1,60:0.1->0.4", 2, r"must be EPOCH:LR, got .*; only the first stage may warm up \(->\)"),
    ],
)
def test_texts_that_are_no_strategy_are_refused_with_the_stage_named(text, stage, why):
    with pytest.raises(ValueError, match=f"^stage {stage} of the strategy .*: {why}"):
        from_strategy(text, 10)


def test_exponential_warm_ups_need_both_ends_above_zero():
    for text in ("5:0->0.4", "5:0.4->0"):
        from_strategy(text, 10)
        with pytest.raises(
            ValueError, match=r"stage 1 .* must be from and to rates above 0 for an exponential warm-up, got '0"
        ):
            from_strategy(text, 10, "exponential")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((30, 10), TypeError, "strategy must be a text .*, got 30"),
        (("30:0.1", 0), ValueError, "steps_per_epoch must be at least 1, got 0"),
        (("30:0.1", 10.5), TypeError, "steps_per_epoch must be an integer, got 10.5"),
        (("30:0.1", 10, "cubic"), ValueError, r"warmup must be one of \('linear', 'exponential'\), got 'cubic'"),
    ],
)
def test_bad_arguments_of_a_strategy(arguments, error, text):
    with pytest.raises(error, match=text):
        from_strategy(*arguments)
