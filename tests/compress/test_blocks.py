"""Blocks of integers beside a scale: the layout of a payload, its values, and the residual.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import laws
from distopt import DistOpt, LocalSteps, Parameter, kernels, run_ranks, simulate
from distopt.compress import BucketContext, DeviceContext, ErrorFeedback, ExchangeContext, Int4, Int8
from distopt.exchange.sharding import cut
from distopt.kernels.layout import CHUNK, BucketLayout
from distopt.optim import SGD

REALS = ["float32", "float64"]
BLOCKS = st.sampled_from([32, 64, 128, 256, 1024, CHUNK])
SIZES = st.lists(
    st.one_of(st.integers(0, 70), st.sampled_from([255, 256, 257, CHUNK - 1, CHUNK, CHUNK + 5, 2 * CHUNK])),
    min_size=1,
    max_size=6,
)
SEEDS = st.integers(0, 2**32 - 1)
KINDS = {"int8": Int8, "int4": Int4}
LEVELS = {8: 127, 4: 7}
ROOM = {8: 127 + 63 / 128, 4: 7.0}
LEAST = 2.0**-126
MOST = {bits: float(np.finfo(np.float32).max) / levels for bits, levels in LEVELS.items()}
VALUES = [0.0, -0.0, 1e-30, 1e-38, 1e-45, 7.0, -7.0, 127.0, 63.5, -0.5, 1e20, 3.4e38]
EVERY = hnp.arrays(np.float32, st.integers(0, 300), elements=st.floats(allow_nan=False, allow_infinity=False, width=32))


def bucket(sizes, dtype):
    """A table of members as a plan lays them out, at multiples of 64 bytes."""
    step = 64 // np.dtype(dtype).itemsize
    room = np.array([-(-n // step) * step for n in sizes])
    return BucketLayout([f"p{k}" for k in range(len(sizes))], [(n,) for n in sizes], np.cumsum(room) - room, dtype)


def filled(members, seed, few=False):
    """A flat array with gaps of zeros, whose members have different magnitudes."""
    rng, x = np.random.default_rng(seed), np.zeros(members.extent, members.dtype)
    for row in range(len(members.names)):
        view = members.view(x, row)
        view[...] = rng.choice(VALUES, view.shape) if few else rng.standard_normal(view.shape) * 10.0 ** (row - 3)
    return x


def inside(members):
    """Which positions are members'."""
    found = np.zeros(members.extent, bool)
    for row in range(len(members.names)):
        members.view(found, row)[...] = True
    return found


def rounded_up(x, bits):
    """The least normal bfloat16 of at least x, in numbers: eight bits of a significand; no more than the largest."""
    significand, exponent = math.frexp(x)
    if exponent > 200:
        return math.ldexp(math.floor(math.ldexp(math.frexp(MOST[bits])[0], 8)), math.frexp(MOST[bits])[1] - 8)
    up = math.ldexp(math.ceil(math.ldexp(significand, 8)), exponent - 8)
    largest, place = math.frexp(MOST[bits])
    return min(max(up, LEAST), math.ldexp(math.floor(math.ldexp(largest, 8)), place - 8))


def one_block(x, bits):
    """The scale, the codes, and what they stand for, of one block, in the dtype of x."""
    largest = float(np.abs(x).max())
    if not np.isfinite(x).all():
        return math.nan, np.zeros(x.size, int), np.full_like(x, np.nan)
    if largest <= LEAST / 2:
        return 0.0, np.zeros(x.size, int), np.zeros_like(x)
    scale = rounded_up(float(np.float32(x.dtype.type(largest) / x.dtype.type(ROOM[bits]))), bits)
    codes = np.clip(np.rint(x / x.dtype.type(scale)), -LEVELS[bits], LEVELS[bits])
    return scale, codes.astype(int), (codes * scale).astype(x.dtype)


def in_words(data):
    """Bytes, filled up with zeros to words of four."""
    return data + b"\0" * (-len(data) % 4)


def expected(x, members, bits, block):
    """The payload, and what it stands for."""
    payload, sent = b"", np.zeros_like(x)
    for row in range(len(members.names)):
        view, to = members.view(x, row), members.view(sent, row)
        parts = [one_block(view[k : k + block], bits) for k in range(0, view.size, block)]
        for k, (_, _, values) in enumerate(parts):
            to[k * block : (k + 1) * block] = values
        codes = np.concatenate([codes for _, codes, _ in parts] + [np.zeros(0, int)])
        if bits == 4:
            codes = np.concatenate([codes, np.zeros(codes.size % 2, int)]) & 15
            codes = codes[0::2] | codes[1::2] << 4
        scales = np.array([scale for scale, _, _ in parts]).astype(ml_dtypes.bfloat16)
        payload += in_words(codes.astype(np.uint8).tobytes()) + in_words(scales.tobytes())
    return np.frombuffer(payload, np.uint8), sent


def context_of(members, **options):
    return ExchangeContext(bucket=BucketContext(members), **options)


def decoded(compressor, payload, n, dtype, context=None):
    out = np.full(n, 9, dtype)
    compressor.decompress_all([payload], out, context or ExchangeContext())
    return out


# ------------------------------------------------------------------------------------------ payloads


def test_codes_and_scales_have_the_worked_bytes():
    """A scale of 1 is 0x3f80, of 2 is 0x4000; four codes of 4 bits are two bytes."""
    x = np.array([127, -63.75, 0.25, 1.5, 2.5], np.float32)
    payload = Int8().compress(x, {}, ExchangeContext())
    assert payload.tolist() == [127, 192, 0, 2, 2, 0, 0, 0, 0x80, 0x3F, 0, 0]
    assert x.tolist() == [0, 0.25, 0.25, -0.5, 0.5]
    x = np.array([14, -6.5, 0.5, 3, *[0] * 124, 7], np.float32)
    payload = Int4(block=128).compress(x, {}, ExchangeContext())
    assert payload[:3].tolist() == [0xD7, 0x20, 0]
    assert payload[64:].tolist() == [7, 0, 0, 0, 0x00, 0x40, 0x80, 0x3F]
    assert x[:4].tolist() == [0, -0.5, 0.5, -1]


@pytest.mark.parametrize("kind", KINDS)
@given(sizes=SIZES, block=BLOCKS, dtype=st.sampled_from(REALS), seed=SEEDS)
def test_a_payload_equals_the_reference(kind, sizes, block, dtype, seed):
    """Bytes, the rest to the bit, and sums on top of what is there; gaps stay as they are."""
    members, compressor = bucket(sizes, dtype), KINDS[kind](block)
    x, context = filled(members, seed, few=bool(seed % 2)), context_of(members)
    payload, sent = expected(x, members, compressor.bits, block)
    rest = x - sent
    found = compressor.compress(x, {}, context)
    np.testing.assert_array_equal(found, payload)
    assert found.nbytes == compressor.payload_bytes(x.size, x.itemsize, members)
    np.testing.assert_array_equal(x, rest)
    out = np.full_like(x, 2)
    compressor.decompress(found, out, context)
    np.testing.assert_array_equal(out, np.where(inside(members), sent + 2, 2).astype(dtype))


@pytest.mark.parametrize("kind", KINDS)
@given(sizes=SIZES, block=BLOCKS)
def test_a_payload_has_the_bits_of_its_codes_and_16_for_a_block(kind, sizes, block):
    """But for what fills up words: less than 4 bytes of codes, and 2 of scales, of each tensor."""
    compressor, members = KINDS[kind](block), bucket(sizes, "float32")
    bits = sum(n * compressor.bits + 16 * -(-n // block) for n in sizes)
    assert 0 <= 8 * compressor.payload_bytes(members.extent, 4, members) - bits < 8 * 6 * len(sizes)
    assert KINDS[kind]().payload_bytes(2**20) * 8 == 2**20 * {"int8": 8.0625, "int4": 4.125}[kind]


@pytest.mark.parametrize("kind", KINDS)
@given(sizes=SIZES, dtype=st.sampled_from(REALS), rounding=st.sampled_from(["nearest", "stochastic"]), seed=SEEDS)
def test_the_gradient_is_added_to_the_residual_in_the_same_pass(kind, sizes, dtype, rounding, seed):
    context, compressor = context_of(bucket(sizes, dtype)), KINDS[kind](rounding=rounding)
    residual, gradient = filled(context.layout, seed), filled(context.layout, seed + 1)
    total = residual + gradient
    given_apart = compressor.compress(total, {}, context)
    state, before = {"residual": residual}, gradient.copy()
    payload = ErrorFeedback(compressor).compress(gradient, state, context)
    np.testing.assert_array_equal(payload, given_apart)
    np.testing.assert_array_equal(state["residual"], total)
    np.testing.assert_array_equal(gradient, before)


@pytest.mark.parametrize("kind", KINDS)
@given(sizes=SIZES, ranks=st.integers(0, 5), dtype=st.sampled_from(REALS), seed=SEEDS)
def test_all_payloads_at_once_are_their_sum_in_order(kind, sizes, ranks, dtype, seed):
    context, compressor = context_of(bucket(sizes, dtype)), KINDS[kind]()
    payloads = [compressor.compress(filled(context.layout, [seed, r]), {}, context) for r in range(ranks)]
    here = inside(context.layout)
    out, one_by_one = np.where(here, 9, 0).astype(dtype), np.zeros(context.layout.extent, dtype)
    ErrorFeedback(compressor).decompress_all(payloads, out, context)
    for payload in payloads:
        compressor.decompress(payload, one_by_one, context)
    assert out.tobytes() == one_by_one.tobytes()


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_are_added_in_their_order(kind, dtype):
    """Rounding tells: what is small goes under in what is large."""
    compressor, small = KINDS[kind](), LEVELS[KINDS[kind].bits]
    large = 2.0**70 * small
    for values, total in (((large, small, -large), 0), ((large, -large, small), small)):
        payloads = [compressor.compress(np.full(5, v, dtype), {}, ExchangeContext()) for v in values]
        out = np.zeros(5, dtype)
        compressor.decompress_all(payloads, out, ExchangeContext())
        assert out.tolist() == [total] * 5


# ------------------------------------------------------------------------------------------ what is sent


@pytest.mark.parametrize("kind", KINDS)
@given(x=EVERY, block=BLOCKS)
@example(x=np.full(3, 127 * 2.0**-3, np.float32), block=32)
@example(x=np.full(3, np.finfo(np.float32).max), block=32)
@example(x=np.full(3, np.float32(2.0**-127)), block=32)
def test_what_was_decoded_is_coded_alike(kind, x, block):
    """Over the whole range of float32: the same bytes, and nothing stays behind."""
    compressor = KINDS[kind](block)
    payload = compressor.compress(x, {}, ExchangeContext())
    again = decoded(compressor, payload, x.size, np.float32)
    assert np.isfinite(again).all()
    np.testing.assert_array_equal(compressor.compress(again, {}, ExchangeContext()), payload)
    assert not again.any()


@pytest.mark.parametrize("kind", KINDS)
def test_every_scale_has_the_same_scale_when_decoded(kind):
    """All significands and exponents, at the border of what they are the scale of and on both sides of it."""
    compressor = KINDS[kind](32)
    levels, room = LEVELS[compressor.bits], ROOM[compressor.bits]
    scales = np.arange(0x80, 0x7C00 if compressor.bits == 8 else 0x7E00).astype(np.uint16).view(ml_dtypes.bfloat16)
    edges = scales.astype(np.float64) * room
    for x in (edges, edges * (1 - 2.0**-20), edges * (1 + 2.0**-20)):
        blocks = np.zeros((x.size, 32), np.float32)
        blocks[:, 3] = x
        x = blocks.reshape(-1)
        payload = compressor.compress(x.copy(), {}, ExchangeContext())
        once = decoded(compressor, payload, x.size, np.float32)
        np.testing.assert_array_equal(compressor.compress(once.copy(), {}, ExchangeContext()), payload)
        found = payload[x.size * compressor.bits // 8 :].view(ml_dtypes.bfloat16)[: len(scales)].astype(np.float64)
        codes = once.reshape(blocks.shape)[:, 3] / found
        assert (codes == levels)[found > LEAST].all()


@pytest.mark.parametrize("kind", KINDS)
@given(x=EVERY, dtype=st.sampled_from(REALS))
def test_an_element_moves_by_half_a_scale_at_most(kind, x, dtype):
    """Half of the block's largest element over 126.5, or over 6.9."""
    compressor = KINDS[kind](32)
    for begin in range(0, x.size, 32):
        part = x[begin : begin + 32].astype(dtype)
        payload = compressor.compress(part.copy(), {}, ExchangeContext())
        scale = payload[-4:].view(ml_dtypes.bfloat16)[0].astype(np.float64)
        error = abs(decoded(compressor, payload, part.size, dtype).astype(np.float64) - part)
        largest = float(abs(part).max())
        assert error.max() <= max(scale, LEAST) / 2
        assert scale <= max(LEAST, largest / {8: 126.5, 4: 6.9}[compressor.bits])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@given(x=EVERY, block=BLOCKS)
def test_what_is_sent_and_what_stays_add_up_over_the_whole_range(kind, rounding, x, block):
    """Law 1: to the bit; within an ulp where rounding is stochastic, as an element may be less than half a step."""
    laws.conservation(KINDS[kind](block, rounding), x, ulps=rounding == "stochastic")


@pytest.mark.parametrize("kind", KINDS)
def test_a_double_beyond_the_largest_scale_stays_behind(kind):
    x = np.array([1e300, -1e39, 1e30, 0])
    compressor, before = KINDS[kind](), x.copy()
    payload = compressor.compress(x, {}, ExchangeContext())
    sent = decoded(compressor, payload, 4, np.float64)
    largest = LEVELS[compressor.bits] * rounded_up(1e300, compressor.bits)
    assert 2.0**127 < largest < 2.0**128
    assert sent.tolist() == [largest, -largest, 0, 0]
    np.testing.assert_array_equal(x, before - sent)


# ------------------------------------------------------------------------------------------ stochastic rounding


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_of_stochastic_rounding_is_the_element(kind, dtype):
    """Within five standard errors, which are at most half a step over the root of the number of draws."""
    compressor, draws = KINDS[kind](rounding="stochastic", seed=3), 300
    x = np.linspace(-1, 1, 101).astype(dtype)
    total, steps = np.zeros(101), set()
    for step in range(draws):
        payload = compressor.compress(x.copy(), {}, ExchangeContext(step=step))
        sent = decoded(compressor, payload, 101, dtype).astype(np.float64)
        assert (abs(sent - x) < 1.01 / LEVELS[compressor.bits]).all()
        total += sent
        steps.add(payload.tobytes())
    assert len(steps) == draws
    assert (abs(total / draws - x) <= 5 * 0.5 / LEVELS[compressor.bits] / math.sqrt(draws)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_random_numbers_are_a_function_of_seed_step_rank_and_position(kind):
    x = np.random.default_rng(0).standard_normal(3000).astype(np.float32)

    def draw(seed=0, **where):
        compressor = KINDS[kind](rounding="stochastic", seed=seed)
        return compressor.compress(x.copy(), {}, ExchangeContext(**where)).tobytes()

    others = [draw(), draw(1), draw(step=1), draw(rank=1), draw(rank=1, step=1), draw(2**63)]
    assert len(set(others)) == len(others)
    assert draw(step=1) == draw(step=1)
    up = decoded(KINDS[kind](), np.frombuffer(draw(), np.uint8), 3000, np.float32) > x
    assert 0.45 < up.mean() < 0.55
    alike = up[:-1] == up[1:]  # neighbours know nothing of each other
    assert 0.45 < alike.mean() < 0.55


@pytest.mark.parametrize("exchange", ["gather", "two_phase", "nodes"])
@pytest.mark.parametrize("compressor", [Int8(rounding="stochastic"), Int4(rounding="stochastic")], ids=repr)
def test_what_one_bucket_rounds_up_says_nothing_of_another_one(compressor, exchange):
    """Two equal tensors in buckets of their own: what each is off by is not what the other is off by."""
    gradient = np.random.default_rng(0).standard_normal(4096)

    def main(comm):
        comm._hosts = [rank // 2 for rank in range(comm.size)]
        params = [Parameter(f"p{k}", np.zeros(4096)) for k in range(2)]
        DistOpt(SGD(1.0), comm, threshold=0).step([(p, gradient) for p in params], compressor, False, exchange)
        return [p.data + gradient for p in params]

    one, other = run_ranks(4, main)[0]
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.1  # 1 before; the deviation of a chance is 0.016
    assert one.any()


def test_what_one_fragment_of_local_steps_rounds_up_says_nothing_of_another_one():
    gradient = np.random.default_rng(0).standard_normal(4096)

    def main(comm):
        params = [Parameter(f"p{k}", np.zeros(4096)) for k in range(2)]
        compressor = Int8(rounding="stochastic")
        opt = LocalSteps(SGD(1.0), comm, every=2, outer=SGD(1.0), compressor=compressor, fragments=2)
        for times in (1, 0):  # each fragment is sent after one of these steps, as far from where it began
            opt([(p, times * gradient) for p in params])
        return [p.data + gradient for p in params]

    one, other = run_ranks(2, main)[0]
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.1
    assert one.any()


def test_random_numbers_are_none_of_a_captured_step():
    """A replay would have the same ones every time (engine/capture.py)."""
    for kind in KINDS.values():
        assert ErrorFeedback(kind(rounding="stochastic")).changes_with_step
        assert not ErrorFeedback(kind()).changes_with_step


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", KINDS)
@given(sizes=SIZES, ranks=st.integers(1, 9), dtype=st.sampled_from(REALS), seed=SEEDS)
@pytest.mark.sampled(2)
def test_shards_have_the_codes_of_the_whole(kind, rounding, sizes, ranks, dtype, seed):
    """What pieces' payloads stand for is what the bucket's does, and what stays is the same."""
    members, compressor = bucket(sizes, dtype), KINDS[kind](64, rounding)
    context, codec = context_of(members, size=ranks, step=seed % 5), compressor.sharded()
    x = filled(members, seed)
    pieces = cut((members,), ranks, codec.traits.block).of_bucket[0]
    whole, cut_up, found = x.copy(), x.copy(), np.zeros_like(x)
    sent = decoded(compressor, compressor.compress(whole, {}, context), x.size, dtype, context)
    nothing = np.empty(0, np.int64)  # all elements are sent, so that no entries are counted
    selected = codec.select(cut_up, {}, context, pieces, nothing)
    payloads = codec.pack([selected], [nothing], [context], [pieces])[0]
    for piece, payload in zip(pieces, payloads, strict=True):
        assert payload.data.nbytes == codec.payload_bytes(0, piece, x.itemsize, summed=False)
        codec.add([payload], piece.of(found), piece, piece.context(context))
    here = inside(members)
    np.testing.assert_array_equal(found[here], sent[here])
    np.testing.assert_array_equal(cut_up, whole)
    again = np.full_like(x, 5)
    if pieces:
        codec.decompress([payloads], [again], [context], [pieces])
    np.testing.assert_array_equal(again[here], sent[here])


# ------------------------------------------------------------------------------------------ what may go wrong


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_with_what_is_not_finite_is_nan_and_leaves_nothing(kind, rounding, value):
    x = np.ones(200, np.float32) / 3
    x[70] = value
    compressor, before = KINDS[kind](64, rounding), x.copy()
    sent = decoded(compressor, compressor.compress(x, {}, ExchangeContext()), 200, np.float32)
    assert np.isnan(sent[64:128]).all()
    assert not x[64:128].any()
    np.testing.assert_allclose((sent + x)[:64], before[:64], rtol=1e-6)
    np.testing.assert_allclose((sent + x)[128:], before[128:], rtol=1e-6)


@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
@pytest.mark.parametrize("compressor", [Int8(32), Int4(32), ErrorFeedback(Int8(32)), ErrorFeedback(Int4(32))], ids=repr)
def test_nan_reaches_every_rank_and_only_its_block(compressor, exchange):
    def main(comm):
        p, opt = Parameter("w", np.zeros(300, np.float32)), DistOpt(SGD(1.0), comm, nonfinite="propagate")
        g = np.ones(300, np.float32)
        if comm.rank == 1:
            g[100] = np.nan
        opt.step([(p, g)], compressor, exchange=exchange)
        opt.step([(p, np.ones(300, np.float32))], compressor, exchange=exchange)
        return p.data, opt.state_dict()["states"]

    for x, states in run_ranks(3, main):
        assert np.isnan(x[96:128]).all()
        assert np.isfinite(np.delete(x, np.s_[96:128])).all()
        assert all(np.isfinite(a).all() for arrays in states.values() for a in arrays.values())


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 70])
def test_buckets_of_zeros_or_of_nothing_are_zeros(kind, rounding, n):
    compressor = KINDS[kind](rounding=rounding)
    for members in (None, bucket([0, n, 0], "float32")):
        x = np.zeros(members.extent if members else n, np.float32)
        context, here = context_of(members), inside(members) if members else np.ones(n, bool)
        out = here.astype(np.float32)
        payload = compressor.compress(x, {}, context)
        assert payload.nbytes == compressor.payload_bytes(x.size, 4, members)
        assert not payload.any()
        compressor.decompress_all([payload, payload], out, context)
        assert not out.any()


def test_scratch_memory_may_hold_anything():
    """Such as what another compressor has left there."""
    context = context_of(bucket([3, 70, 1, 5000], "float32"))
    used = context._replace(bucket=context.bucket._replace(scratch=lambda name, n: np.full(n, 0xA5, np.uint8)))
    for kind in KINDS.values():
        x = filled(context.layout, 0)
        wanted = kind().compress(x.copy(), {}, context)
        np.testing.assert_array_equal(kind().compress(x, {}, used), wanted)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_step_changes_nothing(kind, rounding):
    """The payload is zeros, which add nothing."""
    members = bucket([3, 70, CHUNK + 1], "float32")
    context = context_of(members, device=DeviceContext(skip_flag=np.ones(1, np.int64)))
    context = context._replace(bucket=context.bucket._replace(scratch=lambda name, n: np.full(n, 0xA5, np.uint8)))
    residual, gradient = filled(members, 0), filled(members, 1)
    state = {"residual": residual.copy()}
    payload = ErrorFeedback(KINDS[kind](rounding=rounding)).compress(gradient, state, context)
    assert not payload.any()
    np.testing.assert_array_equal(state["residual"], residual)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Int8(100), ValueError, r"block must be a power of two in \[32, 4096\], got 100"),
        (lambda: Int8(8192), ValueError, r"block must be a power of two in \[32, 4096\], got 8192"),
        (lambda: Int4(16), ValueError, "block must be at least 32, got 16"),
        (lambda: Int4(64.0), TypeError, "block must be an integer, got 64.0"),
        (lambda: Int8(True), TypeError, "block must be an integer, got True"),
        (lambda: Int8(rounding="up"), ValueError, "rounding must be one of nearest, stochastic, got 'up'"),
        (lambda: Int4(seed=-1), ValueError, "seed must be at least 0, got -1"),
        (lambda: Int4(seed=2**64), ValueError, r"seed must be at least 0 and below 2\^64, got 18446744073709551616"),
        (lambda: Int4(seed="1"), TypeError, "seed must be an integer, got '1'"),
    ],
)
def test_wrong_arguments_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_payloads_of_another_size_or_dtype_are_refused(kind):
    x, compressor = np.ones(40, np.float32), KINDS[kind]()
    with pytest.raises(ValueError, match="a gradient must be of 40 elements, as its memory, got 4"):
        compressor.compress(x, {}, ExchangeContext(), add=np.ones(4, np.float32))
    payload = compressor.compress(x, {}, ExchangeContext())
    with pytest.raises(ValueError, match=rf"a payload of 400 elements must be of \d+ bytes, got {payload.nbytes}"):
        compressor.decompress(payload, np.zeros(400, np.float32), ExchangeContext())
    with pytest.raises(TypeError, match=r"must be contiguous float32|must be of float32 or float64"):
        compressor.compress(x.astype(np.float16), {}, ExchangeContext())


def test_ranks_that_round_differently_are_told_so():
    def main(comm):
        p = Parameter("p", np.zeros(3, np.float32))
        DistOpt(SGD(1.0), comm).step([(p, np.ones(3, np.float32))], Int8(seed=comm.rank))

    assert "Int8(block=256, rounding='nearest', seed=1)" in laws.texts_of(2, main, ValueError)


# ------------------------------------------------------------------------------------------ among ranks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(5)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 17, 64])
@pytest.mark.parametrize("shapes", [[(100, 100), (7,), (), (0,), (1000,)], [(5,)]], ids=str)
def test_the_ledger_has_the_bytes_of_the_formula(kind, size, shapes):
    """To the byte: of each part of a tensor in a shard its codes and scales, each in words of four."""
    compressor = KINDS[kind]()
    params = [Parameter(f"p{k}", np.zeros(shape, np.float32)) for k, shape in enumerate(shapes)]
    sim = simulate(size, SGD(1.0), threshold=10**6)
    sim.step(lambda rank: [(p, np.ones_like(p.data)) for p in params], ErrorFeedback(compressor), False, "two_phase")
    sizes = [p.data.size for p in params]
    starts, total = np.cumsum(sizes) - np.array(sizes), sum(sizes)
    borders = []
    for rank in range(size):  # where a shard begins: rounded to blocks of the tensor that it begins in
        row = int(np.searchsorted(np.cumsum(sizes), total * rank // size, "right"))
        inside = (total * rank // size - starts[row] + compressor.block // 2) // compressor.block * compressor.block
        borders.append(int(starts[row]) + min(inside, sizes[row]))
    borders.append(total)

    def shard(owner):
        nbytes = 0
        for start, n in zip(starts.tolist(), sizes, strict=True):
            part = max(0, min(start + n, borders[owner + 1]) - max(start, borders[owner]))
            scales = -(-part // compressor.block)
            nbytes += 4 * (-(-part * compressor.bits // 32) - (-scales // 2))
        return nbytes

    rows = {row["verb"]: row for row in sim.ledger.by("phase", "verb") if row["phase"] == "gradients"}
    if size == 1:
        assert set(rows) == {"all_gather"}
        assert rows["all_gather"]["payload"] == shard(0)
        return
    assert rows["all_to_all"]["sent"] == sum(map(shard, range(1, size)))
    assert rows["all_gather"]["sent"] == shard(0) * (size - 1)
    codes = sum(-(-n * compressor.bits // 8) for n in sizes)
    assert codes <= rows["all_to_all"]["values"] <= codes + size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [2, 3, 8, 16, 64])
def test_the_error_of_a_sum_does_not_grow_with_the_ranks(kind, size):
    """But for the rounding of what they send, it is half a step of the sum's scale, at any number of them."""
    n, compressor = 5000, KINDS[kind]()
    grads = np.random.default_rng(size).standard_normal((size, n)).astype(np.float32)
    p, sim = Parameter("w", np.zeros(n, np.float32)), simulate(size, SGD(1.0))
    sim.step(lambda rank: [(p, grads[rank].copy())], compressor, False, "two_phase")
    found = -p.data.astype(np.float64) * size
    sent, members = np.zeros(n), bucket([n], "float32")
    for g in grads:
        sent += expected(g, members, compressor.bits, compressor.block)[1]
    for begin in range(0, n, compressor.block):
        part = slice(begin, begin + compressor.block)
        steps = {8: 126.5, 4: 6.9}[compressor.bits]
        assert abs(found[part] - sent[part]).max() <= abs(sent[part]).max() * (0.5 / steps + 1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_gradient_is_applied_in_time(kind, exchange):
    """Error feedback: after many steps the mean of what was applied is the mean gradient, though 4 bits are few."""

    def main(comm):
        p, opt = Parameter("w", np.zeros(500, np.float32)), DistOpt(SGD(1.0), comm)
        g = np.random.default_rng(comm.rank).standard_normal(500).astype(np.float32)
        for _ in range(60):
            opt.step([(p, g.copy())], ErrorFeedback(KINDS[kind]()), exchange=exchange)
        return -p.data / 60, g

    ranks = run_ranks(3, main)
    mean = np.mean([g for _, g in ranks], 0)
    assert abs(ranks[0][0] - mean).max() < 0.03


@pytest.mark.parametrize("kind", KINDS)
def test_all_members_of_a_bucket_are_one_call(kind, monkeypatch):
    """One for each bucket to compress, one to decompress, and one of each for the piece that a rank owns."""
    calls = []

    def counted(name, kernel):
        return lambda *given: (calls.append(name), kernel(*given))[1]

    for name in (f"encode_{kind}", f"decode_{kind}"):
        monkeypatch.setattr(kernels, name, counted(name.partition("_")[0], getattr(kernels, name)))
    compressor = KINDS[kind]()

    def main(comm):
        params = [Parameter(f"p{k}", np.zeros(n, np.float32)) for k, n in enumerate([5, 4000, 70, 3000])]
        loss = [(p, np.ones_like(p.data)) for p in params]
        DistOpt(SGD(1.0), comm, threshold=10**6).step(loss, compressor, False, "two_phase")

    run_ranks(4, main)
    assert sorted(calls) == ["decode"] * 8 + ["encode"] * 8
