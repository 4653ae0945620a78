"""Each algorithm of exchange: the float64 sum of what the ranks sent, by the collective that its name says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distopt import run_ranks
from distopt.comm.communicator import Wrapper
from distopt.comm.message import UNTAGGED
from distopt.compress import BucketContext, DeepGradientCompression, ExchangeContext, Half, TopK
from distopt.exchange import choose, gather, reduce
from distopt.kernels.layout import BucketLayout


class Counted(Wrapper):
    """Notes the collectives that carry gradients, and how many elements each has."""

    def __init__(self, comm):
        super().__init__(comm)
        self.sent = []

    def all_reduce(self, x, op="sum"):
        self.sent.append(("all_reduce", x.size))
        super().all_reduce(x)

    def all_gather(self, x, ragged=False, into=None):
        self.sent.append(("all_gather", x.size))
        return super().all_gather(x, ragged, into)


def gradients(seed, rank, n, scale=1.0):
    return (np.random.default_rng([seed, rank]).standard_normal(n) * scale).astype(np.float32)


def largest(x, k):
    """x with all but its k largest magnitudes set to 0; ties go to the lowest index."""
    kept = np.zeros_like(x, np.float64)
    chosen = np.argsort(-np.abs(x), kind="stable")[:k]
    kept[chosen] = x[chosen]
    return kept


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 4), st.integers(1, 300), st.floats(0.01, 1.0), st.integers(0, 99))
@pytest.mark.parametrize("break_even", [False, True])
def test_the_sum_is_that_of_the_largest_entries_of_every_rank(break_even, size, n, density, seed):
    k = TopK(density).count(n)

    def main(comm):
        x = gradients(seed, comm.rank, n)
        gather(x, TopK(density), comm, {}, ExchangeContext(rank=comm.rank, size=size), break_even=break_even)
        return x

    expected = sum(largest(gradients(seed, rank, n), k) for rank in range(size))
    for total in run_ranks(size, main):
        np.testing.assert_allclose(total, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("density", "collective"), [(0.01, "all_gather"), (0.9, "all_reduce")])
def test_a_dense_sum_goes_where_it_is_fewer_bytes_and_has_the_same_numbers(density, collective):
    def main(comm):
        results = []
        for break_even in (True, False):
            counted, x = Counted(comm), gradients(1, comm.rank, 1000)
            context = ExchangeContext(rank=comm.rank, size=4)
            gather(x, TopK(density), counted, {}, context, break_even=break_even)
            results.append((x.tobytes(), counted.sent))
        return results

    for [(total, sent), (gathered, by_gather)] in run_ranks(4, main):
        assert [verb for verb, _ in sent] == [collective]
        assert [verb for verb, _ in by_gather] == ["all_gather"]
        np.testing.assert_allclose(np.frombuffer(total, "f4"), np.frombuffer(gathered, "f4"), rtol=1e-6, atol=1e-6)


MEMBERS = ["w", "b", "v"], [(20, 5), (7,), (50,)], [0, 112, 128], np.float32
PLACES = [slice(0, 100), slice(112, 119), slice(128, 178)]


@pytest.mark.parametrize("break_even", [False, True])
def test_members_that_a_compressor_leaves_alone_are_summed_exactly_beside_the_others(break_even):
    """Vectors of a bucket with gaps travel dense, in one all-reduce; of the matrix, one entry in ten."""
    dgc = DeepGradientCompression(TopK(0.1), momentum=0.0)

    def filled(rank):
        x = np.zeros(178, np.float32)
        for place in PLACES:
            x[place] = gradients(2, rank, place.stop - place.start)
        return x

    def main(comm):
        counted, x = Counted(comm), filled(comm.rank)
        context = ExchangeContext(rank=comm.rank, size=2, bucket=BucketContext(BucketLayout(*MEMBERS)))
        gather(x, dgc, counted, {}, context, break_even=break_even)
        return x, counted.sent

    expected = sum(largest(filled(rank)[PLACES[0]], 10) for rank in range(2))
    for total, sent in run_ranks(2, main):
        np.testing.assert_allclose(total[PLACES[0]], expected, rtol=1e-6, atol=1e-7)
        for place in PLACES[1:]:
            np.testing.assert_allclose(total[place], sum(filled(r)[place].astype(float) for r in range(2)), rtol=1e-6)
        assert sent == [("all_reduce", 57), ("all_gather", 80)]  # 10 entries of 8 bytes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_reduce_sends_one_message_of_the_payload(dtype):
    def main(comm):
        counted, x = Counted(comm), gradients(3, comm.rank, 50)
        reduce(x, Half(dtype), counted, {}, ExchangeContext(rank=comm.rank, size=3), UNTAGGED)
        return x, counted.sent

    expected = sum(gradients(3, rank, 50).astype(float) for rank in range(3))
    for total, sent in run_ranks(3, main):
        np.testing.assert_allclose(total, expected, rtol=0, atol=2.0**-6 if dtype == "float16" else 2.0**-4)
        assert sent == [("all_reduce", 50)]


def test_what_is_no_compressor_has_no_algorithm():
    with pytest.raises(TypeError, match=r"compressor must derive from distopt.compress.Compressor, got 0.5"):
        choose(0.5)
