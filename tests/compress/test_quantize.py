"""Codes of one bit and two: the layout of a payload, its values, and the residual.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import laws
import reference
from distopt import DistOpt, Parameter, run_ranks
from distopt.compress import BucketContext, DeviceContext, ErrorFeedback, ExchangeContext, OneBit, Threshold, TwoBit
from distopt.kernels.layout import CHUNK, BucketLayout
from distopt.optim import SGD
from laws import texts_of

REALS = ["float32", "float64"]
SIZES = st.lists(st.one_of(st.integers(0, 40), st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 5])), min_size=1, max_size=6)
SEEDS = st.integers(0, 2**32 - 1)
VALUES = [0.0, -0.0, 0.5, -0.5, 0.49, -0.49, 0.3, 1e-30, 7.0, -7.0, 1e20]


def bucket(sizes, dtype):
    """A table of members as a plan lays them out, at multiples of 64 bytes."""
    step = 64 // np.dtype(dtype).itemsize
    room = np.array([-(-n // step) * step for n in sizes])
    return BucketLayout([f"p{k}" for k in range(len(sizes))], [(n,) for n in sizes], np.cumsum(room) - room, dtype)


def filled(members, seed, few=False):
    """A flat array with gaps of zeros."""
    rng, x = np.random.default_rng(seed), np.zeros(members.extent, members.dtype)
    for row in range(len(members.names)):
        view = members.view(x, row)
        view[...] = rng.choice(VALUES, view.shape) if few else rng.standard_normal(view.shape)
    return x


def inside(members):
    """Which positions are members'."""
    found = np.zeros(members.extent, bool)
    for row in range(len(members.names)):
        members.view(found, row)[...] = True
    return found


def in_words(bits):
    """0 and 1 as bytes, the first one in the highest bit, in whole words of 32 bits."""
    return np.packbits(np.concatenate([bits, np.zeros(-bits.size % 32, bits.dtype)]).astype(np.uint8))


def two_bits(x, tau):
    """The payload, and what it stands for."""
    tau = x.dtype.type(tau)
    up, down = x >= tau, x <= -tau
    return in_words(np.stack([up | down, up], 1).ravel()), np.where(up, tau, np.where(down, -tau, 0)).astype(x.dtype)


def one_bit(x, theta, s, here):
    """The bits, and what they stand for."""
    above = (x > x.dtype.type(theta)) & here
    return in_words(above), np.where(here, np.where(above, s, -s), 0).astype(x.dtype)


def mean_in_order(x, members):
    """The mean magnitude in the order that native/ has."""
    arrays = [abs(members.view(x, row).astype(np.float64)) for row in range(len(members.names))]
    total = reference.sum_in_turn([s for a in arrays for s in reference.sums_of_chunks(a)], 256)
    return np.float32(total / max(1, members.records["size"].sum()))


def test_one_and_two_bit_codes_have_the_worked_bytes():
    """MXNet's: the codes 11 10 00 11 are one byte."""
    x = np.array([0.5, -0.75, 0.25, 2.0], np.float32)
    payload = TwoBit(0.5).compress(x, {}, ExchangeContext())
    assert payload.tolist() == [0b11100011, 0, 0, 0]
    assert x.tolist() == [0, -0.25, 0.25, 1.5]
    x = np.array([3, -1, 0, 2, -2, 1, 1, 1, 5], np.float32)
    assert OneBit(scale="unit").compress(x, {}, ExchangeContext()).tolist() == [0b10010111, 0b10000000, 0, 0]
    assert x.tolist() == [2, 0, 1, 1, -1, 0, 0, 0, 4]
    payload = OneBit().compress(np.array([3, -1, 0, 2], np.float32), {}, ExchangeContext())
    assert (payload[:4].view(np.float32)[0], payload[4:].tolist()) == (1.5, [0b10010000, 0, 0, 0])


@given(sizes=SIZES, tau=st.sampled_from([0.5, 0.3, 1e-30, 3.0]), dtype=st.sampled_from(REALS), seed=SEEDS)
def test_two_bit_codes_of_a_bucket_equal_the_reference(sizes, tau, dtype, seed):
    """Every element at its own place, zeros in gaps and after the end; x keeps what is not sent, to the bit."""
    members, compressor = bucket(sizes, dtype), TwoBit(tau)
    x = filled(members, seed, few=bool(seed % 2))
    expected, sent = two_bits(x, tau)
    rest = x - sent
    payload = compressor.compress(x, {}, ExchangeContext(bucket=BucketContext(members)))
    np.testing.assert_array_equal(payload, expected)
    assert payload.nbytes == compressor.payload_bytes(x.size) == 4 * -(-x.size // 16)
    np.testing.assert_array_equal(x, rest)
    out = np.full_like(x, 2)
    compressor.decompress(payload, out, ExchangeContext(bucket=BucketContext(members)))
    np.testing.assert_array_equal(out, sent + 2)


@given(
    sizes=SIZES,
    theta=st.sampled_from([0.0, 0.5, -0.5]),
    scale=st.sampled_from(["mean", "unit"]),
    dtype=st.sampled_from(REALS),
    seed=SEEDS,
)
@example([40, 7, CHUNK + 5, 11, 13, 17], 0.0, "mean", "float64", 2)  # seven chunks
def test_one_bit_codes_of_a_bucket_equal_the_reference(sizes, theta, scale, dtype, seed):
    """Gaps have no bits and get no values, though zero lies above a threshold below it."""
    members, compressor = bucket(sizes, dtype), OneBit(theta, scale)
    x = filled(members, seed, few=bool(seed % 2))
    s, header = (mean_in_order(x, members), 4) if scale == "mean" else (np.float32(1), 0)
    expected, sent = one_bit(x, theta, s, inside(members))
    rest = x - sent
    payload = compressor.compress(x, {}, ExchangeContext(bucket=BucketContext(members)))
    assert payload[:header].tobytes() == s.tobytes()[:header]
    np.testing.assert_array_equal(payload[header:], expected)
    assert payload.nbytes == compressor.payload_bytes(x.size) == 4 * -(-x.size // 32) + header
    np.testing.assert_array_equal(x, rest)
    out = np.full_like(x, 2)
    compressor.decompress(payload, out, ExchangeContext(bucket=BucketContext(members)))
    np.testing.assert_array_equal(out, sent + 2)


COMPRESSORS = [TwoBit(0.3), OneBit(), OneBit(-0.2), OneBit(0.1, scale="unit")]


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@given(sizes=SIZES, dtype=st.sampled_from(REALS), seed=SEEDS)
def test_the_residual_is_added_in_the_same_pass(compressor, sizes, dtype, seed):
    context = ExchangeContext(bucket=BucketContext(bucket(sizes, dtype)))
    residual, gradient = filled(context.layout, seed), filled(context.layout, seed + 1)
    total = residual + gradient
    given_apart = compressor.compress(total, {}, context)
    state, before = {"residual": residual}, gradient.copy()
    payload = ErrorFeedback(compressor).compress(gradient, state, context)
    np.testing.assert_array_equal(payload, given_apart)
    np.testing.assert_array_equal(state["residual"], total)
    np.testing.assert_array_equal(gradient, before)
    assert not state["residual"][~inside(context.layout)].any()


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@given(sizes=SIZES, ranks=st.integers(0, 5), dtype=st.sampled_from(REALS), seed=SEEDS)
def test_decompressing_all_payloads_equals_decompressing_one_by_one(compressor, sizes, ranks, dtype, seed):
    context = ExchangeContext(bucket=BucketContext(bucket(sizes, dtype)))
    payloads = [compressor.compress(filled(context.layout, [seed, r]), {}, context) for r in range(ranks)]
    here = inside(context.layout)
    out, one_by_one = np.where(here, 9, 0).astype(dtype), np.zeros(context.layout.extent, dtype)
    ErrorFeedback(compressor).decompress_all(payloads, out, context)
    for payload in payloads:
        compressor.decompress(payload, one_by_one, context)
    np.testing.assert_array_equal(out.view(np.uint8), one_by_one.view(np.uint8))
    assert not out[~here].any()


@pytest.mark.parametrize("dtype", REALS)
def test_ranks_are_added_in_their_order(dtype):
    """Rounding tells: what is small goes under in what is large."""
    out, large = np.zeros(5, dtype), 2.0**70
    for values, total in (((large, 1, -large), 0), ((large, -large, 1), 1)):
        payloads = [OneBit().compress(np.full(5, v, dtype), {}, ExchangeContext()) for v in values]
        OneBit().decompress_all(payloads, out, ExchangeContext())
        assert out.tolist() == [total] * 5


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@pytest.mark.parametrize("n", [0, 1, 70])
def test_buckets_of_zeros_or_of_nothing_lose_nothing(compressor, n):
    """A bucket of empty tensors, or of zeros: a mean of 0 stands for 0."""
    for members in (None, bucket([0, n, 0], "float32")):
        x = np.zeros(members.extent if members else n, np.float32)
        context, out = ExchangeContext(bucket=BucketContext(members)), np.zeros_like(x)
        payload = compressor.compress(x, {}, context)
        assert payload.nbytes == compressor.payload_bytes(x.size)
        compressor.decompress_all([payload, payload], out, context)
        assert not (x + out / 2).any()
        if repr(compressor) in ("TwoBit(0.3)", "OneBit(0.0, scale='mean')"):
            assert not out.any()


def test_the_scale_is_a_float32_and_its_rounding_stays_in_the_residual():
    """s is a float32, and what that rounds off stays behind; beyond float32 it is the largest one."""
    x = np.array([1 / 3, -1 / 3, 1 / 3])
    payload, out = OneBit().compress(x, {}, ExchangeContext()), np.zeros(3)
    s = float(np.float32(1 / 3))
    assert payload[:4].view(np.float32)[0] == np.float32(1 / 3)
    assert x.tolist() == [1 / 3 - s, s - 1 / 3, 1 / 3 - s]
    OneBit().decompress(payload, out, ExchangeContext())
    assert out.tolist() == [s, -s, s]
    largest = float(np.finfo(np.float32).max)
    x = np.array([1e300, -1e300, 1e308] + [1e308] * 13)
    before = x.copy()
    payload = OneBit().compress(x, {}, ExchangeContext())
    assert payload[:4].view(np.float32)[0] == largest
    np.testing.assert_array_equal(x, before - np.copysign(largest, before))


def test_scratch_memory_may_hold_anything():
    """Such as what another compressor has left there."""
    context = ExchangeContext(bucket=BucketContext(bucket([3, 70, 1], "float32")))
    used = context._replace(
        bucket=context.bucket._replace(scratch=lambda name, nbytes: np.full(nbytes, 0xA5, np.uint8))
    )
    for compressor in COMPRESSORS:
        x = filled(context.layout, 0)
        expected = compressor.compress(x.copy(), {}, context)
        np.testing.assert_array_equal(compressor.compress(x, {}, used), expected)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_a_refused_step_changes_nothing(compressor):
    """The payload is zeros, which add nothing."""
    refused = DeviceContext(skip_flag=np.ones(1, np.int64))
    context = ExchangeContext(bucket=BucketContext(bucket([3, 70, CHUNK + 1], "float32")), device=refused)
    residual, gradient = filled(context.layout, 0), filled(context.layout, 1)
    state = {"residual": residual.copy()}
    payload = ErrorFeedback(compressor).compress(gradient, state, context)
    assert not payload.any()
    np.testing.assert_array_equal(state["residual"], residual)


# ----------------------------------------------------------------------------------------------- in DistOpt


def step_of(gradient):
    """A parameter, and a call that makes a step with its gradient."""
    p = Parameter("p", np.zeros(np.shape(gradient), np.float32))
    return p, [(p, np.array(gradient, np.float32))]


def test_a_gradient_that_stays_above_the_threshold_makes_the_residual_drift():
    """One quantum a step, and no more; who watches the residual sees it."""

    def main(comm):
        p, opt = Parameter("p", np.zeros(3, np.float32)), DistOpt(SGD(1.0), comm)
        found = []
        for _ in range(8):
            opt.step([(p, np.array([2.0, -0.75, 0.25], np.float32))], ErrorFeedback(TwoBit(0.5)))
            found.append(opt.state_dict()["states"]["residual"]["p"].tolist())
        assert found == [[1.5 * k, -0.25 * k, 0.25 * (k % 2)] for k in range(1, 9)]
        assert p.data.tolist() == [-4, 4, -2]

    run_ranks(2, main)


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("mode", ["2bit", "1bit"])
def test_gaps_between_members_stay_zero(mode, dtype):
    def main(comm):
        _, opt = laws.train(comm, mode=mode, dtype=dtype)
        for buffer in opt.engine.store.buckets:
            outside = ~inside(buffer.gradients)
            assert outside.any() or len(buffer.spec.names) == 1
            assert not buffer.gradient[outside].any()
            assert not buffer.state["residual"][outside].any()

    run_ranks(2, main)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("compressor", [TwoBit(0.5), OneBit()], ids=repr)
def test_bad_numbers_under_each_policy(compressor, value):
    """T9: a refused step leaves residuals as they were; under 'propagate' the bad number is seen, and not kept."""

    def main(comm, nonfinite):
        p, good = step_of([1, 0.5, 0.25, 0.1])
        opt = DistOpt(SGD(1.0), comm, nonfinite=nonfinite)
        feedback = ErrorFeedback(compressor)
        opt.step(good, feedback)
        before, w = opt.state_dict()["states"]["residual"]["p"].copy(), p.data.copy()
        bad = [(p, np.array([1, value if comm.rank else 1, 1, 1], np.float32))]
        if nonfinite == "raise":
            with pytest.raises(FloatingPointError, match=r"rank 1: p \(1 of 4 entries\)"):
                opt.step(bad, feedback)
        else:
            assert opt.step(bad, feedback) is (nonfinite == "propagate")
        residual = opt.state_dict()["states"]["residual"]["p"]
        if nonfinite == "propagate":
            assert not np.isfinite(p.data[1])
            assert np.isfinite(residual).all()
        else:
            np.testing.assert_array_equal(residual, before)
            np.testing.assert_array_equal(p.data, w)
            assert opt.step(good, feedback)
            assert np.isfinite(p.data).all()

    for nonfinite in ("raise", "skip", "propagate"):
        run_ranks(2, lambda comm, policy=nonfinite: main(comm, policy))


def test_one_bit_of_unit_scale_cannot_tell_what_is_not_finite_but_forgets_it():
    x = np.array([np.nan, np.inf, -np.inf, 2], np.float32)
    payload = OneBit(scale="unit").compress(x, {}, ExchangeContext())
    assert (payload[0], x.tolist()) == (0b01010000, [0, 0, 0, 1])


def test_the_plan_has_the_payload_of_codes():
    """Gaps have their places: 3 elements and 5 take 16 and 5."""
    params = [Parameter(name, np.zeros(n, np.float32)) for name, n in (("a", 3), ("b", 5))]
    opt = DistOpt(SGD(1.0))
    for compressor, payload in (
        (ErrorFeedback(TwoBit()), 8),
        (ErrorFeedback(OneBit()), 8),
        (OneBit(scale="unit"), 4),
    ):
        opt.step([(p, np.ones_like(p.data)) for p in params], compressor)
        assert opt.plan.payload == (payload,)


def test_many_ranks_are_dense_where_that_is_less():
    """From 32 ranks on two bits of each are more than one sum of 32."""

    def main(comm):
        p, loss = step_of(np.linspace(-2, 2, 100) + comm.rank)
        opt = DistOpt(SGD(1.0), comm, broadcast=False, deterministic=True)
        opt.step(loss, ErrorFeedback(TwoBit(0.5)), break_even=comm.size > 32)
        return p.data

    for size in (4, 33):
        found, levels = run_ranks(size, main), np.zeros(100)
        for rank in range(size):
            levels += two_bits((np.linspace(-2, 2, 100) + rank).astype(np.float32), 0.5)[1]
        for w in found:
            np.testing.assert_allclose(w, -levels / size, rtol=1e-6)


@pytest.mark.parametrize(
    "compressor", [TwoBit(3e38), OneBit(1e308), OneBit(-1e308, "unit"), Threshold(1e308)], ids=repr
)
@pytest.mark.parametrize("exchange", ["gather", "two_phase", "nodes"])
def test_a_threshold_near_the_largest_number_has_sums_too(compressor, exchange):
    """The threshold of a sum stays a number; what no rank sends waits with each."""

    def main(comm):
        comm._hosts = [rank // 2 for rank in range(comm.size)]
        p, opt = Parameter("w", np.zeros(1000, np.float32)), DistOpt(SGD(1.0), comm)
        opt.step([(p, np.full(1000, comm.rank + 1.0, np.float32))], ErrorFeedback(compressor), False, exchange)
        kept = sum(arrays.get("w", 0) for arrays in opt.state_dict()["states"].values())
        return p.data.astype(float), np.broadcast_to(kept, 1000).astype(float)

    ranks = run_ranks(6, main)
    np.testing.assert_allclose(sum(kept for _, kept in ranks) - 6 * ranks[0][0], 21, rtol=1e-5)


def test_ranks_with_different_thresholds_are_refused():
    def main(comm):
        _, loss = step_of([1.0, 2.0])
        DistOpt(SGD(1.0), comm).step(loss, TwoBit(0.5 + comm.rank))

    text = texts_of(2, main, ValueError)
    assert text.startswith("ranks differ: rank 0 has a step with TwoBit(0.5), rank 1 has a step with TwoBit(1.5)")


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        *((lambda t=t: TwoBit(t), ValueError, "threshold must be positive and finite") for t in (0, -0.5, 1e-50, 1e39)),
        *((lambda t=t: TwoBit(t), ValueError, f"got {t}") for t in (np.nan, np.inf, -np.inf)),
        (lambda: TwoBit("0.5"), TypeError, "threshold must be a number, got '0.5'"),
        (lambda: TwoBit(True), TypeError, "threshold must be a number, got True"),
        (lambda: TwoBit(10**400), ValueError, "threshold must be a number that a float can hold"),
        *((lambda t=t: OneBit(t), ValueError, f"threshold must be finite, got {t}") for t in (np.nan, np.inf, -np.inf)),
        (lambda: OneBit(None), TypeError, "threshold must be a number, got None"),
        (lambda: OneBit(scale="max"), ValueError, "scale must be one of mean, unit, got 'max'"),
        (lambda: OneBit(scale=1.0), ValueError, "scale must be one of mean, unit, got 1.0"),
    ],
)
def test_wrong_arguments_of_one_and_two_bit_codes_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_gradients_and_payloads_of_another_size_or_dtype_are_refused(compressor):
    x = np.ones(40, np.float32)
    with pytest.raises(ValueError, match="a gradient must be of 40 elements, as its memory, got 4"):
        compressor.compress(x, {}, ExchangeContext(), add=np.ones(4, np.float32))
    payload = compressor.compress(x, {}, ExchangeContext())
    with pytest.raises(ValueError, match=rf"a payload of 400 elements must be of \d+ bytes, got {payload.nbytes}"):
        compressor.decompress(payload, np.zeros(400, np.float32), ExchangeContext())
    with pytest.raises(
        (TypeError, ValueError),
        match=r"must be of the others' size, got 40 elements|must be contiguous float32|must be of float32 or float64",
    ):
        compressor.compress(x.astype(np.float16), {}, ExchangeContext())
