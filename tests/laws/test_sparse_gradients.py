"""Law 7 for every format of entries and codes where nearly all gradients are 0: an embedding's, a dead ReLU's.

Selectors take zeros then, and what they take of them must not depend on anything that no state has.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import itertools

import numpy as np
import pytest

from distopt import DistOpt, Parameter, run_ranks
from distopt.compress import (
    DCT,
    Chunks,
    DeepGradientCompression,
    ErrorFeedback,
    Int4,
    Int8,
    OneBit,
    Packed,
    Threshold,
    TopK,
    TwoBit,
)
from distopt.compress.values import VALUES
from distopt.optim import SGD

SIZES = (5, 700, 1, 130)  # none of them fills the memory up to the next one
STEPS = 6
SELECTORS = [
    TopK(0.5),
    TopK(1.0),
    TopK(0.9, per_tensor=True),
    TopK(0.7, reselect=False),
    Chunks(40, of=64),
    Threshold(1),
]
PACKED = [Packed(selector, value=value) for selector, value in itertools.product(SELECTORS, VALUES)]
CODES = [TwoBit(0.5), OneBit(), OneBit(0.1, scale="unit"), Int8(32), Int4(32), Int4(32, "stochastic", seed=3)]
FORMATS = [ErrorFeedback(c) for c in (*SELECTORS, *PACKED, *CODES)]
FORMATS += [DCT(ErrorFeedback(c), tile=8) for c in (Packed(TopK(0.9), value="2bit"), Chunks(40, of=64))]
FORMATS += [ErrorFeedback(Packed(TopK(0.9), value="2bit"), decay=0.9)]
FORMATS += [DeepGradientCompression(Packed(TopK(0.9), value="2bit"), exclude_1d=False)]


def gradients(step, rank):
    rng = np.random.default_rng([step, rank])
    return [(rng.standard_normal(n) * (rng.random(n) < 0.1)).astype(np.float32) for n in SIZES]


def started(comm, state=None, values=None):
    params = [Parameter(f"p{k}", np.zeros(n, np.float32)) for k, n in enumerate(SIZES)]
    opt = DistOpt(SGD(1.0), comm)
    if state:
        for p, x in zip(params, values, strict=True):
            p.data[...] = x
        opt.load_state_dict(state)
    return params, opt


def goes_on(comm, params, opt, compressor, exchange, begin):
    """Train to the end; return the parameters and the state before each step, and at the end."""
    seen = [([p.data.copy() for p in params], opt.state_dict())]
    for step in range(begin, STEPS):
        pairs = list(zip(params, gradients(step, comm.rank), strict=True))
        opt.step(pairs, compressor, False, exchange)
        seen.append(([p.data.copy() for p in params], opt.state_dict()))
    return seen


@pytest.mark.sampled(6)
@pytest.mark.parametrize("compressor", FORMATS, ids=repr)
@pytest.mark.parametrize(("exchange", "ranks"), [("gather", 2), ("two_phase", 3)])
def test_a_resumed_training_has_the_bits_of_one_that_never_stopped(compressor, exchange, ranks):
    def main(comm):
        unbroken = goes_on(comm, *started(comm), compressor, exchange, 0)
        for stop in range(1, STEPS):
            values, state = unbroken[stop]
            resumed = goes_on(comm, *started(comm, state, values), compressor, exchange, stop)
            for step, (expected, found) in enumerate(zip(unbroken[stop:], resumed, strict=True), stop):
                for a, b in zip(expected[0], found[0], strict=True):
                    assert a.tobytes() == b.tobytes(), f"stopped after step {stop}, other bits after step {step}"

    run_ranks(ranks, main)
