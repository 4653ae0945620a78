"""Half mode in shared memory: the bits of an all-reduce, for any ranks and buckets."""

import numpy as np
import pytest

import laws
from distopt import DistOpt, Parameter, run_ranks, simulate
from distopt.comm import Metered
from distopt.comm.communicator import Wrapper
from distopt.compress import ErrorFeedback, Half
from distopt.optim import SGD, Adam


class Apart(Wrapper):
    """Ranks that share no memory."""

    def peers(self, x):
        return None


class Counting(Wrapper):
    """How many buckets were added up in shared memory."""

    count = 0

    def count_all_reduce(self, x):
        self.count += 1


def trained(comm, compressor, make=lambda: SGD(0.1, momentum=0.9), views=False, steps=5, **options):
    params = laws.parameters()
    opt = DistOpt(make(), comm, threshold=60, **options)
    if views:
        for p, view in zip(params, opt.parameter_views(params), strict=True):
            p.data = view
    for step in range(steps):
        opt.step(zip(params, laws.gradients(params, step, comm.rank), strict=True), compressor)
    return laws.digest(params), len(opt.plan.buckets)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_in_shared_memory_have_the_bits_of_an_all_reduce(size, dtype):
    def main(comm):
        counting = Counting(comm)
        found, buckets = trained(counting, Half(dtype))
        assert counting.count == 4 * buckets  # sums of the first step are looked at
        return {
            found,
            trained(Apart(comm), Half(dtype))[0],
            trained(counting, Half(dtype), views=True)[0],
            trained(comm, Half(dtype), overlap=True)[0],
        }

    assert len(set().union(*run_ranks(size, main))) == 1


@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize(("dtype", "bits"), [("float16", 11), ("bfloat16", 8)])
def test_a_sum_that_is_a_tie_in_singles_rounds_alike_everywhere(dtype, bits, wide):
    """1024, half of the distance to the next number of 16 bits, and what a single adds to neither of them."""

    def gradient(rank):
        return np.full(20, [1024, 1024 / 2**bits, 1024 / 2**26 if bits == 8 else 2**-15][rank], wide)

    def main(comm):
        found = []
        for there in (comm, Apart(comm)):
            w, opt = Parameter("w", np.zeros(20, wide)), DistOpt(SGD(3.0), there)
            for _ in range(3):  # memory is shared from the second step on
                opt.step([(w, gradient(comm.rank))], Half(dtype))
            found.append(w.data.tolist())
        return found

    w, sim = Parameter("w", np.zeros(20, wide)), simulate(3, SGD(3.0))
    for _ in range(3):
        sim.step(lambda rank: [(w, gradient(rank))], Half(dtype))
    assert run_ranks(3, main) == [[[-3072.0] * 20] * 2] * 3
    assert w.data.tolist() == [-3072.0] * 20


@pytest.mark.parametrize("policy", ["raise", "propagate"])
def test_half_with_adam_has_the_bits_of_an_all_reduce_under_each_policy(policy):
    def main(comm):
        options = {"make": lambda: Adam(0.01), "nonfinite": policy}
        return {trained(comm, Half(), **options)[0], trained(Apart(comm), Half(), **options)[0]}

    assert len(set().union(*run_ranks(3, main))) == 1


@pytest.mark.parametrize("compressor", [Half(predivide=False), ErrorFeedback(Half())])
def test_half_that_may_overflow_or_keeps_a_residual_uses_the_all_reduce(compressor):
    def main(comm):
        counting = Counting(comm)
        trained(counting, compressor)
        return counting.count

    assert run_ranks(2, main) == [0, 0]


def test_a_ledger_has_the_bytes_of_the_all_reduce():
    def main(comm):
        reports = []
        for wire in (Metered(comm), Metered(Apart(comm))):
            trained(wire, Half())
            reports.append(wire.report()["all_reduce"])
        return reports

    for shared, apart in run_ranks(2, main):
        assert shared == apart


def test_what_is_not_finite_is_named_by_rank_and_changes_nothing():
    def main(comm):
        params = laws.parameters()
        opt = DistOpt(SGD(0.1), comm, nonfinite="raise")
        for step in range(3):
            grads = laws.gradients(params, step, comm.rank)
            if step == 2 and comm.rank == 1:
                grads[0].reshape(-1)[0] = np.nan
            before = laws.digest(params)
            if step < 2:
                opt.step(zip(params, grads, strict=True), Half())
                continue
            with pytest.raises(FloatingPointError, match=r"rank 1: .*\(1 of"):
                opt.step(zip(params, grads, strict=True), Half())
            assert laws.digest(params) == before

    run_ranks(2, main)
