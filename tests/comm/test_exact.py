"""Sums that do not depend on their order: the grid is that of the largest number, whoever adds up what first."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_half_in_shared_memory import Apart, Counting

from distopt import DistOpt, Parameter
from distopt.buckets import plan
from distopt.comm import Exact, LocalCommunicator, Logical, Metered, Ordered, run_ranks
from distopt.comm.exact import as_deterministic, sum_exactly
from distopt.compress import ErrorFeedback, Half, TopK
from distopt.optim import SGD

CHUNK = 4096


def exact_sum(arrays):
    """The sum over ranks of arrays, each entry rounded to the grid of its chunk: rational numbers, rounded once."""
    ranks, total = len(arrays), np.empty_like(arrays[0])
    bits = max(2, (ranks - 1).bit_length())
    for start in range(0, total.size, CHUNK):
        rows = [x[start : start + CHUNK] for x in arrays]
        most = max(np.abs(row).max(initial=0) for row in rows)
        # The smallest power of two above all of them; subnormal numbers have that of the smallest normal ones.
        above = max(np.frexp(np.float64(most))[1], -125)
        grid = Fraction(2) ** int(above + bits - 53)
        for k in range(rows[0].size):
            whole = sum(round(Fraction(float(row[k])) / grid) for row in rows) * grid
            total[start + k] = np.float32(whole.numerator / whole.denominator)
    return total


def numbers(rank, n, spread):
    rng = np.random.default_rng((rank, n, spread))
    return (rng.standard_normal(n) * 2.0 ** rng.integers(-spread, spread + 1, n)).astype(np.float32)


@pytest.mark.parametrize("spread", [0, 20, 60])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_sums_are_those_of_rational_numbers_on_the_grid(ranks, spread):
    arrays = [numbers(rank, CHUNK + 300, spread) for rank in range(ranks)]

    def main(comm):
        x = arrays[comm.rank].copy()
        Exact(comm).all_reduce(x)
        return x

    for found in run_ranks(ranks, main):
        np.testing.assert_array_equal(found, exact_sum(arrays))


@given(st.integers(1, 7), st.integers(1, 3 * CHUNK), st.integers(0, 100), st.randoms())
def test_whoever_adds_up_what_the_sum_is_the_same(ranks, n, spread, random):
    arrays = [numbers(rank, n, spread) for rank in range(ranks)]
    shuffled = random.sample(arrays, ranks)
    processes = random.randint(1, ranks)

    def main(comm):
        logical = Logical(comm, ranks)
        own = [shuffled[rank].copy() for rank in logical.ranks.here]
        sum_exactly(logical, own, ranks)
        return own[-1].tobytes()

    alone = [x.copy() for x in arrays]
    sum_exactly(LocalCommunicator(), alone, ranks)
    assert set(run_ranks(processes, main)) == {alone[-1].tobytes()}


def test_what_is_within_2_to_the_27th_of_the_largest_loses_nothing():
    arrays = [numbers(rank, 2000, 8) for rank in range(4)]
    total = [x.copy() for x in arrays]
    sum_exactly(LocalCommunicator(), total, 4)
    np.testing.assert_array_equal(total[-1], sum(x.astype(np.float64) for x in arrays).astype(np.float32))


def test_a_chunk_with_a_number_that_is_not_finite_is_none():
    for wrong in (np.inf, -np.inf, np.nan):
        x = np.ones(3 * CHUNK, np.float32)
        x[CHUNK + 5] = wrong
        sum_exactly(LocalCommunicator(), [x], 1)
        assert np.isnan(x[CHUNK : 2 * CHUNK]).all()
        assert (x[:CHUNK] == 1).all()
        assert (x[2 * CHUNK :] == 1).all()


def test_a_sum_beyond_float32_is_infinite_and_nothing_stays_nothing():
    x = [np.array([3e38, -3e38, 0, 1e-45], np.float32) for _ in range(2)]
    sum_exactly(LocalCommunicator(), x, 2)
    assert x[-1].tolist() == [np.inf, -np.inf, 0, 0]  # 1e-45 is beyond the grid of 3e38
    small = np.array([1e-45, 0, -1e-40], np.float32)
    x = [small.copy() for _ in range(2)]
    sum_exactly(LocalCommunicator(), x, 2)
    np.testing.assert_array_equal(x[-1], 2 * small)
    sum_exactly(LocalCommunicator(), [np.empty(0, np.float32)], 1)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int64])
def test_other_dtypes_are_added_in_rank_order(dtype):
    def main(comm):
        x = np.array([1e4, 1, -1e4], dtype)[[comm.rank]]
        y = x.copy()
        as_deterministic(comm, "exact").all_reduce(x)
        Ordered(comm).all_reduce(y)
        return x.tolist() == y.tolist()

    assert all(run_ranks(3, main))


def test_a_ledger_has_what_the_sum_sends():
    n = 5 * CHUNK

    def main(comm):
        metered = Metered(comm)
        exact = as_deterministic(metered, "exact")
        assert exact.ledger is metered.ledger
        exact.all_reduce(np.ones(n, np.float32))
        (entry,) = metered.ledger.entries
        return entry.verb, entry.payload, entry.sent

    # Of two ranks each sends 4 bytes of a chunk, 8 of half of the elements, and 4 of the other half.
    assert run_ranks(2, main) == [("all_reduce", 4 * n, 4 * 5 + 8 * n // 2 + 4 * n // 2)] * 2


SHAPES = [(5000,), (0,), (3,), (CHUNK,), (70, 90), (), (2 * CHUNK + 1,)]


def stepped(comm, mixed=False, views=False, spoil=None, **options):
    """The bits of some steps in buckets whose members, and shares, begin anywhere in chunks; what an error says."""
    dtypes = [np.float64 if mixed and k % 2 else np.float32 for k in range(len(SHAPES))]
    params = [Parameter(f"p{k}", np.zeros(s, d)) for k, (s, d) in enumerate(zip(SHAPES, dtypes, strict=True))]
    opt = DistOpt(SGD(1.0, momentum=0.9), comm, threshold=9000, deterministic="exact", **options)
    for p, view in zip(params, opt.parameter_views(params) if views else [p.data for p in params], strict=True):
        p.data = view
    for step in range(3):
        grads = [numbers(10 * step + comm.rank, p.data.size, 30).reshape(p.data.shape) for p in params]
        if spoil and step == 1:
            spoil(grads)
        try:
            opt([(p, g.astype(p.data.dtype)) for p, g in zip(params, grads, strict=True)])
        except FloatingPointError as error:
            return str(error)
    found = b"".join(p.data.tobytes() for p in params)
    comm.barrier()
    return found


@pytest.mark.parametrize("processes", [2, 3, 5])
def test_sums_in_shared_memory_have_the_bits_of_messages(processes):
    def main(comm):
        apart, together = Counting(Apart(comm)), Counting(comm)
        by_messages = stepped(apart)
        assert apart.count == 0
        assert stepped(together) == by_messages == stepped(comm, overlap=True)
        assert together.count
        assert stepped(comm, mixed=True) == stepped(apart, mixed=True)
        assert stepped(comm, clip_norm=1.0) == stepped(apart, clip_norm=1.0)
        assert stepped(comm, views=True) == by_messages
        return by_messages

    assert len(set(run_ranks(processes, main))) == 1


def test_sums_in_shared_memory_are_those_of_rational_numbers():
    sizes, ranks = [300, CHUNK + 5, 2 * CHUNK - 16], 4
    arrays = [[numbers(rank, n, 20) for n in sizes] for rank in range(ranks)]

    def main(comm):
        params = [Parameter(f"p{k}", np.zeros(n, np.float32)) for k, n in enumerate(sizes)]
        DistOpt(SGD(ranks), comm, deterministic="exact")(list(zip(params, arrays[comm.rank], strict=True)))
        return [-p.data for p in params]

    bucket = plan(["0", "1", "2"], sizes, [np.float32] * 3, 10**6).buckets[0]
    flats = [np.zeros(bucket.size, np.float32) for _ in arrays]
    for flat, parts in zip(flats, arrays, strict=True):
        for offset, x in zip(bucket.offsets, parts, strict=True):
            flat[offset : offset + x.size] = x
    total = exact_sum(flats)
    for found in run_ranks(ranks, main):
        for offset, x in zip(bucket.offsets, found, strict=True):
            np.testing.assert_array_equal(x, total[offset : offset + x.size])


@pytest.mark.parametrize("wrong", [np.inf, np.nan])
def test_what_is_not_finite_is_told_as_by_messages(wrong):
    def main(comm):
        def spoil(grads):
            grads[4][-1, -1] = wrong if comm.rank == 1 else 1

        found = stepped(comm, spoil=spoil)
        assert found == stepped(Apart(comm), spoil=spoil)
        assert "rank 1: p4 (1 of 6300 entries)" in found
        spread = stepped(comm, spoil=spoil, nonfinite="propagate")
        assert spread == stepped(Apart(comm), spoil=spoil, nonfinite="propagate")
        return found, spread

    assert len(set(run_ranks(3, main))) == 1


def test_what_deterministic_may_be():
    comm = LocalCommunicator()
    assert as_deterministic(comm, False) is comm
    assert as_deterministic(comm, "exact").exact
    exact = as_deterministic(comm, "exact")
    assert as_deterministic(exact, "exact") is exact
    for wrong in ("in order", 1, None):
        with pytest.raises(TypeError, match="deterministic must be True, False or 'exact', got"):
            DistOpt(SGD(0.1), comm, deterministic=wrong)
    p = Parameter("w", np.ones(3, np.float32))
    opt = DistOpt(SGD(0.1), comm, deterministic="exact")
    for name in ("nodes", "measure"):
        with pytest.raises(ValueError, match=f"exchange must be one of .*, got '{name}'"):
            opt.step([(p, np.ones(3, np.float32))], exchange=name)


def trained(comm, compressor, logical=None):
    """What a model has learned in some steps, whose gradients cancel out to a small rest."""
    p = Parameter("w", np.ones(5000, np.float32))
    opt = DistOpt(SGD(0.1, momentum=0.9), comm if logical is None else Logical(comm, logical), deterministic="exact")

    def loss(rank):
        rng = np.random.default_rng((rank, opt.step_counter))
        big = np.random.default_rng(opt.step_counter).standard_normal(5000) * 1e6 * (1 if rank % 2 else -1)
        return [(p, (big + rng.standard_normal(5000)).astype(np.float32))]

    for _ in range(3):
        opt.step((lambda: loss(comm.rank)) if logical is None else loss, compressor)
    return p.data.tobytes()


@pytest.mark.parametrize("compressor", [None, Half(), ErrorFeedback(TopK(0.1))])
def test_steps_learn_the_same_on_any_number_of_processes(compressor):
    found = [x for processes in (1, 2, 3, 6) for x in run_ranks(processes, lambda c: trained(c, compressor, 6))]
    assert len(set(found)) == 1
    if compressor is None:
        assert set(run_ranks(6, lambda comm: trained(comm, None))) == {found[0]}
