"""The SIMD levels of the host library: which one is loaded, and that all of them compute the same bits."""

import os

import pytest

from distopt import texts
from test_kernels import _some_steps, levels

X86 = os.uname().machine == "x86_64"


@pytest.mark.skipif(not X86, reason="SIMD levels are those of x86-64")
def test_the_library_is_that_of_the_cpu_or_of_the_limit():
    best = {"x86-64": "v1", "x86-64-v3": "v3", "x86-64-v4": "v4"}[levels()[-1]]
    expected = min(best, {"v2": "v1"}.get(texts.simd_limit(), texts.simd_limit()))
    assert texts.library().cpu_level().decode() == best
    assert texts.library().simd_level().decode() == expected
    assert texts.simd_level() == texts.SIMD_NAMES[expected]


@pytest.mark.skipif(not X86, reason="SIMD levels are those of x86-64")
@pytest.mark.parametrize(("limit", "level"), [("v1", "v1"), ("v2", "v1"), ("v3", "v3")])
def test_a_limit_lowers_the_level(monkeypatch, limit, level):
    monkeypatch.setenv("DISTOPT_SIMD", limit)
    best = texts.library().cpu_level().decode()
    assert texts.library.__wrapped__().simd_level().decode() == min(level, best)


@pytest.mark.parametrize("limit", ["", "v5", "avx2", "V3"])
def test_an_unknown_limit_is_refused_by_name(monkeypatch, limit):
    monkeypatch.setenv("DISTOPT_SIMD", limit)
    with pytest.raises(ValueError, match=rf"DISTOPT_SIMD must be one of v1, v2, v3, v4, or not set, got '{limit}'"):
        texts.library.__wrapped__()


def test_all_libraries_that_this_cpu_runs_are_built_from_one_text_and_give_the_same_bits():
    here = texts.library().cpu_level().decode()
    levels_here = [level for level in ("v1", "v3", "v4") if level <= here]
    found = [texts._opened("" if level == "v1" else f"-{level}") for level in levels_here]
    assert {library.source_hash().decode() for library in found} == {texts.source_hash()}
    assert [library.simd_level().decode() for library in found] == levels_here
    steps = {_some_steps(lambda name, library=library: getattr(library, f"{name}_float")) for library in found}
    assert len(steps) == 1
