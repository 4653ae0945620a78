"""The memory of error feedback, and how much of it outlives a step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distopt import DistOpt, Parameter, run_ranks, simulate
from distopt.compress import (
    Chunks,
    DeviceContext,
    ErrorFeedback,
    ExchangeContext,
    Half,
    Int8,
    OneBit,
    Packed,
    Threshold,
    TopK,
    TwoBit,
)
from distopt.optim import SGD

LOSSY = [
    TopK(0.1),
    Chunks(4, 64),
    Threshold(1.0),
    Packed(Chunks(4, 64), value="2bit"),
    Packed(TopK(0.1), value="int8"),
    Half(),
    TwoBit(),
    OneBit(),
    Int8(32),
]
SHAPES = [(40, 5), (7,), (300,), ()]


@settings(max_examples=20, deadline=None)
@given(decay=st.sampled_from([0.0, 0.25, 0.95, 0.999, 1.0]), seed=st.integers(0, 999))
@pytest.mark.parametrize("compressor", LOSSY, ids=repr)
def test_what_stays_is_the_decayed_residual_and_the_gradient_without_what_is_sent(compressor, decay, seed):
    rng = np.random.default_rng(seed)
    x, residual = (rng.standard_normal(500).astype(np.float32) for _ in range(2))
    before = np.float32(decay) * residual + x
    state, out = {"residual": residual}, np.zeros(500, np.float32)
    feedback = ErrorFeedback(compressor, decay=decay)
    payload = feedback.compress(x, state, ExchangeContext())
    feedback.decompress(payload, out, ExchangeContext())
    np.testing.assert_allclose(state["residual"] + out, before, rtol=0, atol=1e-6)


def run(comm, compressor, exchange, steps=4, shapes=SHAPES, gradients=None):
    """Train by SGD of rate 1; the parameters, and all that waits."""
    params = [Parameter(f"p{k}", np.zeros(shape, np.float32)) for k, shape in enumerate(shapes)]
    opt = DistOpt(SGD(1.0), comm, threshold=150)
    for step in range(steps):
        opt.step(list(zip(params, gradients(step, comm.rank), strict=True)), compressor, False, exchange)
    return [p.data for p in params], opt.state_dict()["states"]


def normal(step, rank):
    rng = np.random.default_rng([step, rank])
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
@pytest.mark.parametrize("compressor", [LOSSY[k] for k in (0, 1, 3, 6, 7, 8)], ids=repr)
def test_all_that_waits_with_ranks_and_owners_decays(compressor, exchange, size):
    """W == decay W + all gradients - what is applied, summed over ranks, after every step."""
    decay, waits = 0.75, [np.zeros(shape) for shape in SHAPES]
    at = [np.zeros(shape) for shape in SHAPES]
    for steps in range(1, 5):
        ranks = run_ranks(size, lambda c: run(c, ErrorFeedback(compressor, decay), exchange, steps, gradients=normal))  # noqa: B023
        for k, shape in enumerate(SHAPES):
            found = sum(
                np.asarray(arrays.get(f"p{k}", np.zeros(shape)), np.float64)
                for _, states in ranks
                for name, arrays in states.items()
                if name in ("residual", "owed")
            )
            applied = size * (at[k] - ranks[0][0][k].astype(np.float64))
            expected = decay * waits[k] + sum(normal(steps - 1, r)[k].astype(np.float64) for r in range(size)) - applied
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
            waits[k], at[k] = found, ranks[0][0][k].astype(np.float64)


@pytest.mark.parametrize("compressor", [LOSSY[k] for k in (1, 6)], ids=repr)
def test_virtual_ranks_decay_as_ranks_do(compressor):
    for exchange in ("gather", "two_phase"):
        feedback = ErrorFeedback(compressor, 0.9)
        real = run_ranks(3, lambda c: run(c, feedback, exchange, gradients=normal))[0][0]  # noqa: B023
        params = [Parameter(f"p{k}", np.zeros(shape, np.float32)) for k, shape in enumerate(SHAPES)]
        sim = simulate(3, SGD(1.0), threshold=150)
        for step in range(4):
            given = lambda r, step=step: list(zip(params, normal(step, r), strict=True))  # noqa: E731, B023
            sim.step(given, feedback, False, exchange)
        assert all(p.data.tobytes() == x.tobytes() for p, x in zip(params, real, strict=True))


def test_a_refused_step_leaves_the_residual_as_it_was():
    residual = np.arange(200, dtype=np.float32)
    context = ExchangeContext(device=DeviceContext(np.ones(1, np.int64)))
    before = residual.copy()
    ErrorFeedback(Chunks(4, 64), decay=0.5).compress(np.ones(200, np.float32), {"residual": residual}, context)
    np.testing.assert_array_equal(residual, before)


def test_decay_is_part_of_what_ranks_compare_and_stays_at_another_density():
    feedback = ErrorFeedback(TopK(0.1), decay=0.5)
    assert repr(feedback) == "ErrorFeedback(TopK(0.1, per_tensor=False), decay=0.5)"
    assert repr(feedback.at_density(0.2)) == "ErrorFeedback(TopK(0.2, per_tensor=False), decay=0.5)"
    assert feedback.of_sum(4).decay == 0.5
    assert repr(ErrorFeedback(TopK(0.1), decay=1.0)) == "ErrorFeedback(TopK(0.1, per_tensor=False))"


@pytest.mark.parametrize(
    ("decay", "error"), [(-0.1, ValueError), (1.1, ValueError), (np.nan, ValueError), ("1", TypeError)]
)
def test_impossible_decays_are_refused(decay, error):
    with pytest.raises(error, match="decay"):
        ErrorFeedback(TopK(0.1), decay=decay)


def test_a_compressor_that_changes_with_the_step_does_so_with_a_memory_too():
    class Growing(TopK):
        changes_with_step = True

        def at_step(self, k):
            return TopK((k + 1) / 4)

    opt, w = DistOpt(SGD(1.0)), Parameter("w", np.zeros(4, np.float32))
    sent = []
    for _ in range(3):
        before = w.data.copy()
        opt.step([(w, np.array([4, 3, 2, 1], np.float32))], ErrorFeedback(Growing(0.25), decay=0.5))
        sent.append(int((w.data != before).sum()))
    assert sent == [1, 2, 3]
