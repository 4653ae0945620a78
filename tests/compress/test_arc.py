"""Rows that all ranks choose alike: the paper's equations in float64, and the bytes."""

import numpy as np
import pytest

from distopt import DistOpt, Parameter, run_ranks
from distopt.comm import Metered
from distopt.compress import ARCTopK, ErrorFeedback, check
from distopt.compress.blocks import random_key
from distopt.exchange.step_traffic import step_messages
from distopt.kernels.layout import BucketLayout
from distopt.optim import SGD

SHAPES = {"w": (30, 10), "b": (7,), "v": (4, 5, 3)}  # rows of 16: 19, 1 and 4, of which three are shorter
OF, DENSITY, DECAY, SEED, STEPS, RANKS = 16, 0.2, 0.9, 3, 4, 3
MASK = 2**64 - 1


def sign(key, number):
    """-1 or 1 by SplitMix64, as Steele et al. (2014) have it."""
    z = (key + number + 0x9E3779B97F4A7C15) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return -1 if (z ^ z >> 31) >> 63 else 1


def gradient(name, rank, step):
    """Of a few rows much, and another part of it on each rank."""
    rng = np.random.default_rng([rank, step, len(name), ord(name)])
    n = int(np.prod(SHAPES[name]))
    return (rng.standard_normal(n) * np.repeat(2.0 ** rng.integers(-6, 7, -(-n // OF)), OF)[:n]).reshape(SHAPES[name])


def rows(x):
    """``(rows, OF)``, with zeros behind a short one."""
    return np.pad(x.reshape(-1), (0, -x.size % OF)).reshape(-1, OF)


def by_the_equations():
    """Parameters and residuals after the steps, in float64; all tensors are in one bucket."""
    parts = {name: rows(np.zeros(shape)) for name, shape in SHAPES.items()}
    w, residuals = np.concatenate(list(parts.values())), [0.0] * RANKS
    for step in range(STEPS):
        v = np.array([sign(random_key(SEED, step) & MASK, k) for k in range(4 * OF)], float).reshape(4, OF).T
        for rank in range(RANKS):
            g = np.concatenate([rows(gradient(name, rank, step)) for name in SHAPES])
            residuals[rank] = DECAY * residuals[rank] + g
        energy = (sum(e @ v for e in residuals) ** 2).sum(1)
        chosen = np.argsort(-energy, kind="stable")[: int(np.ceil(DENSITY * len(w)))]
        w[chosen] -= 0.5 * sum(e[chosen] for e in residuals) / RANKS
        for e in residuals:
            e[chosen] = 0
    return w, residuals


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_steps_are_the_papers_equations(dtype):
    def main(comm):
        params = {name: Parameter(name, np.zeros(shape, dtype)) for name, shape in SHAPES.items()}
        opt = DistOpt(SGD(0.5), comm)
        for step in range(STEPS):
            pairs = [(p, gradient(name, comm.rank, step).astype(dtype)) for name, p in params.items()]
            opt.step(pairs, ARCTopK(DENSITY, OF, DECAY, SEED))
        residual = opt.state_dict()["states"]["residual"]
        return [
            np.concatenate([rows(x[name]) for name in SHAPES])
            for x in ({name: p.data for name, p in params.items()}, residual)
        ]

    w, residuals = by_the_equations()
    assert np.count_nonzero(w.any(1)) > STEPS
    for (found, residual), expected in zip(run_ranks(RANKS, main), residuals, strict=True):
        for x, y in ((found, w), (residual, expected)):
            assert np.abs(x - y).max() <= 30 * np.finfo(dtype).eps * np.abs(y).max()


def test_rows_that_are_large_on_ranks_and_nothing_in_the_sum_are_not_sent():
    def main(comm):
        w, opt = Parameter("w", np.zeros(64, np.float32)), DistOpt(SGD(1.0), comm)
        g = np.zeros(64, np.float32)
        g[:16], g[20] = (1 - 2 * comm.rank) * 100, 1
        opt.step([(w, g)], ARCTopK(0.25, OF))
        return np.flatnonzero(w.data).tolist(), opt.state_dict()["states"]["residual"]["w"][0].item()

    assert run_ranks(2, main) == [([20], 100.0), ([20], -100.0)]


@pytest.mark.parametrize("ranks", [2, 5])
def test_no_index_travels_and_bytes_do_not_grow_with_the_ranks(ranks):
    def main(comm):
        w, opt = Parameter("w", np.zeros(1000, np.float32)), DistOpt(SGD(1.0), comm := Metered(comm))
        for _ in range(2):
            opt.step([(w, np.full(1000, comm.rank, np.float32))], ARCTopK(0.1, of=50))
        messages = step_messages([BucketLayout(["w"], [(1000,)], [0], "f4")], ARCTopK(0.1, of=50), ranks)
        return comm.report()["all_reduce"], [m.sent(ranks) for m in messages]

    for found, expected in run_ranks(ranks, main):
        assert (found["calls"], found["payload"]) == (4, 2 * (20 * 4 * 4 + 2 * 50 * 4))
        assert found["wire"] == 2 * sum(expected)


def test_what_is_wrong_is_refused():
    for wrong in ({"density": 0}, {"of": 0}, {"decay": 1.5}, {"seed": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ARCTopK(**wrong)
    with pytest.raises(ValueError, match="does not feed its error back already"):
        ErrorFeedback(ARCTopK())
    check(ARCTopK(0.1, of=10))
