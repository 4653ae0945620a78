"""All laws, on thread ranks and on MPI ranks.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import laws
from distopt import run_ranks
from distopt.buckets import plan
from distopt.compress import Dense, Half, Int4, Int8, OneBit, Packed, Threshold, TopK, TwoBit
from launch import needs_mpi, run_mpi
from transports import RUN

COMPRESSORS = [
    Dense(),
    Half(),
    Half(predivide=False),
    Half("bfloat16"),
    TopK(0.01),
    TopK(0.5),
    TopK(1.0),
    Threshold(0),
    Threshold(0.7),
    Packed(TopK(0.5)),
    Packed(TopK(1.0), value="int8"),
    Packed(Threshold(0.7), value="bfloat16"),
    Int8(),
    Int4(),
]
ROUNDING = [TwoBit(0.5), TwoBit(0.3), OneBit(), OneBit(scale="unit"), OneBit(0.3)]
ROUNDING += [Packed(TopK(0.5), value="2bit"), Packed(TopK(1.0), value="2bit")]
ROUNDING += [Int8(rounding="stochastic"), Int4(rounding="stochastic")]  # what stays behind


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@given(
    x=hnp.arrays(np.float32, st.integers(0, 300), elements=st.floats(allow_nan=False, allow_infinity=False, width=32)),
    size=st.integers(1, 9),
)
def test_what_is_sent_and_what_stays_add_up_to_the_gradient(compressor, x, size):
    """Over the whole range of float32: what 16 bits cannot hold stays in the residual."""
    laws.conservation(compressor, x, size)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@given(x=hnp.arrays(np.float64, st.integers(0, 300), elements=st.floats(-1e5, 1e5)))
def test_what_is_sent_and_what_stays_add_up_in_float64(compressor, x):
    """To the bit where the format has room below; what is too small for it stays behind whole."""
    laws.conservation(compressor, x)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("compressor", ROUNDING, ids=repr)
@given(x=hnp.arrays(np.float32, st.integers(0, 300), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_rounding_compressors_lose_at_most_one_ulp(compressor, dtype, x):
    laws.conservation(compressor, x.astype(dtype), ulps=1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(
    x=hnp.arrays(np.float32, st.integers(0, 300), elements=st.floats(-1, 1, width=32)),
    power=st.integers(-100, 100),
    multiple=st.integers(0, 23),
)
def test_two_bit_codes_lose_nothing_if_the_threshold_is_a_power_of_two(dtype, x, power, multiple):
    """To the bit, as long as the threshold is no less than the last place of what is sent."""
    laws.conservation(TwoBit(2.0**power), x.astype(dtype) * 2.0 ** (power + multiple))


@pytest.mark.parametrize("transport", RUN)
def test_each_law_holds_once_on_three_ranks(transport):
    RUN[transport](3, laws.each_once)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 4, 8])
def test_each_law_holds_once_on_other_numbers_of_threads(size):
    run_ranks(size, laws.each_once)


@pytest.mark.thorough
def test_all_laws_hold_on_threads():
    run_ranks(3, laws.all_of_them)


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("transport", RUN)
def test_all_laws_hold_on_every_number_of_ranks(transport, size):
    RUN[transport](size, laws.all_of_them)


@needs_mpi
@pytest.mark.parametrize(
    "size", [*(pytest.param(n, marks=pytest.mark.full) for n in (2, 3)), pytest.param(4, marks=pytest.mark.slow)]
)
def test_all_laws_hold_on_mpi(size, tmp_path):
    """All modes have the bits of threads, where all laws hold with them, in ``test_digests.py``."""
    found = run_mpi(size, laws.all_of_them, tmp_path, timeout=400)
    expected = run_ranks(size, laws.independence)  # law 6: the backend does not change bits either
    assert [r["digests"].tolist() for r in found] == expected


def each_once(comm):
    laws.each_once(comm)
    return {"digests": np.array(laws.independence(comm))}


@needs_mpi
def test_each_law_holds_once_on_three_ranks_of_mpi(tmp_path):
    found = run_mpi(3, each_once, tmp_path)
    assert [r["digests"].tolist() for r in found] == run_ranks(3, laws.independence)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 60))
def test_dense_training_of_any_shapes_and_threshold_equals_sgd_on_the_mean(sizes, ranks, threshold):
    def main(comm):
        params, _ = laws.train(comm, steps=2, shapes=[(n,) for n in sizes], threshold=threshold)
        laws.same_on_all_ranks(comm, laws.digest(params))
        return params

    whole = run_ranks(1, lambda comm: laws.train(comm, steps=0, shapes=[(n,) for n in sizes])[0])[0]
    for k, (p, w) in enumerate(zip(run_ranks(ranks, main)[0], whole, strict=True)):
        opt = laws.sgd()
        for step in range(2):
            grads = [laws.gradients(whole, step, r)[k].astype(np.float64) for r in range(ranks)]
            opt.apply(w.name, w.data, np.mean(grads, 0).astype(np.float32))
            opt.step()
        np.testing.assert_allclose(p.data, w.data, rtol=0, atol=1e-6)


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(["float32", "float64"])), min_size=1, max_size=60),
    st.integers(0, 4000),
)
def test_a_plan_is_a_partition(arrays, threshold):
    """Law 4, and SINGA's rule."""
    sizes, dtypes = zip(*arrays, strict=True)
    names = [f"p{k}" for k in range(len(sizes))]
    buckets = plan(names, sizes, dtypes, threshold).buckets
    assert sorted(n for b in buckets for n in b.names) == sorted(names)
    for b in buckets:
        ends = [o + s for o, s in zip(b.offsets, b.sizes, strict=True)]
        assert all(end <= start for end, start in zip(ends, b.offsets[1:], strict=False))
        assert all(o * b.dtype.itemsize % 64 == 0 for o in b.offsets)
        assert b.size == ends[-1]
        assert {dtypes[names.index(n)] for n in b.names} == {str(b.dtype)}
        assert [sizes[names.index(n)] for n in b.names] == list(b.sizes)
        assert len(b.names) == 1 or sum(b.sizes) <= 2 * threshold
        assert [names.index(n) for n in b.names] == sorted(names.index(n) for n in b.names)


def test_one_rank_is_the_wrapped_optimizer_alone():
    """Law 3 at N = 1: to the bit."""

    def main(comm):
        params, _ = laws.train(comm)
        return params

    alone, opt = laws.parameters(), laws.sgd()
    for step in range(4):
        opt(zip(alone, laws.gradients(alone, step, 0), strict=True))
    assert laws.digest(run_ranks(1, main)[0]) == laws.digest(alone)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(0, 60),
    st.sampled_from([mode for mode in laws.MODES if mode not in laws.APART]),
    st.sampled_from(["float32", "float64"]),
)
def test_every_mode_has_one_result_on_all_ranks(sizes, ranks, threshold, mode, dtype):
    """Law 5 for any sizes: the same bits on every rank, and nothing that is not finite."""

    def main(comm):
        shapes = [(n,) for n in sizes]
        params, _ = laws.train(comm, steps=2, shapes=shapes, threshold=threshold, mode=mode, dtype=dtype)
        laws.same_on_all_ranks(comm, laws.digest(params))
        assert all(np.isfinite(p.data).all() for p in params)

    run_ranks(ranks, main)
