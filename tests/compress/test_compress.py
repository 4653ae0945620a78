"""Compressors: what exactly they select, and what they refuse.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from distopt import DistOpt, Parameter, run_ranks
from distopt.comm import LocalCommunicator, Metered
from distopt.compress import (
    DCT,
    BucketContext,
    Compressor,
    Dense,
    ErrorFeedback,
    ExchangeContext,
    Half,
    Threshold,
    TopK,
    Traits,
)
from distopt.compress.top_k import unpack_entries
from distopt.exchange import choose
from distopt.kernels.layout import BucketLayout
from distopt.optim import SGD
from laws import constant_pairs, texts_of, three_parameters


def sent(compressor, x, context=None):
    """(index, value) of what a sparse compressor takes out of x."""
    return unpack_entries(compressor.compress(x, {}, context or ExchangeContext()), x.dtype)


def largest(x, k):
    """The first k of a stable sort by (-|x|, index), NaN first, in ascending order of index."""
    key = np.where(np.isnan(x), np.inf, abs(x.astype(np.float64)))
    nan_first = np.lexsort((np.arange(x.size), ~np.isnan(x), -key))
    return np.sort(nan_first[:k])


VALUES = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, np.inf, np.nan]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(x=hnp.arrays(np.float32, st.integers(1, 200), elements=VALUES), density=st.floats(1e-3, 1))
def test_top_k_is_the_top_k(dtype, x, density):
    """S1: equal to a stable sort, ties to the lowest index, in the order of indices."""
    x = x.astype(dtype)
    before, k = x.copy(), TopK(density).count(x.size)
    index, entry = sent(TopK(density), x)
    np.testing.assert_array_equal(index, largest(before, k))
    np.testing.assert_array_equal(entry, before[index])
    assert not x[index].any()


STRIDE = 257 * 16  # between two lines of the sample from which top-K guesses (topk_host.cu)
N = 40 * STRIDE


def drawn(rng, beside, inside):
    """Values that differ where the sample is drawn."""
    x = (beside * rng.standard_normal(N)).astype(np.float32)
    for j in range(16):
        x[j::STRIDE] = inside * (1 + rng.random(x[j::STRIDE].size))
    return x


HARD = {
    "zeros": lambda rng: np.zeros(N),
    "all equal": lambda rng: np.full(N, -3.0),
    "two values": lambda rng: rng.integers(1, 3, N),
    "ascending": lambda rng: np.arange(N),
    "descending": lambda rng: -np.arange(N)[::-1],
    "clustered": lambda rng: np.where(np.arange(N) < N // 8, rng.standard_normal(N), 0),
    "one huge": lambda rng: np.where(np.arange(N) == 12_345, 1e30, 1),
    "few not zero": lambda rng: rng.standard_normal(N) * (rng.random(N) < 1e-4),
    "subnormal": lambda rng: rng.integers(-5, 6, N) * 1e-45,
    "guessed too high": lambda rng: drawn(rng, 1e-3, 5),
    "guessed too low": lambda rng: drawn(rng, 5, 0),
    "guessed too low, ascending": lambda rng: np.where(np.arange(N) % STRIDE < 16, 0, np.arange(N)),
    "not finite": lambda rng: rng.choice([np.nan, -np.nan, np.inf, -np.inf, 1, 0], N),
    "columns": lambda rng: rng.standard_normal(N) * (np.arange(N) % 1024 < 16),
}


@pytest.mark.parametrize("density", [1e-5, 0.01, 0.3])
@pytest.mark.parametrize("case", HARD)
def test_top_k_is_exact_where_its_first_guess_is_wrong(case, density):
    """A wrong first guess of the bound costs time, and nothing else."""
    x = HARD[case](np.random.default_rng(1)).astype(np.float32)
    before = x.copy()
    index, entry = sent(TopK(density), x)
    np.testing.assert_array_equal(index, largest(before, TopK(density).count(x.size)))
    np.testing.assert_array_equal(entry, before[index])
    before[index] = 0
    np.testing.assert_array_equal(x.view(np.int32), before.view(np.int32))


@given(
    n=st.integers(1, 30_000),
    seed=st.integers(0, 2**32 - 1),
    digits=st.integers(0, 3),
    density=st.sampled_from([1e-4, 1e-3, 0.01, 0.1, 0.9]),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_the_residual_is_added_in_the_same_pass(n, seed, digits, density, dtype):
    """Residual + gradient == what is kept + what is sent, to the bit, and the largest of it are sent."""
    x, residual = np.random.default_rng(seed).standard_normal((2, n)).round(digits).astype(dtype)
    total, gradient = residual + x, x.copy()
    for compressor in (TopK(density), Threshold(1.0)):
        kept = {"residual": residual.copy()}
        index, entry = unpack_entries(ErrorFeedback(compressor).compress(x, kept, ExchangeContext()), x.dtype)
        exact = (
            largest(total, TopK(density).count(n)) if isinstance(compressor, TopK) else np.flatnonzero(abs(total) >= 1)
        )
        np.testing.assert_array_equal(index, exact)
        np.testing.assert_array_equal(entry, total[index])
        kept["residual"][index] += entry
        np.testing.assert_array_equal(kept["residual"], total)
    np.testing.assert_array_equal(x, gradient)


def test_a_residual_of_another_size_is_refused():
    with pytest.raises(ValueError, match="a gradient must be of 5 elements, as its memory, got 4"):
        ErrorFeedback(TopK(0.5)).compress(
            np.ones(4, np.float32), {"residual": np.zeros(5, np.float32)}, ExchangeContext()
        )


@pytest.mark.parametrize("share", [0.0, 0.01, 0.02, 0.5, 1.0])
def test_threshold_is_exact_for_few_and_for_many_entries(share):
    """More than there was room for at first go on in larger memory."""
    x = (np.random.default_rng(2).random(300_000) < share).astype(np.float32) * np.arange(1, 300_001, dtype=np.float32)
    before = x.copy()
    index, entry = sent(Threshold(0.5), x)
    np.testing.assert_array_equal(index, np.flatnonzero(before))
    np.testing.assert_array_equal(entry, before[index])
    assert not x.any()


@given(sizes=st.lists(st.integers(0, 9000), max_size=6), density=st.sampled_from([0.001, 0.1, 1.0]))
def test_per_tensor_selection_equals_selecting_from_each_tensor_alone(sizes, density):
    room = [-(-n // 16) * 16 for n in sizes]
    members = BucketLayout(map(str, sizes), [(n,) for n in sizes], np.cumsum(room) - room, "float32")
    x = np.zeros(sum(room), np.float32)
    parts = [members.view(x, row) for row in range(len(sizes))]
    for k, part in enumerate(parts):
        part[:] = np.random.default_rng(k).standard_normal(part.size).round(1) * 10.0**k
    alone = [sent(TopK(density), part.copy()) for part in parts]
    index, entry = sent(TopK(density, per_tensor=True), x, ExchangeContext(bucket=BucketContext(members)))
    first = np.concatenate([[], *(i + o for (i, _), o in zip(alone, members.records["offset"], strict=True))])
    np.testing.assert_array_equal(index, first)
    np.testing.assert_array_equal(entry, np.concatenate([[], *(e for _, e in alone)]))


def test_top_k_selects_the_largest_where_singa_does_not():
    """Keys for which a comparison of magnitudes as integers picks the wrong ones."""
    x = np.array([0.1, -0.6, 0.03, 0.2, 0, 0.9, 1.5, -2.5], np.float32)
    assert sent(TopK(0.5), x)[0].tolist() == [1, 5, 6, 7]


@pytest.mark.parametrize(
    ("n", "density", "k"),
    [(1000, 0.001, 1), (1000, 0.01, 10), (10**6, 0.001, 1000), (3, 0.34, 2), (5, 1e-9, 1), (7, 1.0, 7), (0, 0.5, 0)],
)
def test_k_is_the_density_times_the_elements_rounded_up(n, density, k):
    assert TopK(density).count(n) == k
    assert TopK(density).payload_bytes(n) == 8 * k
    assert TopK(density).payload_bytes(n, 8) == 12 * k + 4 * (k % 2)  # whole values, so that parts stay aligned


def test_k_of_a_bucket_counts_elements_without_gaps():
    """k counts elements, not the gaps between members; per tensor each has its own."""
    members = BucketLayout(["a", "b", "c"], [(100,), (3,), ()], [0, 112, 128], "float32")
    for compressor, k in ((TopK(0.1), 11), (TopK(0.1, per_tensor=True), 10 + 1 + 1)):
        x = np.ones(members.extent, np.float32)
        assert compressor.payload_bytes(x.size, 4, members) == 8 * k
        assert compressor.compress(x, {}, ExchangeContext(bucket=BucketContext(members))).nbytes == 8 * k


@given(x=hnp.arrays(np.float32, st.integers(0, 200), elements=VALUES), magnitude=st.floats(0, 3))
def test_threshold_is_exact(x, magnitude):
    """S2: no entry twice, none missing, zeros never; |x| >= magnitude as real numbers."""
    before = x.copy()
    index, entry = sent(Threshold(magnitude), x)
    large = np.isnan(before) | (abs(before.astype(np.float64)) >= magnitude)
    np.testing.assert_array_equal(index, np.flatnonzero(large & (before != 0)))
    np.testing.assert_array_equal(entry, before[index])


def test_a_float_just_below_the_threshold_is_not_sent():
    """0.1 is no float32: the float32 just below it is smaller than the threshold."""
    x = np.array([0.1, np.nextafter(np.float32(0.1), np.float32(0))], np.float32)
    assert sent(Threshold(0.1), x)[0].tolist() == [0]


def test_per_tensor_selection_sends_something_of_every_tensor():
    """S8: in one bucket the large tensor would take everything."""
    params = [Parameter("large", np.zeros(1000)), Parameter("small", np.zeros(10))]
    grads = [np.full(1000, 9.0), np.full(10, 0.1)]
    for per_tensor, moved in ((False, [11, 0]), (True, [10, 1])):
        for p in params:
            p.data[:] = 0
        DistOpt(SGD(1.0)).step(list(zip(params, grads, strict=True)), TopK(0.01, per_tensor), break_even=False)
        assert [np.count_nonzero(p.data) for p in params] == moved


def test_gaps_between_members_do_not_count():
    params = [Parameter(f"p{k}", np.zeros(1)) for k in range(10)]  # each takes 64 bytes of the bucket
    metered = Metered(LocalCommunicator())
    DistOpt(SGD(1.0), metered, broadcast=False).backward_and_sparse_update(constant_pairs(params), spars=0.2, topK=True)
    assert metered.report()["all_gather"]["payload"] == 2 * (8 + 4)
    assert [p.data[0] for p in params] == [-1, -1] + [0] * 8


def test_half_rounds_and_keeps_the_rest():
    x = np.array([1 / 3, 65504, 70000, -1e30, 1e-9, 0], np.float32)
    before, out = x.copy(), np.empty_like(x)
    context = ExchangeContext(size=3)  # scaled by 1/4: the largest power of two below 1/3
    payload = Half().compress(x, {}, context)
    assert payload.dtype == np.float16
    Half().decompress(payload, out, context)
    assert out[1:4].tolist() == [65504, 65504, -65504]
    assert (x + out == before).all()
    assert 0 < abs(x[0]) < 1e-4


def test_sums_of_halves_do_not_overflow_unless_asked_to():
    """S5: 60000 + 60000 is beyond float16."""

    def main(comm, compressor, **options):
        p = Parameter("p", np.zeros(3, np.float32))
        opt = DistOpt(SGD(1.0), comm, **options)
        applied = opt.step([(p, np.full(3, 60000.0, np.float32))], compressor)
        return applied, p.data.tolist()

    for size in (2, 3, 8):
        for applied, mean in run_ranks(size, lambda c: main(c, Half())):
            assert applied
            np.testing.assert_allclose(mean, [-60000.0] * 3, rtol=1e-3)
    wild = Half(predivide=False)
    assert run_ranks(2, lambda c: main(c, wild, nonfinite="skip")) == [(False, [0.0] * 3)] * 2
    assert run_ranks(2, lambda c: main(c, wild, nonfinite="propagate")) == [(True, [-np.inf] * 3)] * 2

    def ten(comm):
        p = Parameter("p", np.zeros(3, np.float32))
        opt = DistOpt(SGD(1.0), comm, nonfinite="skip")
        for _ in range(10):
            opt.step([(p, np.full(3, 60000.0, np.float32))], wild)

    assert "10 steps in a row are not finite" in texts_of(2, ten, FloatingPointError)
    text = texts_of(2, lambda c: main(c, wild), FloatingPointError)
    assert text == "gradients of step 1 are not finite: the sum over ranks (3 entries)"


@pytest.mark.parametrize("mode", ["half", "topk", "threshold"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_numbers_under_each_policy(mode, value):
    """S10: refused steps touch no residual; under 'propagate' the bad number is sent once and not kept."""

    def step(opt, p, g):
        loss = [(p, np.array(g, np.float32))]
        if mode == "half":
            return opt.step(loss, ErrorFeedback(Half()))
        return opt.backward_and_sparse_update(loss, spars=0.5 if mode == "topk" else 0.6, topK=mode == "topk")

    def main(comm, nonfinite):
        p = Parameter("p", np.zeros(4, np.float32))
        opt = DistOpt(SGD(1.0), comm, nonfinite=nonfinite)
        step(opt, p, [1, 0.5, 0.25, 0.1])
        before = str(opt.state_dict()["states"])
        bad = [1, value if comm.rank else 1, 1, 1]
        if nonfinite == "raise":
            with pytest.raises(FloatingPointError, match=r"rank 1: p \(1 of 4 entries\)"):
                step(opt, p, bad)
        else:
            assert step(opt, p, bad) is (nonfinite == "propagate")
        if nonfinite == "propagate":
            assert not np.isfinite(p.data[1])
            assert np.isfinite(opt.state_dict()["states"]["residual"]["p"]).all()
        else:
            assert str(opt.state_dict()["states"]) == before
            assert step(opt, p, [1, 1, 1, 1])
            assert np.isfinite(p.data).all()

    for nonfinite in ("raise", "skip", "propagate"):
        run_ranks(2, lambda comm, policy=nonfinite: main(comm, policy))


@pytest.mark.parametrize("values", [[0.0] * 5, [2.0] * 5, [-2.0] * 5])
def test_thresholds_and_top_k_are_exact_for_equal_entries(values):
    """A threshold that selects nothing or everything; exactly k of equal ones."""

    def main(comm):
        opt, p = DistOpt(SGD(1.0), comm), Parameter("p", np.zeros(5))
        opt.backward_and_sparse_update([(p, np.array(values))], spars=100.0)
        assert not p.data.any()
        opt.backward_and_sparse_update([(p, np.array(values))], spars=0.4, topK=True)
        assert np.count_nonzero(p.data) == (2 if values[0] else 0)
        opt.backward_and_sparse_update([(p, np.zeros(5))], spars=0.0)
        np.testing.assert_array_equal(p.data, -2 * np.array(values))
        assert not opt.state_dict()["states"]["residual"]["p"].any()

    run_ranks(3, main)


def test_ranks_may_send_different_numbers_of_entries_at_one_threshold_only():
    def main(comm):
        p = Parameter("p", np.zeros(6))
        g = np.arange(6.0) * (comm.rank != 1)  # rank 1 has nothing to send
        DistOpt(SGD(1.0), comm).backward_and_sparse_update([(p, g)], spars=3.0 + comm.rank)
        return p.data.tolist()

    text = texts_of(3, main, ValueError)
    assert text.startswith(
        "ranks differ: rank 0 has a step with ErrorFeedback(Threshold(3.0)), break_even=False, rank 1"
    )

    def same(comm):
        p, g = Parameter("p", np.zeros(6)), np.arange(6.0) * (comm.rank != 1)
        DistOpt(SGD(1.0), comm).backward_and_sparse_update([(p, g)], spars=3.0)
        return (p.data * 3).tolist()

    assert run_ranks(3, same) == [[0, 0, 0, -6, -8, -10]] * 3


def test_break_even_never_sends_more_than_dense():
    def main(comm, compressor, break_even):
        metered = Metered(comm)
        p = Parameter("p", np.zeros(1000, np.float32))
        g = np.random.default_rng(comm.rank).standard_normal(1000).astype(np.float32)
        DistOpt(SGD(1.0), metered, broadcast=False).step([(p, g)], compressor, break_even)
        return metered.ledger.total()["sent"], p.data.tobytes()

    for size in (2, 4, 8):
        dense = 2 * (size - 1) * 4000 // size
        for compressor in (TopK(0.9), TopK(0.01), Threshold(0.1), Threshold(3.0), ErrorFeedback(TopK(0.5))):
            frugal, same = (run_ranks(size, lambda c, b=b, k=compressor: main(c, k, b))[0] for b in (True, False))
            assert frugal[0] <= dense + 8 * size
            np.testing.assert_allclose(*(np.frombuffer(x[1], np.float32) for x in (frugal, same)), atol=1e-6)


def test_the_plan_prints_the_payload_that_is_sent():
    opt, p = DistOpt(SGD(1.0)), Parameter("p", np.zeros(1000, np.float32))
    opt.backward_and_sparse_update(constant_pairs([p]), spars=0.01, topK=True)
    assert opt.plan.payload == (80,)
    opt.backward_and_update_half(constant_pairs([p]))
    assert opt.plan.payload == (2000,)
    opt.backward_and_sparse_update(constant_pairs([p]), spars=0.01)
    assert "varies" in str(opt.plan)
    opt(constant_pairs([p]))
    assert opt.plan.payload == (4000,)


class LeavesMembers(TopK):
    """A user's, which leaves small members to be summed as they are."""

    def uncompressed(self, layout, context):
        return None


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: TopK(0), ValueError, r"density must be in \(0, 1\], got 0"),
        (lambda: TopK(1.5), ValueError, "got 1.5"),
        (lambda: TopK(np.nan), ValueError, "got nan"),
        (lambda: TopK("0.1"), TypeError, "density must be a number, got '0.1'"),
        (lambda: Threshold(-1), ValueError, "magnitude must be finite and at least 0, got -1"),
        (lambda: Threshold(np.inf), ValueError, "got inf"),
        (lambda: Threshold(None), TypeError, "magnitude must be a number"),
        (lambda: Half("float8"), ValueError, "dtype must be one of float16, bfloat16, got 'float8'"),
        (lambda: Half([]), ValueError, r"dtype must be one of float16, bfloat16, got \[\]"),
        (lambda: Half(predivide="no"), TypeError, "predivide must be True or False, got 'no'"),
        (
            lambda: ErrorFeedback(Dense()),
            ValueError,
            r"compressor must be one that leaves an error to feed back, got Dense",
        ),
        (lambda: ErrorFeedback(ErrorFeedback(TopK(0.1))), ValueError, "does not feed its error back already, got "),
        (lambda: ErrorFeedback(LeavesMembers(0.1)), ValueError, "must be one that sends all members.*got TopK"),
        (lambda: DCT(LeavesMembers(0.1)), ValueError, "must be one that sends all members"),
        (lambda: ErrorFeedback(Half(predivide=False)), ValueError, "cannot overflow, which would lose what was sent"),
        (lambda: choose(3), TypeError, "compressor must derive from distopt.compress.Compressor, got 3"),
        (lambda: ErrorFeedback(3), TypeError, "compressor must derive from distopt.compress.Compressor, got 3"),
    ],
)
def test_wrong_arguments_of_compressors_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda opt, loss: opt.backward_and_sparse_update(loss, spars=2.0, topK=True), "density must be in"),
        (lambda opt, loss: opt.backward_and_sparse_update(loss, spars=-2.0), "magnitude must be finite"),
        (lambda opt, loss: opt.backward_and_update_half(loss, None, True, -1), "clip_Value must be at least 0"),
        (lambda opt, loss: opt.sparsification(np.ones(3), None, 0.0, True), "density must be in"),
        (
            lambda opt, loss: opt.sparsification(np.ones(3), np.ones(4), 0.5, True),
            "accumulation must be (3,) float64, got (4,)",
        ),
        (lambda opt, loss: opt.backward_and_sparse_update(loss, threshold=-1), "threshold must be at least 0"),
    ],
)
def test_bad_arguments_of_one_rank_are_errors_of_all(call, text):
    def main(comm):
        opt = DistOpt(communicator=comm)
        call(opt, constant_pairs(three_parameters())) if comm.rank else opt(constant_pairs(three_parameters()))

    assert text in texts_of(2, main, ValueError)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda o, p: o(p), lambda o, p: o.backward_and_update_half(p)),
        (lambda o, p: o.backward_and_partial_update(p), lambda o, p: o(p)),
        (lambda o, p: o.step(p, TopK(0.1)), lambda o, p: o.step(p, TopK(0.2))),
        (lambda o, p: o.step(p, TopK(0.1)), lambda o, p: o.step(p, TopK(0.1, per_tensor=True))),
        (lambda o, p: o.step(p, Half()), lambda o, p: o.step(p, Half("bfloat16"))),
        (lambda o, p: o.backward_and_update_half(p), lambda o, p: o.backward_and_update_half(p, None, True)),
    ],
)
def test_ranks_that_step_in_different_modes_are_refused(first, second):
    def main(comm):
        (second if comm.rank == 1 else first)(DistOpt(communicator=comm), constant_pairs(three_parameters()))

    assert "ranks differ: rank 0 has a" in texts_of(3, main, ValueError)


class Doubled(Compressor):
    """A user's own, without a text."""

    traits = Traits(summable=True)

    def __init__(self, factor=2):
        self.factor, self._hidden = factor, object()

    def payload_bytes(self, n, itemsize=4, layout=None):
        return itemsize * n

    def compress(self, x, state, context):
        return x * self.factor

    def decompress(self, payload, out, context):
        out[...] = payload / self.factor


def test_ranks_tell_compressors_of_ones_own_apart_by_their_public_attributes():
    """A compressor of each rank's own has another address, which says nothing."""

    def main(comm):
        w, opt = Parameter("w", np.zeros(3)), DistOpt(SGD(1.0), comm)
        opt.step([(w, np.ones(3))], Doubled())
        with pytest.raises(
            ValueError, match=r"rank 0 has a step with Doubled\(factor=3\), rank 1 .* Doubled\(factor=4\)"
        ):
            opt.step([(w, np.ones(3))], Doubled(3 + comm.rank))
        return w.data.tolist()

    assert run_ranks(2, main) == [[-1.0] * 3] * 2


def test_traits_may_be_attributes_for_one_more_version():
    """Of a class, of an instance, and of what derives from either; they are read so, too."""

    class Old(TopK):
        stateful = True

    class Older(Old):
        ragged = True

        def __init__(self, summable):
            super().__init__(0.1)
            self.summable = summable

    assert Old(0.1).traits == replace(TopK(0.1).traits, stateful=True)
    assert Older(True).traits == replace(TopK(0.1).traits, stateful=True, ragged=True, summable=True)
    assert not Older(False).traits.summable
    assert (Older(True).stateful, Older(True).summable, TopK(0.1).recordable) == (True, True, True)
    assert TopK(bytes=500).budget == 500
    with pytest.raises(AttributeError, match="'Older' object has no attribute 'sumable'"):
        _ = Older(True).sumable
