"""Sections: the entries of stretches of an array, cut at borders, packed and unpacked."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import laws
from distopt.compress import ExchangeContext, sections
from distopt.compress.planes import payload_size, unpack_entries

CONTEXT = ExchangeContext()


def planes_of(index, entry):
    planes = np.zeros(payload_size(index.size, entry.itemsize), np.uint8)
    indices, entries = unpack_entries(planes, entry.dtype)
    indices[:], entries[:] = index, entry
    return planes


def packed(x, index, entry, rows):
    return sections.pack([x], [planes_of(index, entry)], rows, [len(rows)], sections.room(rows, CONTEXT), CONTEXT)


def cut_at_random(rng, n, cuts):
    borders = np.sort(rng.integers(0, n + 1, cuts))
    return np.concatenate([[0], borders]), np.diff(np.concatenate([[0], borders, [n]]))


@settings(max_examples=60, deadline=None)
@given(
    n=st.sampled_from([1, 63, 64, 1000, 4096, 20000]),
    density=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    cuts=st.integers(0, 9),
    value=st.sampled_from(list(sections.FORMATS)),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 99),
)
def test_what_sections_carry_and_what_stays_add_up(n, density, cuts, value, dtype, seed):
    """What a value is rounded by goes back to where it was; borders may be anywhere, stretches empty."""
    rng = np.random.default_rng(seed)
    index = np.flatnonzero(rng.random(n) < density).astype(np.int32)
    entry = rng.standard_normal(index.size).astype(dtype)
    bases, sizes = cut_at_random(rng, n, cuts)
    keep = sizes > 0
    bases, sizes = bases[keep], sizes[keep]
    counts = np.diff(np.searchsorted(index, np.concatenate([bases, [n]])))
    rows = sections.table(bases, sizes, counts, value, np.dtype(dtype).itemsize)
    x = np.zeros(n, dtype)
    payloads = packed(x, index, entry, rows)
    for payload, size, count in zip(payloads, sizes.tolist(), counts.tolist(), strict=True):
        assert payload.nbytes == sections.section_bytes(size, count, value, x.itemsize)
        assert sections.entries(payload, size, value, x.itemsize) == count
    found, values = sections.unpack(payloads, rows, x, CONTEXT)
    assert found.tolist() == index.tolist()
    laws.add_up(x[index], values, entry, ulps=value == "2bit")
    x[index] = 0
    assert not x.any()
    if value == "exact":
        assert values.tobytes() == entry.tobytes()


def test_a_section_has_few_bytes_for_few_entries():
    """25 entries of 25,000 elements, as of a shard of ResNet-50 among 1,024: 12 bits an index, 16 a value."""
    assert sections.section_bytes(25_000, 25, "float16", 4) <= 25 * 28 / 8 + 20


@pytest.mark.parametrize(("n", "density", "most"), [(2**20, 0.001, 32 / 2.2), (25_557_032, 0.001, 32 / 2.2)])
def test_two_bits_are_2200_times_fewer_bytes_in_a_section_too(n, density, most):
    k = int(np.ceil(density * n))
    assert 8 * sections.section_bytes(n, k, "2bit", 4) <= most * k
    assert 8 * sections.section_bytes(2**20, 2**14, "2bit", 4) <= 10.2 * 2**14


def test_infinities_and_nans_are_sent_and_leave_nothing():
    entry, x = np.array([np.inf, -np.inf, np.nan, 1], np.float32), np.zeros(100, np.float32)
    index = np.array([1, 5, 9, 99], np.int32)
    for value in sections.FORMATS:
        rows = sections.table(np.array([0]), np.array([100]), np.array([4]), value, 4)
        payloads = packed(x, index, entry, rows)
        _, values = sections.unpack(payloads, rows, x, CONTEXT)
        assert not np.isfinite(values[:3]).any()
        assert values[3] == 1
        assert not x.any()


def test_entries_without_a_place_go_back():
    x, index = np.zeros(1000, np.float32), np.arange(0, 1000, 10, dtype=np.int32)
    entry = np.arange(1, 101, dtype=np.float32)
    rows = sections.table(np.array([0, 500]), np.array([500, 500]), np.array([20, 60]), "exact", 4)
    payloads = packed(x, index, entry, rows)
    found, values = sections.unpack(payloads, rows, x, CONTEXT)
    assert np.flatnonzero(x).tolist() == index[20:50].tolist()
    assert found[found >= 0].tolist() == [*index[:20], *index[50:]]
    np.add.at(x, found[found >= 0], values[found >= 0])
    assert x[index].tolist() == entry.tolist()


@pytest.mark.parametrize("bit", range(32))
def test_one_wrong_bit_of_a_header_is_seen(bit):
    x, index = np.zeros(1000, np.float32), np.arange(100, dtype=np.int32)
    rows = sections.table(np.array([0]), np.array([1000]), np.array([100]), "float16", 4)
    (payload,) = packed(x, index, np.ones(100, np.float32), rows)
    payload[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match=r"a section's header must be one of 1000 elements with values in float16"):
        sections.entries(payload, 1000, "float16", 4)


def test_a_section_of_another_format_or_size_is_refused():
    x = np.zeros(1000, np.float32)
    rows = sections.table(np.array([0]), np.array([1000]), np.array([1]), "float16", 4)
    (payload,) = packed(x, np.array([3], np.int32), np.ones(1, np.float32), rows)
    for n, value, itemsize in ((999, "float16", 4), (1000, "int8", 4), (1000, "float16", 8)):
        with pytest.raises(ValueError, match="another compressor's"):
            sections.entries(payload, n, value, itemsize)
    with pytest.raises(ValueError, match="at least 4 bytes, its header, got 3"):
        sections.entries(payload[:3], 1000, "float16", 4)
