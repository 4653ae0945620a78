"""Packed entries: the layout of a payload, its indices and values, the residual, and errors.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import distopt.compress
import laws
from distopt import DistOpt, Parameter, device, kernels, run_ranks
from distopt.comm import LocalCommunicator, Metered
from distopt.compress import BucketContext, DeviceContext, ErrorFeedback, ExchangeContext, Packed, Threshold, TopK
from distopt.compress.elias_fano import HEADER, VALUES, check_header, packing
from distopt.compress.top_k import unpack_entries
from distopt.kernels.layout import CHUNK, BucketLayout
from distopt.optim import SGD
from laws import texts_of

REALS = ["float32", "float64"]
SEEDS = st.integers(0, 2**32 - 1)
ULPS = {value: int(value == "2bit") for value in VALUES}  # within which a value and what stays of it add up
SELECTORS = [TopK(0.01), TopK(0.3), TopK(1.0), Threshold(0.7), Threshold(1e9), TopK(0.1, per_tensor=True)]


def some(n, k, how, rng):
    """k ascending indices below n."""
    if how == "first":
        return np.arange(k)
    if how == "last":
        return np.arange(n - k, n)
    if how == "both ends":
        return np.concatenate([np.arange(k // 2), np.arange(n - k + k // 2, n)])
    if how == "even":
        return np.arange(k) * n // max(k, 1)
    return np.sort(rng.choice(n, k, replace=False))


@st.composite
def entries(draw, most=30_000):
    """(n, ascending indices) of all densities and patterns."""
    n = draw(st.one_of(st.sampled_from([1, 2, 63, 64, 65, CHUNK, CHUNK + 1, 3 * CHUNK]), st.integers(0, most)))
    k = min(n, draw(st.one_of(st.sampled_from([0, 1, 31, 32, 33, 64, CHUNK, CHUNK + 1]), st.integers(0, n))))
    how = draw(st.sampled_from(["first", "last", "both ends", "even", "anywhere", "anywhere"]))
    return n, some(n, k, how, np.random.default_rng(draw(SEEDS)))


def bits_of(payload, layout):
    """What is expected of the parts of a payload that hold indices: upper parts, jumps and lower bits."""
    names = ("high", "jumps", "low", "values")
    ends = [int(layout[name][0]) for name in names]
    kinds = (np.uint64, np.uint32, np.uint32)
    return [payload[a:b].view(kind) for a, b, kind in zip(ends, ends[1:], kinds, strict=False)]


def coded(index, n):
    """The same, by numpy: ones at (upper part + number), and tables of 32 rows, and of one column."""
    k = index.size
    bits = (n // k).bit_length() - 1 if k else 0
    at = (index >> bits) + np.arange(k)
    ones = np.zeros(-(-(k + (n >> bits)) // 64) * 64 if k else 0, np.uint8)
    ones[at] = 1
    low = []
    for begin in range(0, k, CHUNK):
        part = index[begin : begin + CHUNK] & ((1 << bits) - 1)
        whole = part.size // 32 * 32
        low += [in_columns(part[:whole], 32, bits), in_columns(part[whole:], part.size - whole, bits)]
    return [np.packbits(ones, bitorder="little").view(np.uint64), at[CHUNK::CHUNK], np.concatenate([[], *low])]


def in_columns(part, rows, bits):
    """A table's columns as words, bit by bit, and these row by row."""
    columns = part.reshape(rows, -1).T if rows else np.zeros((0, 0), np.int64)
    ones = (columns[:, :, None] >> np.arange(bits) & 1).reshape(len(columns), rows * bits).astype(np.uint8)
    ones = np.pad(ones, [(0, 0), (0, -ones.shape[1] % 32)])
    words = np.packbits(ones, axis=1, bitorder="little").astype(np.int64).reshape(len(columns), ones.shape[1] // 32, 4)
    return (words << np.arange(0, 32, 8)).sum(2).T.ravel()


def rounded(entry, value):
    """What is sent of finite entries, by numpy."""
    if value == "bfloat16":
        with np.errstate(over="ignore"):
            near = entry.astype(ml_dtypes.bfloat16).astype(np.float64)
        return np.clip(near, -(2.0**128 - 2.0**120), 2.0**128 - 2.0**120)
    if value == "2bit":
        groups = [entry[begin : begin + 256] for begin in range(0, entry.size, 256)]
        return np.concatenate([np.zeros(0), *map(in_two_bits, groups)])
    top, limit = (14, 32752) if value == "float16" else (6, 127)
    found = np.zeros(entry.size)
    for begin in range(0, entry.size, 64):
        part = entry[begin : begin + 64].astype(np.float64)
        most = abs(part).max()
        scale = 2.0 ** (top - np.clip(np.frexp(most)[1] - 1 if most else -112, -112, 127))
        near = np.clip(part * scale, -limit, limit)
        near = near.astype(np.float16).astype(np.float64) if value == "float16" else near.round()
        found[begin : begin + 64] = near / scale
    return found


def in_two_bits(group):
    """What up to 256 neighbours, all of them finite, are sent as: the nearer one of two magnitudes, with their sign."""
    real, size, most = group.dtype.type, abs(group.astype(np.float64)), float(abs(group).max())
    step = 2.0 ** (np.clip(np.frexp(most)[1] - 1 if most else -104, -104, 127) - 22)
    steps, bound = np.floor(np.minimum(size / step, 2.0**23 - 1)).astype(int), 2**23
    for _ in range(3):
        lower, upper = steps[steps <= bound], steps[steps > bound]
        low = real(lower.sum()) / real(lower.size)
        high = real(upper.sum()) / real(upper.size) if upper.size else low
        bound = int((real(upper.size) * low + real(lower.size) * high) / real(group.size))
    both = [
        np.array(min(mean * step, 2.0**128 - 2.0**120)).astype(ml_dtypes.bfloat16).astype(real) for mean in (low, high)
    ]
    nearer = abs(group) - both[0] > both[1] - abs(group)
    return np.where(nearer, both[1], both[0]).astype(float) * np.where(group < 0, -1, 1)


def planes_of(index, entry):
    """As a selector gives them."""
    payload = np.zeros(index.size * (4 + entry.itemsize) + entry.itemsize - 1, np.uint8)
    payload = payload[: -(-index.size * (4 + entry.itemsize) // entry.itemsize) * entry.itemsize]
    places, values = unpack_entries(payload, entry.dtype)
    places[:], values[:] = index, entry
    return payload


def sent(compressor, payload, n, dtype="float32"):
    """(index, value) of a payload's places."""
    [found] = compressor.decode([payload], np.zeros(n, dtype), ExchangeContext())
    return found


def test_a_packed_payload_has_the_worked_bytes():
    """16 elements, of which 4 are sent: 2 lower bits each; upper parts 0, 1, 1, 3 stand at 0, 2, 3 and 6."""
    x = np.zeros(16, np.float32)
    x[[1, 5, 6, 15]] = [1, -2, 0.5, 3.25]
    payload = Packed(TopK(0.25), value="bfloat16").compress(x, {}, ExchangeContext())
    assert payload.nbytes == HEADER + 8 + 4 + 8 + 4
    assert payload[:4].tobytes() == b"\x02\x01FE"
    assert payload[4:12].view(np.uint32).tolist() == [16, 4]
    assert payload[16:24].view(np.uint64) == 0b1001101
    assert payload[24:28].view(np.uint32) == 0b11_10_01_01
    assert payload[28:36].view(ml_dtypes.bfloat16).astype(float).tolist() == [1, -2, 0.5, 3.25]
    assert not payload[36:].any()
    assert not x.any()


@given(entries(), st.sampled_from(list(VALUES)), st.sampled_from(REALS), SEEDS)
def test_packed_indices_are_exact_and_values_rounded_as_numpy_does(chosen, value, dtype, seed):
    """The rounding errors stay in the residual."""
    n, index = chosen
    rng = np.random.default_rng(seed)
    entry = (rng.standard_normal(index.size) * 10.0 ** rng.integers(-30, 30, index.size)).astype(dtype)
    x, compressor = np.zeros(n, dtype), Packed(Threshold(0), value=value)
    payload = compressor.encode(planes_of(index, entry), x, ExchangeContext())
    layout = packing(n, index.size, value)
    assert payload.nbytes == layout["bytes"][0]
    assert payload.nbytes % 8 == 0
    for there, expected in zip(bits_of(payload, layout), coded(index, n), strict=True):
        np.testing.assert_array_equal(there[: len(expected)], expected)
        assert not there[len(expected) :].any()  # up to where the next part is aligned
    places, values = sent(compressor, payload, n, dtype)
    np.testing.assert_array_equal(places, index)
    np.testing.assert_array_equal(values, rounded(entry, value))
    laws.add_up(x[index], values, entry, ULPS[value])
    x[index] = 0
    assert not x.any()


@pytest.mark.parametrize("value", VALUES)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_nothing_of_a_float_is_lost(value, bits):
    """Law 1 over all floats, subnormal ones too; of what is not finite nothing stays, and it is sent as such."""
    before = np.array(bits, np.uint32).view(np.float32)
    x, compressor = before.copy(), Packed(TopK(1.0), value=value)
    index, values = sent(compressor, compressor.compress(x, {}, ExchangeContext()), x.size)
    assert index.tolist() == list(range(x.size))
    finite = np.isfinite(before)
    laws.add_up(x[finite], values[finite], before[finite], ULPS[value])
    assert not x[~finite].any()
    expected = np.full_like(before, np.nan) if value in ("int8", "2bit") else before
    np.testing.assert_array_equal(values[~finite], expected[~finite])


@pytest.mark.parametrize("value", VALUES)
@given(
    few=st.lists(st.floats(-(2.0**127), 2.0**127), min_size=1, max_size=100),
    power=st.integers(-1000, 0),
)
def test_nothing_of_a_double_is_lost(value, few, power):
    """What is far below the format's range stays whole."""
    before = np.array(few) * 2.0**power
    x, compressor = before.copy(), Packed(TopK(1.0), value=value)
    _, values = sent(compressor, compressor.compress(x, {}, ExchangeContext()), x.size, "float64")
    laws.add_up(x, values, before, ULPS[value])


@pytest.mark.parametrize(
    ("value", "most"),
    [
        ("float16", 2047 * 2.0**117),
        ("bfloat16", 255 * 2.0**120),
        ("int8", 2**128 - 2**121),
        ("2bit", 255 * 2.0**120),
    ],
)
def test_values_beyond_the_format_are_sent_saturated(value, most):
    x = np.array([1e300, -1e300, 2.0**140, 2.0])
    before = x.copy()
    compressor = Packed(TopK(1.0), value=value)
    _, values = sent(compressor, compressor.compress(x, {}, ExchangeContext()), 4, "float64")
    assert values[:3].tolist() == [most, -most, most]
    np.testing.assert_array_equal(x, before - values)


@pytest.mark.parametrize("value", ["float16", "int8"])
def test_neighbours_share_a_scale_of_their_own_size(value):
    """Tiny entries beside tiny ones, huge ones beside huge ones: each has the precision of its own 64."""
    x = np.repeat(np.float32([1e-32, 1, 1e35]), 64) * np.linspace(0.5, 1, 192, dtype=np.float32)
    before, compressor = x.copy(), Packed(TopK(1.0), value=value)
    sent(compressor, compressor.compress(x, {}, ExchangeContext()), x.size)
    assert (abs(x) <= before * (2**-11 if value == "float16" else 2**-6)).all()
    assert x.any()


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("value", [value for value in VALUES if value != "2bit"])
def test_a_non_finite_value_is_sent_and_does_not_change_its_neighbours(value, dtype):
    bad = np.array([np.inf, -np.inf, np.nan], dtype)
    good = np.linspace(1, 2, 61, dtype=dtype)
    x, alone = np.concatenate([bad, good]), np.concatenate([[0, 0, 0], good]).astype(dtype)
    compressor = Packed(TopK(1.0), value=value)
    _, values = sent(compressor, compressor.compress(x, {}, ExchangeContext()), 64, dtype)
    _, expected = sent(compressor, compressor.compress(alone, {}, ExchangeContext()), 64, dtype)
    np.testing.assert_array_equal(values[:3], [np.nan] * 3 if value == "int8" else bad)
    np.testing.assert_array_equal(values[3:], expected[3:])
    np.testing.assert_array_equal(x, alone)


# ---------------------------------------------------------------------------------------------------------- two bits


def magnitudes(distribution, k=2**14):
    """Entries of a distribution; of the top-K of normal ones, those above a bound."""
    rng = np.random.default_rng(1)
    if distribution == "Laplacian":
        return rng.laplace(size=k).astype(np.float32)
    x = rng.standard_normal(k if distribution == "normal" else 100 * k)
    return x[abs(x) >= np.partition(abs(x), -k)[-k]].astype(np.float32)


DISTRIBUTIONS = ["Laplacian", "normal", "top 1 % of normal"]


def coded_by(entry, value="2bit"):
    """What entries are sent as."""
    compressor, x = Packed(Threshold(0), value=value), np.zeros_like(entry)
    payload = compressor.encode(planes_of(np.arange(entry.size), entry), x, ExchangeContext())
    return sent(compressor, payload, entry.size, entry.dtype)[1].astype(np.float64)


def square(error):
    return float(np.sum(error.astype(np.float64) ** 2))


def least_error(group):
    """The least squared error that two magnitudes have: of all ways to part ascending ones."""
    size = np.sort(abs(group.astype(np.float64)))
    sums, k = np.cumsum(size), np.arange(1, size.size)
    means = sums[:-1] ** 2 / k + (sums[-1] - sums[:-1]) ** 2 / (size.size - k)
    return np.sum(size**2) - means.max()


def ternary(entry):
    """MXNet's two bits: +t, -t or 0, where t is the best of many thresholds."""
    entry = entry.astype(np.float64)
    candidates = np.linspace(0.05, 1, 96) * abs(entry).max()
    return min((np.where(abs(entry) >= t, t * np.sign(entry), 0) for t in candidates), key=lambda y: square(entry - y))


def binned(entry):
    """SparseLoCo's two bits: four bins over 6 sigma about the mean, each of them sent as the mean of what is in it."""
    entry = entry.astype(np.float64)
    centred = entry - entry.mean()
    code = np.clip((centred / (1.5 * centred.std(ddof=1)) + 2).round(), 0, 3).astype(int)
    means = np.bincount(code, entry, 4) / np.maximum(np.bincount(code, minlength=4), 1)
    return means[code]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_two_bits_come_near_the_least_error_and_below_that_of_others(distribution):
    """Within 3 % of the best two magnitudes of each group; others lose over twice as much of what top-K selects."""
    entry = magnitudes(distribution)
    error = square(entry - coded_by(entry))
    groups = entry.reshape(-1, 256)
    assert error <= 1.03 * sum(map(least_error, groups))
    for other in (ternary, binned):
        theirs = min(square(entry - other(entry)), sum(square(g - other(g)) for g in groups))
        assert theirs > (2 if distribution.startswith("top") else 1) * error, other


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_two_bits_are_the_bits_of_the_rule(distribution):
    entry = magnitudes(distribution)[:5000]
    np.testing.assert_array_equal(coded_by(entry), rounded(entry, "2bit"))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=300))
def test_what_two_bits_lose_is_exact_from_half_of_what_is_sent(few):
    """Up to 65,536 times that, beyond which an entry is seldom."""
    before = np.array(few, np.float32)
    x, compressor = before.copy(), Packed(TopK(1.0), value="2bit")
    values = sent(compressor, compressor.compress(x, {}, ExchangeContext()), x.size)[1].astype(np.float64)
    size = abs(before.astype(np.float64))
    between = (size >= abs(values) / 2) & (size <= 65536 * abs(values))
    np.testing.assert_array_equal((before - values)[between], x[between])


def test_what_two_bits_lose_of_the_largest_is_exact():
    entry = np.random.default_rng(0).laplace(size=10_000).astype(np.float32)
    compressor, x = Packed(TopK(0.1), value="2bit"), entry.copy()
    index, values = sent(compressor, compressor.compress(x, {}, ExchangeContext()), x.size)
    np.testing.assert_array_equal(x[index].astype(np.float64) + values, entry[index])


def test_two_bits_stand_where_the_format_says():
    """Signs and sizes of 1, -8, -2, 9 and 1: the first code in the highest bits; magnitudes 1.3359375 and 8.5."""
    x = np.array([1, -8, -2, 9, 1], np.float32)
    payload = Packed(TopK(1.0), value="2bit").compress(x, {}, ExchangeContext())
    layout = packing(5, 5, "2bit")
    codes = payload[int(layout["values"][0]) : int(layout["scales"][0])]
    assert codes.tolist() == [0b00_11_10_01, 0b00_00_00_00, 0, 0]
    pair = payload[int(layout["scales"][0]) : int(layout["scales"][0]) + 4].view(ml_dtypes.bfloat16)
    assert pair.astype(float).tolist() == [1.3359375, 8.5]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_in_two_bits_takes_the_upper_magnitude_of_its_group(bad):
    """The others of its group are sent as the lower one; other groups do not know of it."""
    entry = np.concatenate([np.full(128, 1), np.full(128, 8), np.full(300, 3)]).astype(np.float32)
    expected = coded_by(entry)
    entry[5] = bad
    x, compressor = entry.copy(), Packed(TopK(1.0), value="2bit")
    _, values = sent(compressor, compressor.compress(x, {}, ExchangeContext()), x.size)
    assert np.flatnonzero(np.isnan(values)).tolist() == [5]
    assert x[5] == 0
    assert set(np.delete(values[:256], 5).tolist()) == {1}
    np.testing.assert_array_equal(values[256:], expected[256:])
    finite = np.isfinite(entry)
    laws.add_up(x[finite], values[finite], entry[finite])


def test_zeros_are_sent_as_the_lower_magnitude_and_taken_back():
    entry = np.array([0, 0, 0, -4, 4, 1], np.float32)
    values = coded_by(entry)
    assert values.tolist() == [0.25, 0.25, 0.25, -4, 4, 0.25]
    assert not coded_by(np.zeros(300, np.float32)).any()


def test_two_bits_have_so_many_bits_an_entry():
    """A thousandth of ResNet-50's 25.6 million is 2,200 times fewer bytes; 10.2 bits an entry at 1 / 64."""
    n = 25_557_032
    for elements in (2**20, n):
        assert 4 * elements >= 2200 * Packed(TopK(0.001), value="2bit").payload_bytes(elements)
    assert 8 * Packed(TopK(1 / 64), value="2bit").payload_bytes(2**20) <= 10.2 * 2**14


# ------------------------------------------------------------------------------------------------------- compressors


@pytest.mark.sampled(8)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
@given(n=st.integers(0, 3000), dtype=st.sampled_from(REALS), seed=SEEDS)
def test_packing_sends_the_entries_that_its_selector_chooses(selector, value, n, dtype, seed):
    """The same indices, the residual added in the same pass, and a sum that loses nothing."""
    residual, gradient = np.random.default_rng(seed).standard_normal((2, n)).round(2).astype(dtype)
    total, state = residual + gradient, {"residual": residual.copy()}
    compressor = ErrorFeedback(Packed(selector, value=value))
    payload = compressor.compress(gradient, state, ExchangeContext())
    expected = compressor.payload_bytes(n, total.itemsize)
    assert expected in (None, payload.nbytes)
    out = np.full(n, 7, dtype)
    compressor.decompress_all([payload], out, ExchangeContext())
    laws.add_up(state["residual"], out, total, ULPS[value])
    index, _ = unpack_entries(selector.compress(residual, {}, ExchangeContext(), add=gradient), dtype)
    np.testing.assert_array_equal(sent(compressor.compressor, payload, n, dtype)[0], index)


@pytest.mark.parametrize("selector", [TopK(0.1), Threshold(1.0)], ids=repr)
@given(n=st.integers(0, 9000), ranks=st.integers(0, 5), dtype=st.sampled_from(REALS), seed=SEEDS)
def test_decompressing_all_payloads_equals_decompressing_one_by_one(selector, n, ranks, dtype, seed):
    """Also of payloads of several lengths."""
    compressor = Packed(selector)
    xs = [(np.random.default_rng([seed, r]).standard_normal(n) * (1 + r // 2)).astype(dtype) for r in range(ranks)]
    payloads = [compressor.compress(x, {}, ExchangeContext()) for x in xs]
    out, one_by_one = np.full(n, 9, dtype), np.zeros(n, dtype)
    compressor.decompress_all(payloads, out, ExchangeContext())
    for payload in payloads:
        compressor.decompress(payload, one_by_one, ExchangeContext())
    np.testing.assert_array_equal(out, one_by_one)


HARD = {
    "zeros": [0.0] * 40,
    "all equal": [-2.5] * 40,
    "all infinite": [np.inf] * 40,
    "one NaN": [1.0] * 20 + [np.nan] + [1.0] * 19,
    "one element": [3.0],
    "one NaN alone": [np.nan],
    "none": [],
}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("selector", [TopK(0.1), TopK(1.0), Threshold(0), Threshold(2.0)], ids=repr)
@pytest.mark.parametrize("case", HARD)
def test_hard_inputs_are_sent_exactly_as_the_selector_chooses(case, selector, value):
    """A value that is not finite arrives as such and does not stay in the residual."""
    before = np.array(HARD[case], np.float32)
    index, entry = unpack_entries(selector.compress(before.copy(), {}, ExchangeContext()), np.float32)
    x, compressor = before.copy(), Packed(selector, value=value)
    places, values = sent(compressor, compressor.compress(x, {}, ExchangeContext()), x.size)
    np.testing.assert_array_equal(places, index)
    np.testing.assert_array_equal(np.isfinite(values), np.isfinite(entry))
    assert np.isfinite(x[index]).all()
    finite = np.isfinite(entry)
    laws.add_up(x[index][finite], values[finite], entry[finite], ULPS[value])


def test_scratch_memory_may_hold_anything():
    used = ExchangeContext(bucket=BucketContext(scratch=lambda name, nbytes: np.full(nbytes, 0xA5, np.uint8)))
    for selector in SELECTORS[:5]:
        x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
        for value in VALUES:
            payloads = [
                Packed(selector, value=value).compress(x.copy(), {}, context) for context in (ExchangeContext(), used)
            ]
            np.testing.assert_array_equal(*payloads)


# ---------------------------------------------------------------------------------------------------------- payloads


def a_payload(selector=None, n=1000, value="float16"):
    compressor = Packed(selector or TopK(0.1), value=value)
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    return compressor, compressor.compress(x, {}, ExchangeContext())


@pytest.mark.parametrize("selector", [TopK(0.1), Threshold(1.0)], ids=repr)
def test_no_damaged_header_is_decoded(selector):
    """Whatever bit is flipped."""
    compressor, payload = a_payload(selector)
    for bit in range(8 * HEADER):
        damaged = payload.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        out = np.ones(1000, np.float32)
        with pytest.raises(ValueError, match=r"must begin with|must be of 1000 elements, got|must have the checksum"):
            compressor.decompress_all([payload, damaged], out, ExchangeContext())
        assert out.all()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: p[:8], "a payload must be of at least 16 bytes, its header, got 8"),
        (lambda p: p[:-8], r"a payload of 100 of 1000 elements must be of 296 bytes, got 288"),
        (lambda p: np.concatenate([p, p[:8]]), r"a payload of 100 of 1000 elements must be of 296 bytes, got 304"),
        (
            lambda p: a_payload(value="int8")[1],
            "a payload with values in float16 must begin with 0x45460101, got 0x45460103",
        ),
        (lambda p: a_payload(n=999)[1], "a payload must be of 1000 elements, got 999"),
        (lambda p: a_payload(TopK(0.2))[1], "a payload must be of at most 100 entries, got 200"),
        (lambda p: np.zeros(296, np.uint8), "must begin with 0x45460101, got 0x0"),
    ],
)
def test_payloads_of_another_compressor_or_damaged_ones_are_refused(make, text):
    compressor, payload = a_payload()
    with pytest.raises(ValueError, match=text):
        compressor.decompress(make(payload), np.zeros(1000, np.float32), ExchangeContext())


def header(n, entries):
    """Of float16."""
    check = (0x45460101 * 0x9E3779B1 + n * 0x85EBCA77 + entries * 0xC2B2AE3D) % 2**32
    return np.array([0x45460101, n, entries, check], np.uint32)


def test_a_payload_with_more_entries_than_elements_is_refused():
    with pytest.raises(ValueError, match="a payload must be of at most 5 entries, got 6"):
        check_header(header(5, 6).view(np.uint8), 5, None, "float16")


@pytest.mark.parametrize("dtype", REALS)
@given(chosen=entries(most=9000), value=st.sampled_from(list(VALUES)), header=st.booleans(), seed=SEEDS)
def test_decoding_noise_writes_nothing_outside_of_its_arrays(dtype, chosen, value, header, seed):
    """A payload of noise: every place gets an index below n, or -1, and nothing beside the planes is written."""
    n, index = chosen
    compressor, layout, guard = Packed(Threshold(0), value=value), packing(n, index.size, value), 64
    payload = compressor.encode(planes_of(index, np.ones(index.size, dtype)), np.zeros(n, dtype), ExchangeContext())
    first = HEADER if header else 0
    payload[first:] = np.random.default_rng(seed).integers(0, 256, payload.size - first)
    places, values = np.full(index.size + 2 * guard, 77, np.int32), np.full(index.size + 2 * guard, 77, dtype)
    inside = slice(guard, guard + index.size)
    addresses = device.DeviceMirror(np.array([payload.ctypes.data]))
    kernels.unpack_planes(addresses, places[inside], values[inside], device.DeviceMirror(layout))
    assert ((places[inside] >= 0) & (places[inside] < n)).all()
    for plane in (places, values):
        assert (np.delete(plane, np.r_[inside]) == 77).all()
    if not header:
        assert np.isnan(values[inside]).all()
    out = np.zeros(n + 2 * guard, dtype)
    lists = [places[inside]], [values[inside]], np.array([index.size])
    with np.errstate(all="ignore"):
        kernels.decode_all(out[guard : guard + n], *lists)
    assert not out[:guard].any()
    assert not out[guard + n :].any()


@pytest.mark.sampled(7)
@pytest.mark.parametrize("n", range(1, 20))
def test_no_index_is_as_large_as_the_array(n):
    """All that the bits of one entry can say: an index, or that there is none, which becomes NaN at its own place."""
    compressor, layout = Packed(TopK(1 / n)), packing(n, 1, "float16")
    payload, bits = (
        compressor.encode(planes_of(np.arange(1), np.ones(1, np.float32)), np.zeros(n, "f"), ExchangeContext()),
        layout[0],
    )
    for upper in range(64):
        for lower in range(2 ** int(bits["bits"])):
            payload[bits["high"] : bits["jumps"]].view(np.uint64)[:] = 1 << upper
            payload[bits["low"] : bits["values"]].view(np.uint32)[:] = lower
            index, entry = sent(compressor, payload, n)
            due = upper << int(bits["bits"]) | lower
            assert index.tolist() == [due if due < n else 0]
            assert np.isnan(entry[0]) == (due >= n)


@pytest.mark.parametrize("value", VALUES)
def test_indices_are_twelve_bits_and_payloads_a_thousandth(value):
    """At a density of 0.1 %, headers included, of one tensor of 2^21 elements."""
    metered, n = Metered(LocalCommunicator()), 2**21
    p = Parameter("p", np.zeros(n, np.float32))
    opt = DistOpt(SGD(1.0), metered, broadcast=False)
    grad = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    opt([(p, grad.copy())])
    dense = metered.report()["all_reduce"]["payload"]
    opt.step([(p, grad)], ErrorFeedback(Packed(TopK(0.001), value=value)))
    assert dense == 4 * n >= 1000 * metered.report()["all_gather"]["payload"]
    assert opt.plan.payload == (metered.report()["all_gather"]["payload"],)
    layout, k = packing(n, TopK(0.001).count(n), value), TopK(0.001).count(n)
    assert 8 * (layout["values"][0] - layout["high"][0]) <= 12 * k


@given(st.integers(1, 2**31 - 1), st.floats(1e-6, 1), st.sampled_from(list(VALUES)))
def test_the_length_of_a_payload_is_a_function_of_entries_and_elements(n, density, value):
    """It is that of the formula, and not much above the least that is possible."""
    k = max(1, int(density * n))
    layout = packing(n, k, value)
    bits = int(np.floor(np.log2(n / k)))
    assert layout["bits"] == bits
    least = sum(sign * math.lgamma(m + 1) for sign, m in ((1, n), (-1, k), (-1, n - k))) / math.log(2)  # n over k
    indices = 8 * int(layout["values"][0] - layout["high"][0])
    assert k * (bits + 1) + n / 2**bits - 1 <= indices <= least + (0.6 if k < n / 20 else 2.01) * k + 160
    scales = -(-k // 64)
    values = {
        "float16": 2 * k + scales,
        "bfloat16": 2 * k,
        "int8": k + scales,
        "2bit": 4 * (-(-k // 16) + -(-k // 256)),
    }[value]
    assert layout["bytes"] == -(-(int(layout["values"][0]) + values) // 8) * 8


# --------------------------------------------------------------------------------------------------- what is refused


class Memory(ErrorFeedback):
    """Some other compressor with a memory."""

    def __init__(self, selector):
        super().__init__(selector)
        self.selector = selector

    def __repr__(self):
        return f"Memory({self.selector!r})"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: Packed(ErrorFeedback(TopK(0.1))),
            ValueError,
            r"selector must be one without a memory, which would not get what rounding "
            r"loses, got .*; write ErrorFeedback\(Packed\(TopK\(0.1, per_tensor=False\)\)\)",
        ),
        (lambda: Packed(Memory(TopK(0.1))), ValueError, r"write Memory\(Packed\(TopK\(0.1, per_tensor=False\)\)\)"),
        (lambda: Packed(Packed(TopK(0.1))), ValueError, "not packed already, got Packed"),
        (lambda: Packed(ErrorFeedback(Packed(TopK(0.1)))), ValueError, r"not packed already, got ErrorFeedback"),
        (
            lambda: Packed(ErrorFeedback(distopt.compress.Half())),
            TypeError,
            r"must be one that chooses entries.*, got ErrorFeedback\(Half\(",
        ),
        (lambda: Packed(ErrorFeedback), TypeError, "must be one that chooses entries.*, got <class"),
        (
            lambda: Packed(distopt.compress.Half()),
            TypeError,
            r"must be one that chooses entries, as TopK or Threshold, got Half\('float16'",
        ),
        (lambda: Packed(0.1), TypeError, "got 0.1"),
        (lambda: Packed(TopK(0.1), index="rice"), ValueError, "index must be elias-fano, got 'rice'"),
        (
            lambda: Packed(TopK(0.1), value="float32"),
            ValueError,
            "value must be one of float16, bfloat16, int8, 2bit, got 'f",
        ),
        (lambda: Packed(TopK(0.1), value=["int8"]), ValueError, r"value must be one of .*, got \['int8'\]"),
    ],
)
def test_wrong_arguments_of_packed_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_gradients_of_another_size_or_dtype_are_refused():
    x = np.ones(40, np.float32)
    with pytest.raises(ValueError, match="a gradient must be of 40 elements, as its memory, got 4"):
        Packed(TopK(0.1)).compress(x, {}, ExchangeContext(), add=np.ones(4, np.float32))
    with pytest.raises(TypeError, match="arrays must be of float32 or float64, got float16"):
        Packed(TopK(0.1)).compress(x.astype(np.float16), {}, ExchangeContext())


def test_another_density_keeps_the_format():
    packed = Packed(TopK(0.1), value="int8").with_density(0.25)
    assert repr(packed) == "Packed(TopK(0.25, per_tensor=True), index='elias-fano', value='int8')"
    assert packed.density == 0.25


def test_packed_is_ragged_exactly_if_its_selector_is():
    assert (Packed(TopK(0.1)).ragged, Packed(TopK(0.1)).bounded, Packed(TopK(0.1)).density) == (False, False, 0.1)
    assert (Packed(Threshold(1)).ragged, Packed(Threshold(1)).bounded) == (True, True)
    assert Packed(Threshold(1)).payload_bytes(1000) is None
    assert repr(Packed(TopK(0.1))) == "Packed(TopK(0.1, per_tensor=False), index='elias-fano', value='float16')"


# -------------------------------------------------------------------------------------------------------- in DistOpt


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("compressor", [Packed(TopK(0.5)), Packed(Threshold(0.5), value="int8")], ids=repr)
def test_bad_numbers_under_each_policy(compressor, value):
    """A refused step leaves residuals as they were; under 'propagate' the bad number is seen, and not kept."""

    def main(comm, nonfinite):
        p, feedback = Parameter("p", np.zeros(4, np.float32)), ErrorFeedback(compressor)
        opt = DistOpt(SGD(1.0), comm, nonfinite=nonfinite)
        good = [(p, np.array([1, 0.7, 0.25, 0.1], np.float32))]
        opt.step(good, feedback, break_even=False)
        before, w = opt.state_dict()["states"]["residual"]["p"].copy(), p.data.copy()
        bad = [(p, np.array([1, value if comm.rank else 1, 1, 1], np.float32))]
        if nonfinite == "raise":
            with pytest.raises(FloatingPointError, match=r"rank 1: p \(1 of 4 entries\)"):
                opt.step(bad, feedback, break_even=False)
        else:
            assert opt.step(bad, feedback, break_even=False) is (nonfinite == "propagate")
        residual = opt.state_dict()["states"]["residual"]["p"]
        if nonfinite == "propagate":
            assert not np.isfinite(p.data[1])
            assert np.isfinite(residual).all()
        else:
            np.testing.assert_array_equal(residual, before)
            np.testing.assert_array_equal(p.data, w)

    for nonfinite in ("raise", "skip", "propagate"):
        run_ranks(2, lambda comm, policy=nonfinite: main(comm, policy))


def test_ranks_with_different_formats_are_refused():
    def main(comm):
        loss = [(Parameter("p", np.zeros(9, np.float32)), np.ones(9, np.float32))]
        DistOpt(SGD(1.0), comm).step(loss, Packed(TopK(0.5), value="int8" if comm.rank else "float16"))

    text = texts_of(2, main, ValueError)
    assert "value='float16'), rank 1 has a step with Packed(" in text


def test_ranks_may_send_different_numbers_of_packed_entries():
    def main(comm):
        p, n = Parameter("p", np.zeros(5000, np.float32)), 5000
        grad = np.random.default_rng(comm.rank).standard_normal(n).astype(np.float32) * (comm.rank + 1)
        compressor = ErrorFeedback(Packed(Threshold(2.0 * (comm.size > 1))))
        DistOpt(SGD(1.0), comm).step([(p, grad)], compressor, break_even=False)
        return p.data.tobytes()

    assert len(set(run_ranks(3, main))) == 1


# ---------------------------------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def there(doubles):
    """Copies of host arrays on a GPU, and what a call there needs."""
    comm = LocalCommunicator(gpu=0)
    context = ExchangeContext(bucket=BucketContext(scratch=lambda name, nbytes: device.gpu_zeros(nbytes, np.uint8)))
    return lambda *arrays: (context, *laws.to_device(comm, list(arrays)))


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    ("selector", "room"), [(TopK(0.1), None), (Threshold(1.0), None), (Threshold(1.0), 900), (Threshold(1.0), 5000)]
)
def test_packing_on_a_gpu_equals_the_host_within_its_room(selector, room, value, there):
    """With room for fewer entries than are selected, for more, or for as many."""
    n, compressor = 9000, Packed(selector, value=value)
    before = np.random.default_rng(3).standard_normal(n).astype(np.float32)
    context, x, out = there(before, np.full(n, 7, np.float32))
    payload = compressor.compress(x, {}, context._replace(device=DeviceContext(capacity=room)))
    compressor.decompress_all([payload, payload], out, context._replace(device=DeviceContext(capacity=room)))
    kept, found = device.host_copy(x), device.host_copy(out) / 2
    laws.add_up(kept, found, before, ULPS[value])
    expected, host = before.copy(), np.zeros(n, np.float32)
    whole = compressor.compress(expected, {}, ExchangeContext())
    compressor.decompress(whole, host, ExchangeContext())
    if room == 900:
        assert np.count_nonzero(found) <= 900 < np.count_nonzero(host)
    else:
        np.testing.assert_array_equal(kept, expected)
        np.testing.assert_array_equal(found, host)
    if room is None:
        np.testing.assert_array_equal(device.host_copy(payload), whole)


@pytest.mark.parametrize(("selector", "room"), [(TopK(0.1), None), (Threshold(0.5), 50)], ids=repr)
def test_a_refused_step_changes_nothing(selector, room, there):
    """The payload has no entries."""
    residual, gradient = np.random.default_rng(0).standard_normal((2, 500)).astype(np.float32)
    context, kept, new, refused, out = there(residual, gradient, np.ones(1, np.int64), np.ones(500, np.float32))
    context, state = context._replace(device=DeviceContext(refused, room)), {"residual": kept}
    compressor = ErrorFeedback(Packed(selector))
    payload = compressor.compress(new, state, context)
    assert device.host_copy(payload)[8:12].view(np.uint32) == 0
    assert not device.host_copy(payload)[HEADER:].any()
    np.testing.assert_array_equal(device.host_copy(kept), residual)
    compressor.decompress_all([payload], out, context)
    assert not device.host_copy(out).any()


@pytest.mark.parametrize(
    ("word", "found"), [(0, 0x45460103), (1, 999), (2, 99), (3, 0), (slice(0, 4), header(1000, 101))]
)
def test_a_damaged_payload_becomes_nan_on_a_gpu(word, found, there):
    """It is seen, and the others are not hurt; so is a sound header of more entries than there is room for."""
    compressor, payload = a_payload()
    damaged = payload.copy()
    damaged[:HEADER].view(np.uint32)[word] = found
    context, out, good, bad = there(np.zeros(1000, np.float32), payload, damaged)
    compressor.decompress_all([good, bad], out, context)
    found, expected = device.host_copy(out), np.zeros(1000, np.float32)
    compressor.decompress(payload, expected, ExchangeContext())
    assert np.isnan(found[:100]).all()
    np.testing.assert_array_equal(found[100:], expected[100:])
    with pytest.raises(
        ValueError, match=f"a payload of 100 of 1000 elements must be of {payload.nbytes} bytes, got 200"
    ):
        compressor.decompress_all([good[:200]], out, context)


def test_a_damaged_header_is_refused_on_a_gpu_too(there):
    compressor, payload = a_payload(Threshold(1.0))
    damaged = payload.copy()
    damaged[9] ^= 1
    context, out, bad = there(np.zeros(1000, np.float32), damaged)
    with pytest.raises(ValueError, match="must have the checksum"):
        compressor.decompress(bad, out, context)


@given(
    density=st.sampled_from([1e-3, 0.01, 0.1, 0.6, 1.0]),
    sizes=st.lists(st.integers(0, 3000), min_size=2, max_size=8),
    seed=st.integers(0, 99),
)
def test_the_breakdown_counts_packed_entries_by_tensor(density, sizes, seed):
    """Exactly where 16 or fewer neighbours share an upper part, else up to those at a tensor's start."""
    starts = np.cumsum([0] + [-(-n // 16) * 16 for n in sizes])
    members = BucketLayout([f"p{k}" for k in range(len(sizes))], [(n,) for n in sizes], starts[:-1].tolist(), "float32")
    x = np.zeros(members.extent, np.float32)
    for start, n in zip(starts, sizes, strict=False):
        x[start : start + n] = np.random.default_rng([seed, start]).laplace(1, 1, n)
    packed, context = Packed(TopK(density)), ExchangeContext(bucket=BucketContext(members))
    payload = packed.compress(x, {}, context)
    counts = packed.breakdown(payload, x, context)().counts
    index = packed.decode([payload], x, context)[0][0]
    assert counts.sum() == index.size
    reach = 1 << max(0, math.floor(math.log2(x.size / index.size))) if index.size else 1
    for start, before in zip(starts, np.cumsum(counts) - counts, strict=False):
        off = reach if reach > 16 else 0
        assert np.sum(index < start - off) <= before <= np.sum(index < start + off)
