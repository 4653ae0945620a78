"""Law 2 for models of PyTorch: what a compressor has not sent arrives later, whatever a script does between its steps.

Parameters that no rank, or some ranks use, that are frozen and thawed; passes that add up, with an exchange each or
under ``no_sync``; passes that are refused, or exchanged by hand.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import zlib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")

import distopt.torch as dt  # noqa: E402
from distopt import run_ranks  # noqa: E402
from distopt.compress import (  # noqa: E402
    DCT,
    Chunks,
    ErrorFeedback,
    Half,
    Int4,
    Int8,
    OneBit,
    Packed,
    Threshold,
    TopK,
    TwoBit,
)

pytestmark = pytest.mark.torch

SHAPES = {"first": (7, 11), "second": (64,), "third": (3, 5, 4), "last": (1,)}
ALL = ErrorFeedback(TopK(1.0))
COMPRESSORS = {  # and what sends all that waits
    "top-K": (ErrorFeedback(TopK(0.1)), ALL),
    "top-K per tensor": (ErrorFeedback(TopK(0.1, per_tensor=True)), ALL),
    "threshold": (ErrorFeedback(Threshold(2.0)), ALL),
    "chunks": (ErrorFeedback(Chunks(4, 64)), ALL),
    "packed": (ErrorFeedback(Packed(TopK(0.1))), ALL),
    "packed in two bits": (ErrorFeedback(Packed(TopK(0.1), value="2bit")), ALL),
    "one bit": (ErrorFeedback(OneBit()), ALL),
    "two bits": (ErrorFeedback(TwoBit(1.0)), ALL),
    "int8": (ErrorFeedback(Int8()), ALL),
    "int4": (ErrorFeedback(Int4()), ALL),
    "half": (ErrorFeedback(Half()), ALL),
    "dct": (DCT(ErrorFeedback(Chunks(4, 64))), DCT(ErrorFeedback(Chunks(64, 64)))),
}


class Weighed(torch.nn.Module):
    """The sum of parameters, each multiplied by what is to be its gradient."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterDict({n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()})

    def forward(self, gradients):
        return sum((self.weights[name] * torch.from_numpy(g)).sum() for name, g in gradients.items())


def train(comm, name, exchange, seed, steps=12):
    """This rank's gradients that were not refused, summed up; and how far the parameters have come."""
    compressor, all_that_waits = COMPRESSORS[name]
    model = Weighed()
    sync = dt.synchronize(model, compressor, group=comm, exchange=exchange, threshold=100)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    alike, own = np.random.default_rng(seed), np.random.default_rng((seed, comm.rank))
    total = {n: np.zeros(s) for n, s in SHAPES.items()}
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=bool(alike.integers(2)))
        frozen = [n for n in SHAPES if alike.random() < 0.2]
        dropped = [n for n in SHAPES if alike.random() < 0.3]
        for n, p in model.weights.items():
            p.requires_grad_(n not in frozen)
        refused, passes, window = alike.random() < 0.15, int(alike.integers(1, 4)), dict.fromkeys(SHAPES, 0.0)
        passes = 1 if refused else passes  # a script that leaves out a step drops the means of its earlier passes
        for number in range(1, passes + 1):
            used = [n for n in SHAPES if n not in {*frozen, *dropped} and own.random() < 0.8]
            gradients = {n: own.standard_normal(SHAPES[n]) ** 3 for n in used}
            if refused and comm.rank == 0 and number == passes and used:
                gradients[used[0]].flat[0] = np.inf
            silent = number < passes and alike.random() < 0.5
            loss = model(gradients) if used else None
            if silent:
                with sync.no_sync():
                    loss.backward() if used and loss.requires_grad else None
            elif used:
                loss.backward()
            else:
                sync.exchange()
            for n in used:
                window[n] = window[n] + gradients[n]
        finite = all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in model.parameters())
        if finite:
            optimizer.step()
            for n, g in window.items():
                total[n] = total[n] + g
        assert comm.control.gather(str(finite)) == [str(finite)] * comm.size
    sync.compressor = all_that_waits
    for _ in range(3):
        optimizer.zero_grad()
        for p in model.parameters():
            p.requires_grad_(True)
        model({n: np.zeros(s) for n, s in SHAPES.items()}).backward()
        optimizer.step()
    return total, {n: -p.detach().numpy() for n, p in model.weights.items()}


@pytest.mark.parametrize("exchange", ["gather", "two_phase", "nodes"])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_what_was_not_sent_arrives(name, exchange):
    rounded = 0.05 if name == "half" else 1e-9  # sums of halves are rounded on the wire
    for seed in range(3):
        ranks, program = 2 + seed % 2, zlib.crc32(f"{name} {seed}".encode())
        found = run_ranks(ranks, lambda comm, program=program: train(comm, name, exchange, program))
        for n in SHAPES:
            mean = sum(total[n] for total, _ in found) / ranks
            for _, moved in found:
                np.testing.assert_allclose(moved[n], mean, rtol=0, atol=rounded, err_msg=f"{n}, seed {seed}")
