"""The engine's step: its parts, and what it costs the host in Python calls."""

import collections
import sys
from pathlib import Path

import numpy as np
import pytest

import distopt
from distopt import DistOpt, Parameter, run_ranks
from distopt.compress import DeepGradientCompression, Dense, ErrorFeedback, Half, TopK
from distopt.optim import SGD

PACKAGE = str(Path(distopt.__file__).parent)
MOST = {  # calls of functions of this package in a step of three parameters on one of two ranks
    "dense": (Dense(), 227),
    "half": (Half(), 238),
    "topk": (ErrorFeedback(TopK(0.1)), 283),
    "dgc": (DeepGradientCompression(TopK(0.1), exclude_1d=False), 352),
}


def calls_of(step):
    """How often each function of this package is called."""
    counts = collections.Counter()

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and "<" not in frame.f_code.co_name:
            counts[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return counts


@pytest.mark.parametrize("name", MOST)
def test_a_step_makes_few_python_calls(name):
    compressor, most = MOST[name]

    def main(comm):
        params = [Parameter(f"p{k}", np.zeros((4, 5), np.float32)) for k in range(3)]
        opt = DistOpt(SGD(0.1, momentum=0.0 if name == "dgc" else 0.9), comm)
        losses = [[(p, np.ones((4, 5), np.float32)) for p in params] for _ in range(4)]
        for loss in losses[:3]:
            opt.step(loss, compressor)
        return calls_of(lambda: opt.step(losses[3], compressor))

    for counts in run_ranks(2, main):
        assert counts.total() <= most, counts.most_common(20)


def test_facades_do_not_inherit_from_the_engine():
    for kind in (DistOpt, distopt.Trainer, type(distopt.simulate(2))):
        assert distopt.engine.engine.Engine not in kind.__mro__
        names = [name for base in kind.__mro__[1:] for name in vars(base) if name.startswith("_") and name[1] != "_"]
        assert not set(names) & set(vars(kind)), "no private member of a base is overridden"
