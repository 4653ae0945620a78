"""Ranks that train on the same data are told so, once; nothing else would."""

import logging

import numpy as np
import pytest

from distopt import DistOpt, Parameter, run_ranks
from distopt.compress import ErrorFeedback, TopK
from distopt.optim import SGD


def told(caplog, gradient, size=3, steps=3, compressor=None, **options):
    """How often ranks are told that their gradients are the same, whose gradient in each step this function returns."""

    def main(comm):
        params = [Parameter(f"p{k}", np.zeros(5000, np.float32)) for k in range(2)]
        opt = DistOpt(SGD(0.1), comm, **options)
        for step in range(steps):
            pairs = [(p, gradient(comm.rank, step).astype(np.float32)) for p in params]
            opt.step(pairs, compressor) if compressor else opt(pairs)

    with caplog.at_level(logging.WARNING, "distopt"):
        run_ranks(size, main)
    return sum(f"the same on all {size} ranks" in record.getMessage() for record in caplog.records)


def of_data(rank, step):
    return np.random.default_rng((rank, step)).standard_normal(5000)


@pytest.mark.parametrize("compressor", [None, ErrorFeedback(TopK(0.01))])
@pytest.mark.parametrize("options", [{}, {"num_batches": 3}, {"overlap": True}, {"nonfinite": "skip"}])
def test_the_same_data_on_all_ranks_is_told_once(caplog, compressor, options):
    assert told(caplog, lambda rank, step: of_data(0, step), compressor=compressor, **options) == 1


@pytest.mark.parametrize(
    "gradient",
    [
        of_data,
        lambda rank, step: np.where(np.arange(5000) == 17, rank, 1.0),  # one number differs
        lambda rank, step: of_data(rank if step == 0 else 0, step),  # later ones may be the same
        lambda rank, step: np.zeros(5000),  # of what a first step does not reach
    ],
)
def test_data_of_ones_own_is_nothing_to_be_told(caplog, gradient):
    assert told(caplog, gradient) == 0


def test_one_rank_alone_is_told_nothing(caplog):
    assert told(caplog, lambda rank, step: of_data(0, step), size=1) == 0


def test_after_a_refused_step_the_next_one_is_the_first(caplog):
    bad = np.full(5000, np.nan)
    assert told(caplog, lambda rank, step: of_data(rank, step) if step else bad, nonfinite="skip") == 0
    assert told(caplog, lambda rank, step: of_data(0, step) if step else bad, nonfinite="skip") == 1
