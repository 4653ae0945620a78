"""A budget in bytes: the largest density of which a step sends no more, by the ledger."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import laws
from distopt import DistOpt, Parameter, run_ranks, simulate
from distopt.comm import Metered
from distopt.compress import DeepGradientCompression, ErrorFeedback, Packed, Threshold, TopK
from distopt.compress.base import at_density
from distopt.optim import SGD

SHAPES = [(200, 100), (70,), (30, 30, 30), (5,)]
MAKE = {
    "top-K": lambda nbytes: ErrorFeedback(TopK(bytes=nbytes)),
    "per tensor": lambda nbytes: TopK(bytes=nbytes, per_tensor=True),
    "packed": lambda nbytes: ErrorFeedback(Packed(TopK(bytes=nbytes), value="int8")),
    "DGC": lambda nbytes: DeepGradientCompression(Packed(TopK(bytes=nbytes))),
}


def sent(size, compressor, steps=3, exchange="auto", seed=0):
    """The mean bytes that virtual rank 0 sends in a step, and the density of the last one."""
    params = laws.parameters(SHAPES)
    sim = simulate(size, SGD(0.1), threshold=25_000)
    for step in range(steps):
        sim.step(
            lambda rank, step=step: laws.pairs(laws.VirtualRank(rank, size), params, 10 * seed + step),
            compressor,
            exchange=exchange,
        )
    used = sim.engine.compressor
    return sim.ledger.total_of_steps()["sent"] / steps, used


@given(st.sampled_from(sorted(MAKE)), st.sampled_from([2, 3, 8]), st.integers(2_000, 100_000), st.integers(0, 9))
def test_a_step_sends_as_many_bytes_as_it_may_and_no_more(name, size, nbytes, seed):
    """An owner's numbers of entries are rounded up, and entries are not spread evenly: 2 % and some bytes."""
    total, used = sent(size, MAKE[name](nbytes), seed=seed)
    assert total <= 1.02 * nbytes + 60
    assert total >= 0.9 * nbytes - 200 or (used.at_density(1.0) is not None and _density(used) == 1.0)


def _density(compressor):
    inner = compressor
    while inner.__dict__.get("density") is None:
        inner = inner.__dict__.get("compressor") or inner.__dict__["selector"]
    return inner.density


@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
def test_the_density_that_fits_is_found_for_each_exchange(exchange):
    """64 ranks: a gather has 63 payloads, two phases less than two."""
    total, used = sent(64, ErrorFeedback(Packed(TopK(bytes=60_000))), exchange=exchange)
    assert total == pytest.approx(60_000, rel=0.03)
    assert (_density(used) < 0.01) == (exchange == "gather")


def test_a_budget_may_be_a_schedule():
    params, sim = laws.parameters(SHAPES), simulate(3, SGD(0.1))
    compressor = ErrorFeedback(TopK(bytes=lambda k: 2_000 * 2**k))
    found = []
    for step in range(4):
        sim.step(lambda rank: laws.pairs(laws.VirtualRank(rank, 3), params, step), compressor)  # noqa: B023
        found.append(sim.ledger.total_of_steps()["sent"])
    steps = np.diff([0, *found])
    np.testing.assert_allclose(steps, [2_000, 4_000, 8_000, 16_000], rtol=0.05)


def test_ranks_of_threads_have_the_bits_of_virtual_ranks():
    compressor = ErrorFeedback(Packed(TopK(bytes=5_000)))

    def main(comm):
        params = laws.parameters(SHAPES)
        opt = DistOpt(SGD(0.1), Metered(comm), threshold=25_000)
        for step in range(3):
            opt.step(laws.pairs(comm, params, step), compressor)
        return [p.data for p in params], opt.plan.payload

    params = laws.parameters(SHAPES)
    sim = simulate(3, SGD(0.1), threshold=25_000)
    for step in range(3):
        sim.step(lambda rank: laws.pairs(laws.VirtualRank(rank, 3), params, step), compressor)  # noqa: B023
    for values, payload in run_ranks(3, main):
        assert all(a.tobytes() == p.data.tobytes() for a, p in zip(values, params, strict=True))
        assert all(n > 0 for n in payload)


def test_a_budget_below_the_headers_is_refused_on_every_rank():
    def main(comm):
        p, opt = Parameter("w", np.zeros((100, 100), np.float32)), DistOpt(SGD(1.0), comm)
        with pytest.raises(ValueError, match=r"bytes must be at least \d+ a step, for one entry of each part, got 3"):
            opt.step([(p, np.ones((100, 100), np.float32))], TopK(bytes=3), exchange="two_phase")
        return p.data.any()

    assert run_ranks(3, main) == [False] * 3


def test_a_budget_of_zero_at_some_step_is_refused():
    p, opt = Parameter("w", np.zeros(100, np.float32)), DistOpt(SGD(1.0))
    with pytest.raises(ValueError, match="bytes at update 0 must be finite and in"):
        opt.step([(p, np.ones(100, np.float32))], TopK(bytes=lambda k: 0))


def test_wrong_budgets_are_refused():
    with pytest.raises(ValueError, match="density must be None with bytes"):
        TopK(0.1, bytes=100)
    with pytest.raises(ValueError, match="bytes must be finite and in"):
        TopK(bytes=0)
    with pytest.raises(TypeError, match="bytes must be a number"):
        TopK(bytes="1 MB")
    with pytest.raises(TypeError, match="density must be a number, got None"):
        TopK()
    with pytest.raises(ValueError, match="warmup must be None with bytes"):
        DeepGradientCompression(TopK(bytes=100), warmup=2, steps_per_epoch=3)
    with pytest.raises(ValueError, match="bytes must be those of a step"):
        TopK(bytes=100).payload_bytes(1000)
    with pytest.raises(TypeError, match="must have a density"):
        at_density(Threshold(1.0), 0.1)
