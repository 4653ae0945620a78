"""LarsWrapper and BatchGradients: against the paper in float64, alone, nested, and in DistOpt on several ranks.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import ml_dtypes
import numpy as np
import pytest

import laws
import reference
import tiers
from distopt import DistOpt, Parameter, kernels, run_ranks
from distopt.comm import LocalCommunicator
from distopt.optim import SGD, Adam, BatchGradients, ExponentialDecay, LarsWrapper
from distopt.optim.exclude import SUFFIXES, predicate

RATE = {"ratio": 0.02, "weight_decay": 0.1}  # as laws.layer_wise


class Recorder:
    """A foreign optimizer that keeps what it is given, by the very object."""

    def __init__(self):
        self.seen, self.steps = [], 0

    def apply(self, name, value, grad):
        self.seen.append((name, value, grad))

    def step(self):
        self.steps += 1


def lars(lr=0.1, momentum=0.9, **options):
    return LarsWrapper(SGD(lr, momentum), **RATE | options)


def recipe(num_batches=2):
    """MoXing's order: the mean of several batches, then LARS, then momentum SGD."""
    return BatchGradients(laws.layer_wise(), num_batches)


def plain_sgd():
    return SGD(ExponentialDecay(0.1, 2, 0.5, staircase=True), momentum=0.9)


# ------------------------------------------------------------------------------------------------------- LARS


def trained(opt, lr, name="w", dtype="float64", steps=60):
    """A parameter after some steps of LARS, and what two references make of it: the paper's, and the wrapper's."""
    rng = np.random.default_rng(3)
    value = rng.standard_normal((30, 7)).astype(dtype)
    w, b = value.astype(np.float64), np.zeros(value.shape)
    paper, v = w.copy(), b.copy()
    for k in range(steps):
        g = rng.standard_normal(value.shape).astype(dtype)
        kept, wide = g.copy(), g.astype(np.float64)
        now = {"lr": lr(k), "momentum": 0.9} | RATE
        w, b = reference.lars_around_sgd(w, b, wide, **now, excluded=name.endswith("bias"))
        paper, v = reference.lars_of_the_paper(paper, v, wide, **now)
        assert opt([(Parameter(name, value), g)]) is True
        np.testing.assert_array_equal(g, kept)  # the caller's gradient stays as it is
    return value, w, paper


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-6), ("float64", 1e-13)])
def test_lars_wrapper_equals_the_papers_lars_at_a_constant_rate(dtype, tolerance):
    value, w, paper = trained(lars(0.5), lambda k: 0.5, dtype=dtype)
    np.testing.assert_allclose(w, paper, rtol=0, atol=1e-13)
    np.testing.assert_allclose(value, paper, rtol=0, atol=tolerance * abs(paper).max())


def test_lars_wrapper_differs_from_the_paper_when_the_rate_drops():
    def falling(k):
        return 0.5 if k < 30 else 0.05

    value, w, paper = trained(lars(falling), falling)
    np.testing.assert_allclose(value, w, rtol=0, atol=1e-13)
    assert abs(value - paper).max() > 1e-3


def test_names_that_are_left_out_keep_their_weight_decay():
    value, w, paper = trained(lars(), lambda k: 0.1, name="conv.bias")
    np.testing.assert_allclose(value, w, rtol=0, atol=1e-13)
    assert abs(value - paper).max() > 1e-1


def test_trust_ratio_and_update_have_the_worked_values():
    w, g = np.array([0.5, -1.25, 2.0]), np.array([0.1, -0.2, 0.3])
    opt = LarsWrapper(SGD(1.0), ratio=0.001, weight_decay=0.01, epsilon=1e-8)
    q = 0.001 * 2.410913 / (0.3741657 + 0.01 * 2.410913 + 1e-8)
    assert opt.trust("w", w, g) == pytest.approx(q, rel=1e-6)
    expected = w - opt.trust("w", w, g) * (g + 0.01 * w)
    opt.apply("w", w, g)
    np.testing.assert_allclose(w, expected, rtol=1e-15)


def test_epsilon_is_added_in_the_denominator_of_the_trust_ratio():
    w, g = np.array([3.0, 4.0]), np.array([0.6, 0.8])
    assert LarsWrapper(SGD(), 0.5, 0.2, 0.25).trust("w", w, g) == pytest.approx(0.5 * 5 / (1 + 0.2 * 5 + 0.25))


@pytest.mark.parametrize(("w", "g"), [(np.ones(3), np.zeros(3)), (np.zeros(3), np.ones(3)), (np.ones(0), np.ones(0))])
def test_where_a_norm_is_zero_the_ratio_is_1(w, g):
    opt, expected = LarsWrapper(SGD(1.0), weight_decay=0.25), w - (g + 0.25 * w)
    opt.apply("w", w, g)
    np.testing.assert_array_equal(w, expected)


def test_norms_of_the_trust_ratio_are_added_in_float64():
    """The sum of 10,000 squares of 0.1 in float32, and squares that float32 does not have."""
    opt = LarsWrapper(SGD(), ratio=1.0, weight_decay=0.0)
    w, g = np.full(10_000, 0.1, np.float32), np.full(10_000, 1e-30, np.float32)
    expected = float(w[0]) / float(g[0])
    assert opt.trust("w", w, g) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_arrays_are_computed_with_in_float32(dtype):
    inner, rng = Recorder(), np.random.default_rng(5)
    w, g = (rng.standard_normal((40, 3)).astype(dtype) for _ in range(2))
    LarsWrapper(inner, **RATE).apply("w", w, g)
    x, y = w.astype(np.float64), g.astype(np.float64)
    expected = reference.trust_ratio(x, y, **RATE) * (y + 0.1 * x)
    [(_, _, given)] = inner.seen
    assert (given.dtype, given.shape) == (np.float32, w.shape)
    np.testing.assert_allclose(given.astype(np.float64), expected, rtol=1e-6)


def test_exclusions_are_a_predicate_or_suffixes_and_anything_else_is_refused():
    assert predicate(SUFFIXES)("bn1.gamma")
    assert predicate(["bias", "scale"])("fc.scale")
    assert not predicate(("bias",))("biased")
    assert not predicate([])("fc.bias")
    assert predicate(lambda name: name == "embedding")("embedding")
    for wrong in ("bias", 3, ["bias", 3], None, {"bias"}):
        with pytest.raises(TypeError, match=r"exclude must be a predicate on the name, or a list of suffixes, got "):
            LarsWrapper(SGD(), exclude=wrong)
    with pytest.raises(ValueError, match=r"exclude must be suffixes that are not empty, got \['bias', ''\]"):
        predicate(["bias", ""])


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"ratio": 0}, ValueError, "ratio must be finite and above 0, got 0"),
        ({"ratio": -0.1}, ValueError, "ratio must be finite and above 0"),
        ({"ratio": np.nan}, ValueError, "ratio must be finite and above 0, got nan"),
        ({"ratio": np.inf}, ValueError, "ratio must be finite and above 0, got inf"),
        ({"ratio": "0.1"}, TypeError, "ratio must be a number, got '0.1'"),
        ({"ratio": True}, TypeError, "ratio must be a number, got True"),
        ({"weight_decay": -1e-4}, ValueError, r"weight_decay must be finite and in \[0.0, inf\], got -0.0001"),
        ({"weight_decay": np.nan}, ValueError, "weight_decay must be finite"),
        ({"weight_decay": lambda k: 0.1}, TypeError, "weight_decay must be a number"),
        ({"epsilon": -1e-8}, ValueError, "epsilon must be finite"),
        ({"epsilon": np.inf}, ValueError, "epsilon must be finite"),
    ],
)
def test_impossible_numbers_of_lars_wrapper_are_refused(wrong, error, text):
    with pytest.raises(error, match=text):
        LarsWrapper(SGD(), **wrong)


@pytest.mark.parametrize(
    ("inner", "kind"),
    [
        (SGD(weight_decay=0.1), "SGD"),
        (Adam(weight_decay=lambda k: 0.1), "Adam"),
        (LarsWrapper(SGD()), "LarsWrapper"),
        (BatchGradients(SGD(weight_decay=0.1), 2), "SGD"),
        (BatchGradients(LarsWrapper(SGD(), weight_decay=0.1), 2), "LarsWrapper"),
    ],
)
def test_weight_decay_of_the_inner_optimizer_is_refused(inner, kind):
    with pytest.raises(
        ValueError, match=f"weight_decay of the {kind} inside must be 0, got 0.*1; weight decay belongs to LarsWrapper"
    ):
        LarsWrapper(inner)


def test_weight_decay_that_comes_later_is_refused_before_anything_changes():
    w = np.ones(3)
    opt = LarsWrapper(SGD(0.1, weight_decay=lambda k: 0.0 if k < 1 else 0.1), exclude=[])
    opt([(Parameter("w", w), np.ones(3))])
    before = w.copy()
    for refused in (lambda: opt.apply("w", w, np.ones(3)), opt.numbers):
        with pytest.raises(ValueError, match="; weight decay belongs to LarsWrapper"):
            refused()
    np.testing.assert_array_equal(w, before)

    def main(comm):
        opt, w = LarsWrapper(SGD(0.1)), Parameter("w", np.ones(3))
        together = DistOpt(opt, comm)
        together([(w, np.ones(3))])
        before = w.data.copy()
        opt.opt.weight_decay = 0.1 if comm.rank else 0.0
        with pytest.raises(ValueError, match=r"rank 1: .*; weight decay belongs to LarsWrapper"):
            together([(w, np.ones(3))])
        np.testing.assert_array_equal(w.data, before)  # the vote came first
        opt.opt.weight_decay = 0.0
        assert together([(w, np.ones(3))])

    run_ranks(2, main)


# ------------------------------------------------------------------------------------------------------- batches


def test_batch_gradients_applies_the_mean_of_its_batches_once():
    rng = np.random.default_rng(7)
    for num_batches in (1, 2, 3, 8):
        w = np.tile(rng.standard_normal(50).astype(np.float32), (2, 1))
        grads = rng.standard_normal((3, num_batches, 50)).astype(np.float32)
        opt, plain = BatchGradients(plain_sgd(), num_batches), plain_sgd()
        for window in grads:
            done = [opt([(Parameter("w", w[0]), g)]) for g in window]
            assert done == [False] * (num_batches - 1) + [True]
            plain([(Parameter("w", w[1]), window.mean(0, np.float64).astype(np.float32))])
        np.testing.assert_allclose(w[0], w[1], rtol=0, atol=1e-6)
        assert opt.step_counter == 3  # and so the rate is that of plain
        assert opt.lr_value == plain.lr_value == 0.05


def test_gradients_are_copied_and_the_inner_optimizer_owns_the_mean():
    """L1: a buffer that the next backward pass overwrites, and an inner optimizer that keeps what it gets."""
    inner, w, g = Recorder(), np.zeros(4), np.zeros(4)
    opt = BatchGradients(inner, 2)
    for k in range(6):
        g[...] = k
        opt.apply("w", w, g)
        np.testing.assert_array_equal(g, k)
        opt.step()
    assert [grad.tolist() for _, _, grad in inner.seen] == [[0.5] * 4, [2.5] * 4, [4.5] * 4]
    assert all(value is w for _, value, _ in inner.seen)
    assert inner.steps == 3


def test_a_missing_gradient_counts_as_zero_and_a_parameter_without_any_is_not_updated():
    inner = Recorder()
    opt, values = BatchGradients(inner, 3), {n: np.zeros(2) for n in "abc"}
    for names in ("ab", "a", "ac", "a", "a", "a"):
        for n in names:
            opt.apply(n, values[n], np.full(2, 3.0))
        opt.step()
    assert [(n, g.tolist()) for n, _, g in inner.seen] == [
        ("a", [3.0] * 2),
        ("b", [1.0] * 2),
        ("c", [1.0] * 2),
        ("a", [3.0] * 2),
    ]


def test_tied_weights_are_added_up():
    inner, w = Recorder(), np.zeros(2)
    opt = BatchGradients(inner, 2)
    for k in (1.0, 2.0, 3.0):
        opt.apply("w", w, np.full(2, k))
        opt.step() if k > 1 else None
    assert inner.seen[0][2].tolist() == [3.0, 3.0]


def test_flush_applies_what_there_is():
    inner, w = Recorder(), np.zeros(2)
    opt = BatchGradients(inner, 4)
    assert opt.flush() is False
    for k in (1.0, 2.0, 6.0):
        opt([(Parameter("w", w), np.full(2, k))])
    assert (opt.flush(), opt.flush(), opt.batches, inner.steps) == (True, False, 0, 1)
    assert inner.seen[0][2].tolist() == [3.0, 3.0]
    done = [opt([(Parameter("w", w), np.ones(2))]) for _ in range(4)]
    assert done == [False, False, False, True]  # the next window is a whole one
    opt.apply("w", w, np.ones(2))
    with pytest.raises(RuntimeError, match="flush must be called between batches, got a call in the middle"):
        opt.flush()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_gradients_are_added_up_in_float32(dtype):
    """64 times 33/32 and a small one: 16-bit sums would lose the small ones, or overflow."""
    inner, w = Recorder(), np.zeros(2, dtype)
    opt = BatchGradients(inner, 64)
    for k in range(64):
        opt([(Parameter("w", w), np.array([1.03125, 2048.0 if k else 2**-6], dtype))])
        if k == 62:
            assert opt.get_states()["sums"]["w"].dtype == np.float32
    [(_, _, mean)] = inner.seen
    assert mean.dtype == np.float32
    assert mean[0] == np.float32(1.03125)
    assert mean[1] == np.float32((63 * 2048 + 2**-6) / 64)


def test_gradients_need_not_be_contiguous():
    for make, factor in ((lambda r: BatchGradients(r, 1), 1.0), (lambda r: LarsWrapper(r, weight_decay=0.0), None)):
        inner, w, g = Recorder(), np.ones((3, 4)), np.arange(12.0).reshape(4, 3).T
        opt = make(inner)
        opt.apply("w", w, g)
        opt.step()
        q = factor or opt.trust("w", w.ravel(), g.ravel())
        np.testing.assert_array_equal(inner.seen[0][2], q * g)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (0, ValueError, "num_batches must be at least 1, got 0"),
        (-2, ValueError, "num_batches must be at least 1, got -2"),
        (True, TypeError, "num_batches must be an integer, got True"),
        (1.5, TypeError, r"num_batches must be an integer, got 1\.5"),
        ("2", TypeError, "num_batches must be an integer, got '2'"),
    ],
)
def test_impossible_numbers_of_batches_are_refused(wrong, error, text):
    with pytest.raises(error, match=text):
        BatchGradients(SGD(), wrong)


# ------------------------------------------------------------------------------------------------------- what is inside

WRAP = {"lars": LarsWrapper, "batches": lambda opt: BatchGradients(opt, 1)}


class ByParam:
    """The plainest protocol; it keeps its state by the parameter object, and makes new arrays."""

    def __init__(self):
        self.buffers = {}

    def update(self, param, grad):
        b = self.buffers[id(param)] = 0.9 * self.buffers.get(id(param), 0.0) + grad
        param.data = param.data - 0.1 * b


@pytest.mark.parametrize("wrap", WRAP.values(), ids=WRAP)
def test_an_inner_optimizer_with_update_only(wrap):
    opt, plain = wrap(ByParam()), wrap(SGD(0.1, 0.9))
    rng = np.random.default_rng(9)
    values = {n: rng.standard_normal((2, 5)) for n in "ab"}
    for n in values:
        values[n][1] = values[n][0]
    for _ in range(5):
        for n, g in zip("ab", rng.standard_normal((2, 5)), strict=True):
            opt.apply(n, values[n][0], g)
            plain.apply(n, values[n][1], g)
        assert opt.step() is plain.step() is True
    for n in values:
        np.testing.assert_allclose(values[n][0], values[n][1], rtol=1e-13)
    assert opt.get_states()["opt"] is None


@pytest.mark.parametrize("wrap", WRAP.values(), ids=WRAP)
@pytest.mark.parametrize(
    ("inner", "got"), [(None, "NoneType: None"), (3, "int: 3"), (SGD, "the class SGD"), ([3], r"list: \[3\]")]
)
def test_an_inner_object_that_is_no_optimizer_is_refused(wrap, inner, got):
    with pytest.raises(
        TypeError, match=rf"opt must be an object with apply\(name, value, grad\) or update\(param, grad\), got {got}"
    ):
        wrap(inner)


@pytest.mark.parametrize("wrap", WRAP.values(), ids=WRAP)
def test_gradients_and_parameters_of_wrong_shape_or_dtype_are_refused_at_once(wrap):
    inner, w = Recorder(), np.zeros(3)
    opt = wrap(inner)
    for value, grad, error, text in (
        (w, np.zeros((3, 1)), ValueError, r"w: the gradient must be like the parameter, \(3,\) float64, got \(3, 1\)"),
        (w, np.zeros(3, np.float32), ValueError, "w: the gradient must be like the parameter, .* float32"),
        (np.frombuffer(bytes(24)), w, ValueError, "the parameter is read-only"),
        (np.zeros(3, int), np.zeros(3, int), TypeError, "w: a parameter must be an array of floats, .* int64"),
        (w, [0.0] * 3, TypeError, "w: a gradient must be an array of floats, got list"),
        (w, w.astype(">f8"), TypeError, "w: a gradient must be an array of floats, .* >f8"),
    ):
        with pytest.raises(error, match=text):
            opt.apply("w", value, grad)
    opt.step()
    assert inner.seen == []


def test_a_parameter_that_changes_shape_or_dtype_within_an_accumulation_window_is_refused():
    opt = BatchGradients(SGD(), 2)
    opt([(Parameter("w", np.zeros(3)), np.zeros(3))])
    with pytest.raises(ValueError, match=r"w: gradients of the open window must be \(3,\) float64, got"):
        opt.apply("w", np.zeros(2), np.zeros(2))
    with pytest.raises(ValueError, match=r"w: gradients of the open window must be \(3,\) float64, got"):
        opt.apply("w", np.zeros(3, np.float32), np.zeros(3, np.float32))


def test_the_learning_rate_of_a_wrapper_is_that_of_the_inner_optimizer():
    opt = recipe()
    assert (opt.lr_value, opt.step_counter) == (0.1, 0)
    opt.lr = 0.5
    assert (opt.lr_value, opt.opt.opt.lr_value, opt.lr(3)) == (0.5, 0.5, 0.5)


def test_a_wrapper_around_an_optimizer_without_a_rate_has_none():
    with pytest.raises(AttributeError, match="Recorder has no lr that could be assigned"):
        LarsWrapper(Recorder()).lr = 0.1


def test_wrappers_show_their_numbers():
    inner = SGD(0.1, 0.9)
    assert repr(BatchGradients(LarsWrapper(inner), 8)) == (
        f"BatchGradients(LarsWrapper({inner!r}, ratio=0.001, weight_decay=0.0001, epsilon=0.0, "
        "exclude=('gamma', 'beta', 'bias'), left_out=()), num_batches=8)"
    )

    def norms(name):
        return True

    shown = repr(LarsWrapper(Recorder(), exclude=norms))
    assert shown.startswith("LarsWrapper(Recorder, ratio=0.001")
    assert shown.endswith("norms, left_out=())")  # and no address, which differs between ranks
    assert " at 0x" not in shown


# ------------------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize("make", laws.WRAPPERS.values(), ids=laws.WRAPPERS)
def test_states_saved_at_any_step_resume_to_the_same_bits(make):
    grads = np.random.default_rng(2).standard_normal((7, 2, 40)).astype(np.float32)
    expected = None
    for stop in (None, *range(8)):
        values, opt = np.ones((2, 40), np.float32), make()
        for k in range(7):
            if k == stop:
                saved, opt = opt.state_dict(), make()
                opt.load_state_dict(saved)
                for total in saved.get("sums", {}).values():
                    total[...] = np.nan  # they were copied
            opt(zip([Parameter("a", values[0]), Parameter("b.bias", values[1])], grads[k].copy(), strict=True))
        expected = values if stop is None else expected
        np.testing.assert_array_equal(values, expected)


def test_states_of_an_open_accumulation_window_hold_sums_and_batch_count():
    opt, w = recipe(3), np.ones(4, np.float32)
    for k in range(4):
        opt([(Parameter("w", w), np.full(4, k, np.float32))])
    states = opt.get_states()
    assert set(states) == {"opt", "batches", "sums"}
    assert states["batches"] == 1
    assert states["sums"]["w"].tolist() == [3.0] * 4
    assert set(states["opt"]) == {"opt"}
    assert states["opt"]["opt"]["step_counter"] == 1
    states["sums"]["w"][...] = 0  # a copy
    assert opt.get_states()["sums"]["w"].tolist() == [3.0] * 4
    opt.flush()
    assert opt.get_states()["sums"] == {}


def test_states_of_another_optimizer_or_wrapper_are_refused():
    opt = BatchGradients(SGD(0.1, 0.9), 2)
    good = opt.get_states()
    for states, text in (
        ({"opt": None}, r"the states of BatchGradients must be opt, batches, sums, got \['opt'\]"),
        (SGD(0.1, 0.9).get_states(), "the states of BatchGradients must be .*, got .*'step_counter'"),
        (None, "the states of BatchGradients must be .*, got NoneType"),
        (good | {"batches": 2}, "batches must be below num_batches=2, got 2"),
        (good | {"batches": -1}, "batches must be at least 0, got -1"),
        (good | {"sums": None}, "sums must be float32 or float64 arrays by parameter name, got None"),
        (good | {"sums": {"w": np.zeros(3, int)}}, "sums must be float32 or float64 arrays .* array"),
        (good | {"sums": {"w": "text"}}, "sums must be float32 or float64 arrays .* 'text'"),
        (good | {"opt": SGD().get_states()}, "the states of SGD must be"),
    ):
        with pytest.raises(ValueError, match=text):
            opt.set_states(states)
    with pytest.raises(TypeError, match=r"batches must be an integer, got 0\.0"):
        opt.set_states(good | {"batches": 0.0})
    laws.assert_equal_states(opt.get_states(), good)
    with pytest.raises(ValueError, match=r"the states of LarsWrapper must be opt, got \['batches', 'opt', 'sums'\]"):
        lars().set_states(good)
    with pytest.raises(ValueError, match="Recorder has no load_state_dict or set_states"):
        LarsWrapper(Recorder()).set_states(lars().get_states())


def test_a_restored_accumulation_window_needs_a_gradient_of_every_parameter_before_its_update():
    opt, w = BatchGradients(SGD(1.0), 3), np.zeros(2)
    opt([(Parameter("w", w), np.ones(2)), (Parameter("v", np.zeros(2)), np.ones(2))])
    again = BatchGradients(SGD(1.0), 3)
    again.set_states(opt.get_states())
    again([(Parameter("w", w), np.ones(2))])
    with pytest.raises(RuntimeError, match="must get a gradient before the update, got none for v; apply one"):
        again.flush()
    assert not w.any()
    v = np.zeros(2)
    assert again([(Parameter("v", v), np.ones(2))]) is True
    np.testing.assert_allclose([w, v], -2 / 3, rtol=1e-15)


# ------------------------------------------------------------------------------------------------------- ranks


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "size"), tiers.in_turn(laws.WRAPPERS, (3, 1, 2, 4)))
def test_wrapped_optimizers_on_many_ranks_equal_one_and_resume(name, size):
    make = laws.WRAPPERS[name]

    def main(comm):
        laws.ranks_agree_with_one(comm, make)
        laws.resume(comm, make=make, stops=(1, 2, 3, 4, 5))
        for mode in ("dense", "topk", "half"):
            laws.same_bits(comm, mode, make=make)
            laws.resume(comm, mode, make=make, stops=(3,))

    run_ranks(size, main)


def test_dist_opt_of_one_rank_equals_the_wrapper_alone():
    for make in laws.WRAPPERS.values():
        params, _ = laws.train(LocalCommunicator(), make=make, steps=6)
        alone, opt = laws.parameters(), make()
        for step in range(6):
            opt(zip(alone, laws.gradients(alone, step, 0), strict=True))
        assert laws.digest(params) == laws.digest(alone)


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_are_one_large_batch(size):
    """Four calls of DistOpt(num_batches=4), BatchGradients(4) inside DistOpt, or one call with the mean of all."""
    inner = laws.layer_wise

    def main(comm):
        found = []
        for opt in (
            DistOpt(inner(), comm, num_batches=4),
            DistOpt(inner(), comm, num_batches=4, sync_on_apply=False),
            DistOpt(BatchGradients(inner(), 4), comm),
            DistOpt(inner(), comm),
        ):
            params = laws.parameters()
            for window in range(3):
                grads = [laws.gradients(params, 4 * window + k, comm.rank) for k in range(4)]
                if len(found) == 3:
                    grads = [[np.asarray(reference.mean(g), np.float32) for g in zip(*grads, strict=True)]]
                for g in grads:
                    opt(zip(params, g, strict=True))
            found.append(np.concatenate([p.data.ravel() for p in params]))
        for other in found[1:]:
            np.testing.assert_allclose(other, found[0], rtol=0, atol=2e-6)

    run_ranks(size, main)


@pytest.mark.parametrize(
    ("makes", "text"),
    [
        ((lambda: lars(ratio=0.1), lambda: lars(ratio=0.2)), r"ranks differ: .*LarsWrapper.*ratio=0\.1"),
        ((lambda: recipe(2), lambda: recipe(3)), "ranks differ: .*BatchGradients.*num_batches=2"),
        ((lambda: lars(0.1), lambda: lars(0.2)), r"ranks differ: .*SGD's lr=0\.1"),
    ],
)
def test_ranks_that_wrap_differently_are_refused(makes, text):
    def main(comm):
        opt, w = DistOpt(makes[comm.rank](), comm), Parameter("w", np.ones(3))
        with pytest.raises(ValueError, match=text):
            opt([(w, np.ones(3))])
        assert (w.data == 1).all()

    run_ranks(2, main)


def test_a_checkpoint_in_the_middle_of_an_accumulation_window_resumes_to_the_same_bits(tmp_path):
    def main(comm):
        params, opt = laws.train(comm, make=lambda: recipe(3), steps=7)
        unbroken = laws.digest(params)
        params, opt = laws.train(comm, make=lambda: recipe(3), steps=4)
        opt.save(tmp_path, params)
        params, opt = laws.train(comm, make=lambda: recipe(3), steps=0)
        opt.load(tmp_path, params)
        assert opt.opt.batches == 1
        params, opt = laws.train(comm, 3, 4, params, opt)
        assert laws.digest(params) == unbroken

    run_ranks(2, main)


def test_flush_applies_a_partial_accumulation_window_at_the_end_of_an_epoch():
    def main(comm):
        w = Parameter("w", np.zeros(2))
        inside = BatchGradients(SGD(1.0), 4)
        opt = DistOpt(inside, comm)
        for k in range(3):
            opt([(w, np.full(2, k + comm.rank, float))])
        assert inside.flush() is True
        return w.data.tolist()

    assert run_ranks(2, main) == [[-1.5] * 2] * 2


def test_norms_of_single_parameters_use_the_kernels_of_buckets(monkeypatch):
    """Two calls of each for the two norms of one parameter, whatever its size, and none for one that is left out."""
    calls = []
    for name in ("partial_squares", "fold_partials"):
        kernel = kernels.KERNELS[name]
        monkeypatch.setattr(kernels, name, lambda *a, kernel=kernel, name=name: (calls.append(name), kernel(*a)))
    opt = lars()
    for name, size in (("w", 1), ("v", 100_000), ("fc.bias", 10)):
        opt.apply(name, np.ones(size, np.float32), np.ones(size, np.float32))
    assert calls == ["partial_squares", "fold_partials"] * 4


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (
            lambda s: s["opt"]["opt"]["moments"].update(w=np.zeros(7)),
            r"state moments of w must be shaped .*, got \(7,\)",
        ),
        (lambda s: s["sums"].update(w=np.zeros(7)), r"w: gradients of the open window must be \(7,\) float64"),
    ],
)
def test_states_that_do_not_fit_are_refused_by_all_ranks_before_anything_moves(spoil, text):
    def main(comm):
        w, opt = Parameter("w", np.ones(3)), BatchGradients(lars(), 2)
        for _ in range(3):
            opt([(w, np.ones(3))])
        states = opt.get_states()
        if comm.rank:
            spoil(states)
        again, w = BatchGradients(lars(), 2), Parameter("w", np.ones(3))
        again.set_states(states)
        with pytest.raises(ValueError, match="rank 1: " + text):
            DistOpt(again, comm)([(w, np.ones(3))])
        return again.get_states()["batches"], w.data.tolist()

    assert run_ranks(2, main) == [(1, [1.0] * 3)] * 2


def test_ranks_agree_on_what_a_predicate_leaves_out():
    def main(comm):
        w = Parameter("w", np.ones(3))
        opt = LarsWrapper(SGD(0.1), exclude=lambda name: comm.rank == 1)
        with pytest.raises(ValueError, match=r"rank 1 has optimizer LarsWrapper.*left_out=\('w',\)"):
            DistOpt(opt, comm)([(w, np.ones(3))])
        return w.data.tolist()

    assert run_ranks(2, main) == [[1.0] * 3] * 2
