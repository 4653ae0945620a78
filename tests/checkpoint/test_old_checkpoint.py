"""A checkpoint that commit 5284314 wrote, of two ranks in the middle of a window, still loads, and training goes on."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from distopt import DistOpt, Parameter, run_ranks
from distopt.compress import ErrorFeedback, TopK
from distopt.optim import Adam

SAVED = Path(__file__).parent / "saved"  # after 5 calls of ``train``'s 8
SHAPES = [(3, 4), (50,), (7,), ()]
DIGEST = "43494ec60f6f96ac650cf0a77ffdf4830db9d5fb7c13b98f1234151222e21d87"  # of that run's parameters after 8


def gradient(call, rank, k, shape):
    n = int(np.prod(shape))
    return (((np.arange(n) * 7 + 3 * call + 5 * rank + 11 * k) % 13 - 6) / 8).reshape(shape).astype(np.float32)


def train(comm, params, opt, calls):
    for call in calls:
        pairs = [(p, gradient(call, comm.rank, k, p.data.shape)) for k, p in enumerate(params)]
        opt.step(pairs, ErrorFeedback(TopK(0.1)))
    return hashlib.sha256(b"".join(p.data.tobytes() for p in params)).hexdigest()


@pytest.fixture
def saved(tmp_path):
    shutil.copytree(SAVED, tmp_path / "run")
    return tmp_path / "run"


def test_a_run_resumes_from_the_old_checkpoint_to_the_recorded_bits(saved):
    def main(comm):
        params = [Parameter(f"p{k}", np.zeros(s, np.float32)) for k, s in enumerate(SHAPES)]
        opt = DistOpt(Adam(0.01, epsilon=1e-3), comm, threshold=60, num_batches=2)
        extra = opt.load(saved, params)
        assert (extra["epoch"], extra["seed"], extra["array"].tolist()) == (3, comm.rank, [0, 1, 2])
        assert opt.step_counter == 2
        return train(comm, params, opt, range(5, 8))

    assert run_ranks(2, main) == [DIGEST] * 2


def test_the_run_without_a_checkpoint_has_these_bits_too():
    def main(comm):
        params = [
            Parameter(f"p{k}", (np.arange(int(np.prod(s))) % 5 / 4).reshape(s).astype(np.float32))
            for k, s in enumerate(SHAPES)
        ]
        return train(comm, params, DistOpt(Adam(0.01, epsilon=1e-3), comm, threshold=60, num_batches=2), range(8))

    assert run_ranks(2, main) == [DIGEST] * 2
