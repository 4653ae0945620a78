"""The kernels of native/ on the host, against numpy and against themselves at every SIMD level."""

import ctypes
import itertools
import os
import pathlib
import re
import shutil
import subprocess

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from distopt import kernels
from distopt.compress.elias_fano import VALUES, packing
from distopt.device import zeros
from distopt.kernels import signatures
from distopt.kernels.layout import CHUNK, MEMBER, BucketLayout, KernelStruct
from distopt.kernels.signatures import NATIVE, kernel_signatures, source_hash

SIZES = [0, 1, 15, 16, 17, 63, 64, 65, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5]
REALS = ["float32", "float64"]


def members(sizes, dtype="float32", seed=0):
    """A table of arrays of these sizes, and the arrays; members start at multiples of 16 elements."""
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(n).astype(dtype) for n in sizes]
    room = np.array([-(-n // 16) * 16 for n in sizes], np.int64)
    table = BucketLayout([f"p{k}" for k in range(len(sizes))], [a.shape for a in arrays], np.cumsum(room) - room, dtype)
    return table.point_to(arrays), arrays


def largest(dtype):
    """The largest finite number."""
    return float(np.finfo(dtype).max)


def test_the_library_was_built_from_the_present_sources():
    assert signatures.library().source_hash().decode() == source_hash()


def test_signatures_are_read_from_the_kernel_text():
    assert [p.name for p in kernels.sgd_momentum.parameters] == [*("grad", "buffer", "hyper", "skip")]
    assert MEMBER.itemsize == 80
    with pytest.raises(AttributeError, match=r"no kernel 'sgd_magic'.*sgd_momentum"):
        _ = kernels.sgd_magic


@pytest.mark.parametrize("dtype", REALS)
@given(st.lists(st.sampled_from(SIZES), min_size=1, max_size=8), st.sampled_from([1.0, 0.25, -3.0]))
def test_unpack_reverses_pack_and_pack_writes_members_only(dtype, sizes, scale):
    table, arrays = members(sizes, dtype)
    flat, bad = zeros(table.extent, dtype), np.zeros(len(sizes), np.int64)
    kernels.pack(table, flat, scale, bad, largest(dtype))
    for row, a in enumerate(arrays):
        np.testing.assert_array_equal(table.view(flat, row), a * a.dtype.type(scale))
    assert not bad.any()
    outside = np.ones(table.extent, bool)
    for row, n in enumerate(sizes):
        outside[table.records["offset"][row] :][:n] = False
    assert not flat[outside].any(), "pack wrote outside of its members"
    before = [a.copy() for a in arrays]
    kernels.unpack(table, flat, 1 / scale)
    for a, b in zip(arrays, before, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("dtype", REALS)
@given(st.lists(st.sampled_from(SIZES), min_size=1, max_size=8), st.floats(0, 1))
def test_lerp_moves_members_towards_their_places_in_the_flat_array(dtype, sizes, share):
    table, arrays = members(sizes, dtype)
    flat = np.random.default_rng(len(sizes)).normal(size=table.extent).astype(dtype)
    before = [a.astype(np.float64) for a in arrays]
    kernels.lerp(table, flat, share)
    for row, (a, was) in enumerate(zip(arrays, before, strict=True)):
        there = table.view(flat, row).astype(np.float64)
        np.testing.assert_allclose(a, share * was + (1 - share) * there, rtol=1e-5, atol=1e-6)
        assert share or np.array_equal(a, table.view(flat, row))


def shares(sizes, dtype, stored, every, turn, master, key=77, seed=3):
    """What ``put_share`` makes of what ``take_share`` has taken: that, then arrays, masters, and arrays before it."""
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(n).astype(stored) for n in sizes]
    counts = [-(-n // every) for n in sizes]
    table = BucketLayout([f"p{k}" for k in range(len(sizes))], counts_as_shapes(counts), offsets_of(counts), stored)
    table.dtype, table.records["data"] = np.dtype(dtype), [a.ctypes.data for a in arrays]
    masters = [a.astype(dtype) * dtype(1.0001) for a in arrays]
    if master:
        table.records["wide"], table.records["master"] = [a.ctypes.data for a in masters], 1
    before = [a.copy() for a in arrays]
    flat, lengths = np.full(table.extent, np.nan, dtype), np.array(sizes)
    kernels.take_share(table, flat, lengths, every, turn, key)
    kernels.put_share(table, flat, lengths, every, turn, key, 3.0, np.ones(1, np.int64))  # is refused
    assert all(a.tobytes() == b.tobytes() for a, b in zip(arrays, before, strict=True))
    kernels.put_share(table, flat, lengths, every, turn, key, 2.0)
    return flat, *arrays, *masters, *before


def counts_as_shapes(counts):
    return [(n,) for n in counts]


def offsets_of(counts):
    return (np.cumsum(counts) - counts).tolist()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize(
    ("dtype", "stored"), [(np.float32, np.float32), (np.float64, np.float64), (np.float32, ml_dtypes.bfloat16)]
)
@pytest.mark.parametrize(("every", "turn"), [(1, 0), (3, 2), (50, 17), (20_000, 19_999)])
def test_shares_are_the_entries_of_a_formula_in_integers(every, turn, dtype, stored, master):
    """Those of a master are taken from it, and go to both; 0 is sent for a last block that is too short."""
    sizes = [*SIZES, 3 * CHUNK * 3 + 1]
    flat, *rest = shares(sizes, dtype, stored, every, turn, master)
    arrays, masters, before = (rest[k * len(sizes) : (k + 1) * len(sizes)] for k in range(3))
    taken = iter(flat)
    for array, wide, old, places in zip(
        arrays, masters, before, reference.chosen_by_key(sizes, every, 77, turn), strict=True
    ):
        source = old.astype(dtype) * dtype(1.0001) if master else old.astype(dtype)
        inside = [place for place in places if place < old.size]
        sent = [next(taken) for _ in places]
        np.testing.assert_array_equal(sent, [source[place] if place < old.size else 0 for place in places])
        expected, expected_wide = old.copy(), old.astype(dtype) * dtype(1.0001)
        expected[inside] = (2 * source[inside]).astype(stored)
        if master:
            expected_wide[inside] = 2 * source[inside]
        np.testing.assert_array_equal(array.view(np.uint8), expected.view(np.uint8))
        np.testing.assert_array_equal(wide, expected_wide)


def test_pack_counts_what_is_not_finite():
    table, arrays = members([5, CHUNK + 3, 7])
    arrays[1][[0, CHUNK, CHUNK + 2]] = np.inf, np.nan, -np.inf
    arrays[2][6] = np.nan
    bad = np.zeros(3, np.int64)
    kernels.pack(table, zeros(table.extent, "float32"), 1.0, bad, largest("float32"))
    assert bad.tolist() == [0, 3, 1]


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_pack_scales_members_that_live_in_the_bucket_in_place(scale):
    table, arrays = members([5, CHUNK + 3])
    flat = zeros(table.extent, "float32")
    views = [table.view(flat, row) for row in range(2)]
    for v, a in zip(views, arrays, strict=True):
        v[:] = a
    views[1][7] = np.inf
    before, bad = flat.copy(), np.zeros(2, np.int64)
    kernels.pack(table.point_to(views), flat, scale, bad, largest("float32"))
    np.testing.assert_array_equal(flat, before * np.float32(scale))
    assert bad.tolist() == [0, 1]


@pytest.mark.parametrize("dtype", REALS)
@given(st.lists(st.sampled_from(SIZES), min_size=1, max_size=8), st.integers(2, 5))
def test_shares_add_parts_in_rank_order(dtype, sizes, ranks):
    """Every rank adds its own share in place, in the memory of one of the parts, and the shares are a partition."""
    table, _ = members(sizes, dtype)
    parts = [np.random.default_rng(r).standard_normal(table.extent).astype(dtype) for r in range(ranks)]
    total = parts[0].copy()
    for p in parts[1:]:
        total += p
    bad = np.zeros((ranks + 1) * len(sizes), np.int64)
    whole = np.zeros(table.extent, dtype)
    for r in range(ranks):
        mine = parts[r].copy()
        copy = np.zeros(table.extent, dtype)
        here = [mine if k == r else p for k, p in enumerate(parts)]
        kernels.add_parts(table.shard(r, ranks), here, [mine, copy], bad)
        changed = mine != parts[r]
        np.testing.assert_array_equal(copy[changed], mine[changed])
        whole[changed] = mine[changed]
    for row, n in enumerate(sizes):
        np.testing.assert_array_equal(table.view(whole, row), table.view(total, row))
        assert n == table.view(whole, row).size
    assert not bad.any()


@pytest.mark.parametrize("dtype", REALS)
@given(st.lists(st.sampled_from(SIZES), min_size=1, max_size=8), st.integers(1, 5))
def test_shares_add_parts_on_the_grids_of_the_flat_array(dtype, sizes, ranks):
    """Wherever members and shares begin in a chunk of it."""
    table, _ = members(sizes, dtype)
    rng = np.random.default_rng(len(sizes))
    parts = [(rng.standard_normal(table.extent) * 2.0 ** rng.integers(-30, 30)).astype(dtype) for _ in range(ranks)]
    most, total = np.zeros(-(-table.extent // CHUNK), np.float32), np.zeros(table.extent)
    for p in parts:
        kernels.largest_magnitudes(p, most)
    for p in parts:
        kernels.add_on_grid(p, total, most, max(2, (ranks - 1).bit_length()))
    expected, whole, mine = parts[0].copy(), np.zeros(table.extent, dtype), parts[-1].copy()
    kernels.round_sums(total, expected)
    bad = np.zeros((ranks + 1) * len(sizes), np.int64)
    for r in range(ranks):
        kernels.add_parts_on_grid(table.shard(r, ranks), [*parts[:-1], mine], [whole, mine], most, bad)
    for row in range(len(sizes)):
        np.testing.assert_array_equal(table.view(whole, row), table.view(expected, row))
        np.testing.assert_array_equal(table.view(mine, row), table.view(expected, row))
    assert not bad.any()


def test_where_there_is_no_grid_terms_that_are_not_finite_are_counted_alone():
    table, _ = members([5, CHUNK + 3])
    parts = [np.zeros(table.extent, np.float32) for _ in range(3)]
    parts[1][table.records["offset"][1] + CHUNK] = np.nan  # a chunk that the second member alone has
    parts[0][3] = parts[1][3] = 3e38
    most, bad, total = np.array([3e38, np.inf], np.float32), np.zeros((4, 2), np.int64), np.zeros_like(parts[0])
    kernels.add_parts_on_grid(table, parts, [total], most, bad.reshape(-1))
    assert bad.tolist() == [[0, 0], [0, 1], [0, 0], [1, 0]]
    assert total[3] == np.inf
    assert set(total[CHUNK:].view(np.uint32).tolist()) == {0x7FC00000}


def test_add_parts_counts_what_is_not_finite_by_part():
    table, _ = members([5, CHUNK + 3])
    parts = [np.zeros(table.extent, np.float32) for _ in range(3)]
    parts[1][table.records["offset"][1] + CHUNK] = np.nan
    parts[2][[1, 2]] = np.inf, -np.inf
    parts[0][3] = parts[1][3] = 3e38
    bad = np.zeros((4, 2), np.int64)
    kernels.add_parts(table, parts, [np.zeros(table.extent, np.float32)], bad.reshape(-1))
    assert bad.tolist() == [[0, 0], [0, 1], [2, 0], [3, 1]]


def test_a_kernel_may_say_how_many_blocks_it_wants():
    """After its head: the name of a parameter, or the members of its table."""
    texts = "".join(p.read_text() for p in NATIVE.glob("*.cu"))
    marked = dict(re.findall(r"^KERNEL\((\w+)\)\s*\([^)]*\)\s*BLOCKS\((\w+)\)", texts, re.M))
    assert marked == {
        "guess_bounds": "parts",
        "fold_partials": "members",
        "select_chunks": "chunks",
        "sketch_rows": "blocks",
        "transform_tiles": "tiles",
        "pack_sections": "turns",
        "unpack_sections": "turns",
    }
    for name, count in marked.items():
        assert count == "members" or count in [p.name for p in kernels.KERNELS[name].parameters]


@given(
    st.lists(st.sampled_from(SIZES), min_size=1, max_size=8),
    st.lists(st.integers(1, 7), max_size=4),
    st.integers(1, 5),
)
def test_sections_have_of_every_shard_what_lies_in_them(sizes, cuts, ranks):
    """Each rank's chunks of a table, worked on section by section."""
    table, arrays = members(sizes)
    table.point_to(arrays)
    borders = sorted({0, len(sizes), *(c for c in cuts if c < len(sizes))})
    flat = np.arange(table.extent, dtype=np.float32)
    for rank in range(ranks):
        whole, parts = np.zeros_like(flat), np.zeros_like(flat)
        kernels.pack(table.shard(rank, ranks), whole, 1.0, np.zeros(len(sizes), np.int64), largest("float32"))
        for begin, end in itertools.pairwise(borders):
            part = table.section(begin, end)
            to, bad = part.part_of(parts), np.zeros(end - begin, np.int64)
            kernels.pack(part.shard(rank, ranks), to, 1.0, bad, largest("float32"))
            assert part.names == table.names[begin:end]
        np.testing.assert_array_equal(whole, parts)


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("shares", [1, 3])
def test_sums_of_squares_have_one_order(dtype, shares):
    table, arrays = members(SIZES, dtype, seed=2)
    flat, bad = zeros(table.extent, dtype), np.zeros(len(arrays), np.int64)
    kernels.pack(table, flat, 1.0, bad, largest(dtype))
    partial, sums = np.zeros(table.span[1] + len(arrays)), np.zeros(len(arrays))
    for share in range(shares):
        kernels.partial_squares(table.shard(share, shares), flat, partial)
    kernels.fold_partials(table, partial, sums, 1)
    assert sums.tolist() == [reference.sum_of_tensor(a.astype(np.float64) ** 2) for a in arrays]
    np.testing.assert_allclose(sums, [np.sum(a.astype(np.float64) ** 2) for a in arrays], rtol=1e-13)


def folded(chunks, kinds, seed=0):
    """Sums of random sums of chunks, for members of so many chunks each: (chunks' sums, members' sums)."""
    table = BucketLayout([f"p{k}" for k in range(len(chunks))], [(n * CHUNK,) for n in chunks], [0] * len(chunks), "f4")
    partial = np.exp(np.random.default_rng(seed).standard_normal(kinds * max(table.chunks, len(chunks))))
    sums = np.full(kinds * len(chunks), -1.0)
    kernels.fold_partials(table, partial, sums, kinds)
    return partial.reshape(-1, kinds), sums.reshape(-1, kinds)


@pytest.mark.parametrize("kinds", [1, 3])
def test_sums_of_chunks_are_folded_in_one_order(kinds):
    """256 accumulators, from none to several rounds of them."""
    chunks = [1, 0, 3, 255, 256, 257, 1000]
    partial, sums = folded(chunks, kinds)
    parts = np.split(partial[: sum(chunks)], np.cumsum(chunks)[:-1])
    assert sums.tolist() == [[reference.sum_in_turn(p, 256) for p in part.T] for part in parts]
    np.testing.assert_allclose(sums, [part.sum(0) for part in parts], rtol=1e-14)


def test_entries_of_all_ranks_are_added_in_rank_order():
    """Negative indices are no entries; what was in x is gone."""
    index = [np.array([1, 3, CHUNK, -1], np.int32), np.array([3, 4], np.int32), np.array([-1], np.int32)]
    entry = [np.array([1, 1e8, 2, 0], np.float32), np.array([-1e8, 5], np.float32), np.zeros(1, np.float32)]
    x = np.full(CHUNK + 3, 9, np.float32)
    kernels.decode_all(x, index, entry, np.array([4, 2, 1]))
    assert np.flatnonzero(x).tolist() == [1, 4, CHUNK]
    assert x[[1, 4, CHUNK]].tolist() == [1, 5, 2]
    kernels.decode_sparse(x, index[0], entry[0])
    assert x[[0, 1, 3, CHUNK + 2]].tolist() == [0, 2, 1e8, 0]


def test_a_refused_step_changes_nothing():
    x, y, yes = np.ones(5, np.float32), np.ones(5, np.float32), np.ones(1, np.int64)
    kernels.accumulate(x, y, yes)
    assert y.tolist() == [1] * 5
    for answer in (np.zeros(1, np.int64), None):
        kernels.accumulate(x, y, answer)
    assert y.tolist() == [3] * 5
    with pytest.raises(TypeError, match=r"accumulate: arguments must be \['x', 'sum', 'skip'\], got 4"):
        kernels.accumulate(x, y, yes, yes)


@pytest.mark.parametrize("dtype", REALS)
def test_overwrite_writes_members_only_where_kernels_skip(dtype):
    table, _ = members([5, 17, CHUNK + 1], dtype)
    flat = zeros(table.extent, dtype)
    for skip in (None, np.zeros(1, np.int64)):
        kernels.overwrite(table, flat, np.inf, skip)
        assert not flat.any()
    kernels.overwrite(table, flat, np.inf, np.ones(1, np.int64))
    assert all(np.isinf(table.view(flat, row)).all() for row in range(3))
    assert np.isinf(flat).sum() == 5 + 17 + CHUNK + 1


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("n", SIZES)
def test_accumulate_scale_and_clip_equal_numpy(n, dtype):
    x, y = np.random.default_rng(n).standard_normal((2, n)).astype(dtype)
    total = y.copy()
    kernels.accumulate(x, total)
    np.testing.assert_array_equal(total, y + x)
    scaled = x.copy()
    kernels.scale(scaled, 1 / 3)
    np.testing.assert_array_equal(scaled, x * x.dtype.type(1 / 3))
    clipped = np.concatenate([x, np.array([np.nan, np.inf, -np.inf], dtype)])
    want = np.clip(clipped, -0.5, 0.5)
    kernels.clip(clipped, 0.5)
    np.testing.assert_array_equal(clipped, want)


EDGES = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 2**-14, 2**-24, 2**-25, 2**-25 * 1.001])


def patterns(dtype):
    """Bit patterns of all kinds: every exponent, ties and what lies just beside them."""
    rng = np.random.default_rng(3)
    wide = rng.integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    brains = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        ties = [(v[:-1].astype(np.float64) + v[1:]) / 2 for v in (halves, brains)]
        beside = [t * (1 + e) for t in ties for e in (2.0**-50, -(2.0**-50))]
        return np.concatenate([EDGES, wide, halves, brains, *ties, *beside]).astype(dtype)


@pytest.mark.filterwarnings("ignore:overflow|invalid")
@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize(
    ("narrow", "widen", "wire"),
    [("to_half", "from_half", np.float16), ("to_bfloat16", "from_bfloat16", ml_dtypes.bfloat16)],
)
def test_casts_round_once_to_nearest_even(narrow, widen, wire, dtype):
    x = patterns(dtype)
    got = np.empty(x.size, wire)
    getattr(kernels, narrow)(x, got)
    back = np.empty(x.size, dtype)
    getattr(kernels, widen)(got, back)
    np.testing.assert_array_equal(back, got.astype(dtype))  # widening is exact
    assert (np.isnan(back) == np.isnan(x)).all()
    np.testing.assert_array_equal(np.signbit(back), np.signbit(x))
    if wire is np.float16:
        np.testing.assert_array_equal(got, x.astype(np.float16))
    bits = got.view(np.uint16) & 0x7FFF
    finite = (bits > 0) & (bits < (0x7BFF if wire is np.float16 else 0x7F7F))
    ours, of = back[finite].astype(np.float64), x[finite].astype(np.float64)
    for step in (-1, 1):
        other = (got.view(np.uint16)[finite].astype(int) + step).astype(np.uint16).view(wire).astype(np.float64)
        distance, theirs = abs(ours - of), abs(other - of)
        assert ((distance < theirs) | ((distance == theirs) & (bits[finite] % 2 == 0))).all()


def test_flat_kernels_refuse_wrong_dtypes_sizes_and_strides():
    x = np.zeros(4, np.float32)
    with pytest.raises(TypeError, match=r"accumulate: sum must be contiguous float32, got float64"):
        kernels.accumulate(x, x.astype(np.float64))
    with pytest.raises(ValueError, match=r"accumulate: sum must be of the others' size, got 5 elements"):
        kernels.accumulate(x, np.zeros(5, np.float32))
    with pytest.raises(TypeError, match=r"scale: arguments must be \['x', 'factor', 'skip'\], got 1"):
        kernels.scale(x)
    with pytest.raises(TypeError, match=r"arrays must be of float32 or float64, got int32"):
        kernels.scale(x.astype(np.int32), 1.0)
    with pytest.raises(TypeError, match="not contiguous"):
        kernels.scale(np.zeros(8, np.float32)[::2], 1.0)
    with pytest.raises(ValueError, match="pack: flat must be of the others' size, got 3 elements"):
        kernels.pack(members([5])[0], np.zeros(3, np.float32), 1.0, np.zeros(1, np.int64), 1.0)


def test_a_table_refuses_arrays_of_another_shape_or_dtype():
    table, arrays = members([5, 6])
    assert table.point_to(list(arrays)) is table
    for wrong in (np.zeros(6, np.float64), np.zeros(7, np.float32), np.zeros(12, np.float32)[::2]):
        with pytest.raises(TypeError, match=r"p1 must be a contiguous array \(6,\) float32"):
            table.point_to([arrays[0], wrong])


def test_memory_is_aligned_and_zero():
    for n, dtype in itertools.product([0, 1, 100, 2**19, 10**6], REALS):
        a = zeros(n, dtype)
        assert (a.size, a.dtype) == (n, dtype)
        assert n == 0 or a.ctypes.data % (2 << 20 if a.nbytes >= 2 << 20 else 64) == 0
        assert not a.any()


def compiler():
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


def compiled(folder, name, *flags):
    """Some texts for float, with extra flags, as a library."""
    units = []
    for text in ("blocks", "cast", "codec", "packed", "reduce", "sgd", "topk_host"):
        unit = folder / f"{name}-{text}.o"
        plain = ["-x", "c++", "-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-trapping-math", "-Dreal=float"]
        subprocess.run([compiler(), *plain, *flags, "-c", NATIVE / f"{text}.cu", "-o", unit], check=True)
        units.append(unit)
    library = folder / f"{name}.so"
    subprocess.run([compiler(), "-shared", "-o", library, *units], check=True)
    return ctypes.CDLL(str(library))


def levels():
    """The SIMD levels of this CPU."""
    if os.uname().machine != "x86_64":
        return ["native"]
    with open("/proc/cpuinfo") as f:
        flags = f.read()
    return ["x86-64"] + ["x86-64-v3"] * ("avx2" in flags) + ["x86-64-v4"] * ("avx512vl" in flags)


@pytest.mark.full
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="SIMD levels are those of x86-64")
def test_every_simd_level_gives_the_same_bits(tmp_path):
    """Compiled by this test; ``test_simd.py`` compares the libraries that were built."""
    results = set()
    for level in levels():
        library = compiled(tmp_path, level, f"-march={level}")
        results.add(_some_steps(lambda name, library=library: getattr(library, f"{name}_float")))
    results.add(_some_steps(lambda name: getattr(signatures.library(), f"{name}_float")))
    assert len(levels()) > 1
    assert len(results) == 1


def _some_steps(function):
    """Bytes of what momentum SGD, a cast, selection, codes and packing make of the same numbers."""
    table, arrays = members(SIZES, seed=5)
    grad, buffer = np.random.default_rng(1).standard_normal((2, table.extent)).astype(np.float32)
    now = KernelStruct("Momentum")
    now.write(scale=1 / 3, limit=0.7, lr=0.1, decay=1e-3, momentum=0.9, gain=0.8)
    pointer = ctypes.c_void_p
    for _ in range(5):
        function("sgd_momentum")(
            table.table(None),
            pointer(grad.ctypes.data),
            pointer(buffer.ctypes.data),
            pointer(now.address(None)),
            None,
        )
    wire = np.empty(grad.size, np.uint16)
    function("to_half")(ctypes.c_longlong(grad.size), pointer(grad.ctypes.data), pointer(wire.ctypes.data))
    found = [*arrays, buffer, wire, *_selected(function, grad, buffer), *_coded(function, table, grad, buffer)]
    found += _blocks(function, table, grad, buffer)
    found += [a for value in VALUES for a in _packed(function, grad, value)]
    return b"".join(a.tobytes() for a in found)


def _selected(function, x, add):
    """All that selection writes: many ties, a threshold and the largest."""
    x, add, place = x.round(1), add.round(1), np.zeros(2, np.int64)
    k, room = 1000, x.size + CHUNK
    found = [(np.zeros(size, np.int32), np.zeros(size, np.float32)) for size in (room, k, room)]
    planes = [[ctypes.c_void_p(plane.ctypes.data) for plane in pair] for pair in found]
    size, pointer = ctypes.c_longlong, lambda a: ctypes.c_void_p(a.ctypes.data)
    both = (size(x.size), pointer(x), size(x.size), pointer(add))
    bound = size(int(np.float32(2).view("i4")))
    function("encode_above")(*both, size(room), *planes[0], size(2), pointer(place), bound, None)
    edges, *whole = (np.array(numbers) for numbers in ([0, x.size // 2, x.size // 2 + 9, x.size], [0], [x.size], [k]))
    velocity, parts = (
        add.copy(),
        (size(4), pointer(edges), size(1), *map(pointer, whole), size(k), *planes[1], size(room), *planes[2], None),
    )
    for moves, nesterov in ((0, 0), (x.size, 0), (x.size, 1)):
        moved = (size(moves), pointer(velocity), ctypes.c_double(0.9), size(nesterov))
        function("encode_largest")(*both, *moved, *parts)
    return x, velocity, place, found[0][0][: place[1]], found[0][1][: place[1]], *found[1]


def _coded(function, table, x, add):
    """All that codes of two bits and one write."""
    kept, more, sums = x.copy(), add.copy(), np.zeros((2, x.size), np.float32)
    two, one, partial = np.zeros(x.size, np.uint8), np.zeros(x.size, np.uint8), np.zeros(table.span[1])
    number, size, pointer = ctypes.c_double, ctypes.c_longlong, lambda a: ctypes.c_void_p(a.ctypes.data)
    function("encode_two_bits")(
        size(x.size), pointer(kept), pointer(more), size(1), size(two.size), pointer(two), number(0.3), None
    )
    function("partial_magnitudes")(table.table(None), pointer(more), pointer(x), size(1), pointer(partial), None)
    function("mean_of_partials")(size(partial.size), pointer(partial), size(1), pointer(one), number(x.size), None)
    rest = table.table(None), pointer(more), pointer(more), size(0), pointer(one), size(4), number(0.1), None
    function("encode_one_bit")(*rest)
    addresses = [np.array([payload.ctypes.data] * 3) for payload in (two, one)]
    function("decode_two_bits")(size(x.size), pointer(sums[0]), size(3), pointer(addresses[0]), number(0.3))
    function("decode_one_bit")(table.table(None), pointer(sums[1]), size(3), pointer(addresses[1]), size(4))
    return kept, more, two, one, sums


def _blocks(function, table, x, add):
    """All that blocks of integers write, of 8 bits and of 4, to the nearest and at random."""
    size, pointer = ctypes.c_longlong, lambda a: ctypes.c_void_p(a.ctypes.data)
    sizes, sums, found = table.records["size"].astype(np.int64), np.zeros_like(x), []
    place, first = np.cumsum(2 * sizes + 16) // 4 * 4, np.zeros_like(sizes)
    for verb, random in (("encode", ()), ("dither", (size(123456789012345), size(7)))):
        for kind in ("int8", "int4"):
            kept, payload = x.copy(), np.zeros(int(place[-1]) + 2 * x.size, np.uint8)
            to = pointer(payload), pointer(place), size(64)
            function(f"{verb}_{kind}")(table.table(None), pointer(kept), pointer(add), size(1), *to, *random, None)
            both = np.array([payload.ctypes.data] * 2)
            of = pointer(both), pointer(place), pointer(first), size(2), size(64), size(1)
            function(f"decode_{kind}")(table.table(None), pointer(sums), size(2), *of)
            found += [kept, payload, sums.copy()]
    return found


def _packed(function, x, value):
    """A payload of every third entry, and what comes out of it."""
    index, kept = np.arange(1, x.size, 3, dtype=np.int32), np.zeros_like(x)
    entry, layout = x[index], packing(x.size, index.size, value)
    payload, places, values = np.zeros(int(layout["bytes"][0]), np.uint8), np.zeros_like(index), np.zeros_like(entry)
    size, pointer = ctypes.c_longlong, lambda a: ctypes.c_void_p(a.ctypes.data)
    planes, where = (size(index.size), pointer(index), pointer(entry)), pointer(layout)
    function("pack_planes")(size(x.size), pointer(kept), *planes, size(payload.size), pointer(payload), where)
    addresses = np.array([payload.ctypes.data])
    function("unpack_planes")(size(1), pointer(addresses), size(index.size), pointer(places), pointer(values), where)
    return payload, kept, places, values


DRIVER = pathlib.Path(__file__).with_name("edges.cpp")


def test_the_driver_of_edge_sizes_calls_every_kernel_of_the_host():
    called = set(re.findall(r"\b(\w+)_float\(", DRIVER.read_text()))
    on_hosts = {name for name, found in kernel_signatures().items() if found.source != "topk_device.cu"}
    assert called == on_hosts


@pytest.mark.thorough
@pytest.mark.parametrize("level", levels())
def test_no_host_kernel_accesses_memory_outside_of_its_arrays(level, tmp_path):
    """A driver of its own under the address and undefined-behaviour sanitizers, at edge sizes.

    Nothing is optimized: no access is left out, and compiling takes a quarter of what it takes with -O1.
    """
    driver = tmp_path / "driver"
    flags = ["-std=c++17", "-O0", "-g", "-Dreal=float", f"-march={level}", f"-I{NATIVE}"]
    subprocess.run(
        [compiler(), *flags, "-fsanitize=address,undefined", "-fno-sanitize-recover", DRIVER, "-o", driver], check=True
    )
    done = subprocess.run([driver], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


def test_the_reference_sgd_has_the_worked_values():
    """Nesterov's and the plain form by hand, for one step from zero."""
    w, b = reference.sgd(np.array([1.0]), np.array([0.0]), np.array([2.0]), lr=0.1, momentum=0.9, nesterov=True)
    np.testing.assert_allclose([w[0], b[0]], [1 - 0.1 * (2 + 0.9 * 2), 2.0])
