"""Parameters of 16 bits: summed and updated in float32, with masters and without.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import ml_dtypes
import numpy as np
import pytest

import laws
import reference
import tiers
from distopt import DistOpt, Parameter, run_ranks
from distopt.compress import ErrorFeedback, Half, TopK
from distopt.optim import LAMB, LANS, LARS, LBSGD, SGD, AdaGrad, Adam, AdamW, BatchGradients, RMSProp
from launch import needs_mpi, run_mpi

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
RULES = {
    "sgd": lambda **options: SGD(0.01, **options),
    "momentum": lambda **options: SGD(0.01, momentum=0.9, weight_decay=0.01, **options),
    "nesterov": lambda **options: SGD(0.01, momentum=0.9, nesterov=True, **options),
    "rmsprop": lambda **options: RMSProp(0.001, **options),
    "adagrad": lambda **options: AdaGrad(0.01, **options),
    "adam": lambda **options: Adam(0.001, **options),
    "adamw": lambda **options: AdamW(0.001, weight_decay=0.1, **options),
    "lars": lambda **options: LARS(1.0, momentum=0.9, weight_decay=0.01, **options),
    "lamb": lambda **options: LAMB(0.01, weight_decay=0.01, **options),
    "lans": lambda **options: LANS(0.01, weight_decay=0.01, **options),
    "lbsgd": lambda **options: LBSGD(0.01, momentum=0.9, batch_scale=2, **options),
    "lbsgd lars": lambda **options: LBSGD(0.001, warmup_strategy="lars", **options),
}


def steps(dtype, count=50, size=5000):
    """A parameter and its gradients, of 16 bits."""
    rng = np.random.default_rng(0)
    return rng.standard_normal(size).astype(dtype), rng.standard_normal((count, size)).astype(dtype)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_a_master_is_the_float32_run(make, dtype):
    """To the bit: what a float32 parameter would be is the master, and the parameter is it rounded."""
    value, grads = steps(dtype)
    wide, narrow, alone = make(), make(multi_precision=True), value.astype(np.float32)
    for g in grads:
        narrow.apply("w", value, g)
        wide.apply("w", alone, g.astype(np.float32))
        for opt in (narrow, wide):
            opt.step()
        np.testing.assert_array_equal(value, alone.astype(dtype))
    np.testing.assert_array_equal(narrow.get_states()["master"]["w"], alone)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_without_a_master_each_update_is_a_float32_one(make, dtype):
    """Rounded once, at its end; states are float32."""
    value, grads = steps(dtype, 10)
    opt, wide = make(), make()
    for g in grads:
        alone = value.astype(np.float32)
        wide.apply("w", alone, g.astype(np.float32))
        opt.apply("w", value, g)
        for o in (opt, wide):
            o.step()
        np.testing.assert_array_equal(value, alone.astype(dtype))
    assert "master" not in opt.get_states()
    assert all(a.dtype == np.float32 for slot in opt.slots for a in opt.get_states()[slot].values())


def test_small_updates_add_up_in_a_master_only():
    """In float16, 1 - 1e-4 is 1."""
    for multi_precision, expected in ((False, 1.0), (True, 0.9)):
        value, opt = np.ones(3, np.float16), SGD(1e-4, multi_precision=multi_precision)
        for _ in range(1000):
            opt.apply("w", value, np.ones(3, np.float16))
            opt.step()
        np.testing.assert_allclose(value, expected, rtol=1e-3)


def test_epsilon_is_not_rounded_to_16_bits():
    """M11: MXNet casts it to float16, where 1e-8 is 0, and 0 / 0 is NaN."""
    for make in (Adam, RMSProp, AdaGrad, AdamW):
        value = np.ones(3, np.float16)
        make(0.1, epsilon=1e-8).apply("w", value, np.zeros(3, np.float16))
        np.testing.assert_array_equal(value, 1.0)


def test_norms_are_those_of_the_master():
    """M3, M5, M6b: MXNet takes them from the 16-bit copy, or never writes the master, or mixes masters up."""
    rng = np.random.default_rng(1)
    for make in (LAMB, LANS, LARS):
        opt = make(0.05, multi_precision=True, exclude=["b"])
        params = [Parameter(n, rng.standard_normal(300).astype(np.float16)) for n in ("a", "b", "c")]
        wide = {p.name: p.data.astype(np.float64) for p in params}
        state = {p.name: (0.0,) if make is LARS else (0.0, 0.0) for p in params}
        for k in range(50):
            grads = [rng.standard_normal(300).astype(np.float16) for _ in params]
            opt(zip(params, grads, strict=True))
            for p, g in zip(params, grads, strict=True):
                numbers = {"lr": 0.05, "excluded": p.name == "b"} | ({} if make is LARS else {"t": k + 1})
                rule = getattr(reference, make.__name__.lower())
                wide[p.name], *state[p.name] = rule(wide[p.name], *state[p.name], g.astype(np.float64), **numbers)
        for p in params:
            np.testing.assert_allclose(opt.get_states()["master"][p.name], wide[p.name], rtol=0, atol=2e-5)


def test_a_parameter_changed_by_the_user_changes_its_master():
    """A checkpoint loaded into the model, or a mean over ranks, is not overwritten by what the master was before."""
    value, opt = np.ones(4, np.float16), SGD(1e-4, multi_precision=True)
    grad = np.ones(4, np.float16)
    opt.apply("w", value, grad)
    value[1] = 5.0
    opt.apply("w", value, grad)
    expected = np.float32([1 - 2e-4, 5 - 1e-4, 1 - 2e-4, 1 - 2e-4])
    np.testing.assert_allclose(opt.get_states()["master"]["w"], expected, rtol=1e-6)


def test_nan_signed_zeros_and_extreme_16_bit_values_survive_in_the_master():
    """NaN, zeros of both signs, the smallest and the largest numbers are the master's as they are the parameter's."""
    for dtype in DTYPES.values():
        value = np.array([0.0, -0.0, 6e-8, np.nan, 60000.0], dtype)
        before, opt = value.copy(), SGD(1.0, multi_precision=True)
        opt.apply("w", value, np.zeros(5, dtype))
        np.testing.assert_array_equal(value.astype(np.float32), before.astype(np.float32))
        assert np.signbit(value[1])


def train(comm, dtype, multi_precision, steps=4, start=0, params=None, opt=None, mode="dense", **options):
    """As ``laws.train``, with parameters of several dtypes in one model."""
    if params is None:
        params = laws.parameters(rank=comm.rank)
        for k, p in enumerate(params):
            p.data = p.data.astype((dtype, np.float32, dtype, np.float64)[k % 4])
        laws.move_to_device(comm, params)
    if opt is None:
        make = laws.OPTIMIZERS["lamb"]() if mode == "dense" else laws.sgd()
        make = type(make)(0.05, multi_precision=multi_precision, weight_decay=1e-3)
        opt = DistOpt(make, comm, threshold=60, **options)
    for step in range(start, start + steps):
        laws.MODES[mode](opt, laws.pairs(comm, params, step))
    return params, opt


MODES = ("dense", "half", *laws.APART, "topk", "half with memory")


def narrow_laws(comm):
    """Same bits on every rank, resumed is never stopped, ranks are one rank on the whole batch."""
    for dtype in DTYPES.values():
        for multi_precision in (False, True):
            for mode in MODES:
                unbroken, opt = train(comm, dtype, multi_precision, 6, mode=mode)
                if mode not in laws.APART:
                    laws.same_on_all_ranks(comm, laws.digest(unbroken))
                params, opt = train(comm, dtype, multi_precision, 3, mode=mode)
                saved = opt.state_dict()
                again = train(comm, dtype, multi_precision, 0, mode=mode)[1]
                again.load_state_dict(saved)
                train(comm, dtype, multi_precision, 3, 3, params, again, mode=mode)
                assert laws.digest(params) == laws.digest(unbroken), (dtype, multi_precision, mode)
    return {"digest": np.array(laws.digest(train(comm, np.float16, True)[0]))}


@pytest.mark.thorough
@pytest.mark.parametrize("size", tiers.one_by_default(2, of=(1, 2, 3)))
def test_laws_hold_for_16_bit_parameters_on_threads(size):
    run_ranks(size, narrow_laws)


@needs_mpi
def test_laws_hold_for_16_bit_parameters_on_mpi(tmp_path):
    assert run_mpi(2, narrow_laws, tmp_path) == run_ranks(2, narrow_laws)


PARTIAL = {
    "sgd": lambda **options: SGD(2e-4, **options),
    "two batches": lambda **options: BatchGradients(SGD(4e-4, **options), 2),
    "lamb": lambda **options: LAMB(2e-4, **options),
}


def partial_masters(comm, make, dtype, share):
    """Partial steps, then dense ones: the masters, and what a float32 model becomes by the same gradients."""
    found = []
    for stored in (dtype, np.dtype(np.float32)):
        params = laws.move_to_device(comm, [Parameter(f"p{k}", np.ones(100, stored)) for k in range(3)])
        opt = DistOpt(make(multi_precision=True), comm, threshold=150)
        for step in range(8):
            rng = np.random.default_rng([step, comm.rank])
            grads = [rng.standard_normal(100).astype(dtype).astype(stored) for _ in params]
            pairs = zip(params, laws.to_device(comm, grads), strict=True)
            if step < 6:
                opt.backward_and_partial_update(pairs, share=share)
            else:
                opt(pairs)
        states = opt.state_dict()["optimizer"]
        masters = states.get("opt", states)["master"]
        found.append([np.asarray(masters.get(p.name, laws.device.host_copy(p.data))) for p in params])
        for p, master in zip(params, found[-1], strict=True):
            np.testing.assert_array_equal(laws.device.host_copy(p.data), master.astype(stored))
    return np.array(found)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("share", [None, 0.5])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("make", PARTIAL.values(), ids=PARTIAL)
def test_partial_steps_average_masters(share, make, dtype):
    """Means of 16-bit numbers would lose what masters are for; masters that nobody averages part the ranks for ever."""
    for narrow, wide in run_ranks(3, lambda comm: partial_masters(comm, make, dtype, share)):
        np.testing.assert_array_equal(narrow, wide)


def test_16_bit_gradients_are_summed_over_ranks_in_float32():
    """2048 + 1 is 2048 in float16; the mean of four ranks is not."""

    def main(comm):
        w = Parameter("w", np.zeros(3, np.float16))
        DistOpt(SGD(4.0), comm)([(w, np.full(3, 2048 if comm.rank == 0 else 1, np.float16))])
        return w.data.tolist()

    assert run_ranks(4, main) == [[-float(np.float16(2051))] * 3] * 4


def test_a_custom_optimizer_gets_float32_means_of_16_bit_gradients():
    class Stranger:
        def update(self, param, grad):
            assert grad.dtype == np.float32
            param.data -= grad.astype(param.data.dtype)

    def main(comm):
        w = Parameter("w", np.zeros(3, np.float16))
        DistOpt(Stranger(), comm)([(w, np.full(3, comm.rank, np.float16))])
        return w.data.tolist()

    assert run_ranks(2, main) == [[-0.5] * 3] * 2


def test_a_non_finite_16_bit_gradient_is_named_by_rank_and_parameter():
    def main(comm):
        w = Parameter("w", np.ones(20, np.float16))
        opt = DistOpt(SGD(1.0), comm)
        with pytest.raises(FloatingPointError, match=r"rank 1: w \(1 of 20 entries\)"):
            opt([(w, np.where(np.arange(20) == 7, np.inf * (comm.rank == 1) or 1.0, 1).astype(np.float16))])
        return w.data.sum()

    with np.errstate(invalid="ignore"):
        assert run_ranks(2, main) == [20, 20]


def test_missing_16_bit_gradients_count_as_zeros():
    def main(comm):
        params = [Parameter(n, np.ones(5, np.float16)) for n in "ab"]
        opt = DistOpt(SGD(1.0), comm, allow_missing=True)
        for _ in range(2):
            opt([(p, np.ones(5, np.float16) if k >= comm.rank else None) for k, p in enumerate(params)])
        return [p.data.tolist() for p in params]

    assert run_ranks(2, main) == [[[0.0] * 5, [-1.0] * 5]] * 2


def test_views_and_gradients_of_another_dtype_are_refused_for_16_bit_parameters():
    def main(comm):
        w = Parameter("w", np.ones(3, np.float16))
        opt = DistOpt(SGD(), comm)
        for views in (opt.gradient_views, opt.parameter_views):
            with pytest.raises(TypeError, match="w: views must be of float32 or float64 parameters"):
                views([w])
        opt([(w, np.ones(3, np.float16))])
        with pytest.raises(TypeError, match="the gradient must be of the parameter's dtype float16"):
            opt([(w, np.ones(3, np.float32))])

    run_ranks(2, main)
    with pytest.raises(TypeError, match="multi_precision must be True or False, got 1"):
        SGD(multi_precision=1)


def test_every_compressor_works_with_16_bit_parameters():
    """Buckets of 16-bit parameters are float32 buckets to all of them."""

    def main(comm):
        w = Parameter("w", np.zeros(1000, np.float16))
        opt = DistOpt(SGD(1.0), comm)
        for compressor in (Half(), ErrorFeedback(Half("bfloat16")), ErrorFeedback(TopK(0.01))):
            opt.step([(w, np.linspace(-1, 1, 1000).astype(np.float16))], compressor)
        assert opt.state_dict()["states"]["residual"]["w"].dtype == np.float32
        return laws.digest([w])

    assert len(set(run_ranks(3, main))) == 1
