"""The SIMD levels of the host library: which one is loaded, and that all of them compute the same bits."""

import ctypes
import os

import ml_dtypes
import numpy as np
import pytest
from test_kernels import _some_steps, levels, patterns

from distopt import kernels
from distopt.kernels import signatures
from distopt.kernels.layout import BucketLayout

X86 = os.uname().machine == "x86_64"


@pytest.mark.skipif(not X86, reason="SIMD levels are those of x86-64")
def test_the_loaded_library_is_the_best_of_the_cpu_within_the_limit():
    best = {"x86-64": "v1", "x86-64-v3": "v3", "x86-64-v4": "v4"}[levels()[-1]]
    expected = min(best, {"v2": "v1"}.get(signatures.simd_limit(), signatures.simd_limit()))
    assert signatures.library().cpu_level().decode() == best
    assert signatures.library().simd_level().decode() == expected
    assert signatures.simd_level() == signatures.SIMD_NAMES[expected]


@pytest.mark.skipif(not X86, reason="SIMD levels are those of x86-64")
@pytest.mark.parametrize(("limit", "level"), [("v1", "v1"), ("v2", "v1"), ("v3", "v3")])
def test_distopt_simd_lowers_the_level(monkeypatch, limit, level):
    monkeypatch.setenv("DISTOPT_SIMD", limit)
    best = signatures.library().cpu_level().decode()
    assert signatures.library.__wrapped__().simd_level().decode() == min(level, best)


@pytest.mark.parametrize("limit", ["", "v5", "avx2", "V3"])
def test_an_unknown_limit_is_refused_by_name(monkeypatch, limit):
    monkeypatch.setenv("DISTOPT_SIMD", limit)
    with pytest.raises(ValueError, match=rf"DISTOPT_SIMD must be one of v1, v2, v3, v4, or not set, got '{limit}'"):
        signatures.library.__wrapped__()


def test_all_libraries_that_this_cpu_runs_are_built_from_one_text_and_give_the_same_bits():
    found = _libraries()
    assert {library.source_hash().decode() for library in found} == {signatures.source_hash()}
    assert [library.simd_level().decode() for library in found] == ["v1", "v3", "v4"][: len(found)]
    steps = {_some_steps(lambda name, library=library: getattr(library, f"{name}_float")) for library in found}
    assert len(steps) == 1


FORMATS = {"half": (np.float16, 65504.0), "bfloat16": (ml_dtypes.bfloat16, 1e38)}


def _libraries():
    """Of all levels that this CPU runs, the lowest first."""
    here = signatures.library().cpu_level().decode()
    return [signatures._opened("" if level == "v1" else f"-{level}") for level in ("v1", "v3", "v4") if level <= here]


def _converted(library, x, wire, name):
    """Bytes of all that kernels make of numbers and of 16 bits, in a format."""
    n, pointer, number = ctypes.c_longlong(x.size), lambda a: ctypes.c_void_p(a.ctypes.data), ctypes.c_double
    most = FORMATS[name][1]

    def call(verb, *given):
        getattr(library, f"{verb}_{name}_float")(n, *given)

    sent, copied, narrow, summed, of_both = (np.empty(x.size, np.uint16) for _ in range(5))
    rest, wide, back, total, kept = x.copy(), np.empty_like(x), np.empty_like(x), x.copy(), x.copy()
    parts = np.array([wire.ctypes.data, sent.ctypes.data, wire.ctypes.data])
    # which of two NaN a sum is, IEEE 754 leaves open
    none, addend = ctypes.c_longlong(0), np.where(np.isnan(x), np.float32(1), x[::-1])
    call("encode", pointer(rest), pointer(sent), none, None, number(0.25), number(most), None)
    call("encode", pointer(kept), pointer(of_both), n, pointer(addend), number(0.25), number(most), None)
    call("copy", pointer(x), pointer(copied), number(0.25), number(most), None)
    call("to", pointer(x), pointer(narrow))
    call("from", pointer(wire), pointer(wide))
    call("decode", pointer(wire), pointer(back), number(0.25))
    call("add", pointer(wire), pointer(total))
    call("sum", pointer(summed), ctypes.c_longlong(3), pointer(parts))
    np.testing.assert_array_equal(copied, sent)
    return b"".join(a.tobytes() for a in (sent, narrow, summed, rest, wide, back, total, kept, of_both))


@pytest.mark.parametrize("name", FORMATS)
def test_every_level_converts_numbers_of_16_bits_alike(name):
    """All of the 65,536, NaN of every kind included, and numbers of every exponent, ties and what is beside them."""
    x = np.concatenate([patterns("float32"), np.arange(2**16, dtype=np.uint32).view(np.float32)])
    wire = np.resize(np.arange(2**16, dtype=np.uint16), x.size)
    assert len({_converted(library, x, wire, name) for library in _libraries()}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_every_level_converts_every_float_alike(name):
    step = 1 << 24
    for start in range(0, 1 << 32, step):
        x = np.arange(start, start + step, dtype=np.uint32).view(np.float32)
        wire = np.resize(np.arange(2**16, dtype=np.uint16), x.size)
        assert len({_converted(library, x, wire, name) for library in _libraries()}) == 1, hex(start)


@pytest.mark.filterwarnings("ignore:overflow|invalid")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_sum_of_16_bits_is_added_in_order_and_rounded_once(name, ranks):
    rng, dtype = np.random.default_rng(ranks), FORMATS[name][0]
    parts = [rng.standard_normal(10_001).astype(np.float32).astype(dtype) for _ in range(ranks)]
    expected = parts[0].astype(np.float32)
    for part in parts[1:]:
        expected += part.astype(np.float32)
    found = np.empty_like(parts[0])
    getattr(kernels, f"sum_{name}")(found, parts)
    np.testing.assert_array_equal(found.view(np.uint16), expected.astype(dtype).view(np.uint16))
    table = BucketLayout(["a", "b"], [(5000,), (4993,)], [0, 5008], np.float32)
    total = np.full(10_001, 7, np.float32)
    for share in range(3):
        getattr(kernels, f"add_{name}_parts")(table.shard(share, 3), parts, total, 0.25)
    np.testing.assert_array_equal(total[:5000], expected[:5000].astype(dtype).astype(np.float32) * 4)
    np.testing.assert_array_equal(total[5008:], expected[5008:].astype(dtype).astype(np.float32) * 4)
    assert (total[5000:5008] == 7).all()
    getattr(kernels, f"sum_{name}")(parts[-1], parts)  # in the place of one of them
    np.testing.assert_array_equal(parts[-1].view(np.uint16), expected.astype(dtype).view(np.uint16))
