"""The engine and its facades."""

import itertools

import numpy as np

import distopt
from distopt import DistOpt, Parameter
from distopt.compress import ErrorFeedback, TopK
from distopt.optim import SGD


def test_facades_do_not_inherit_from_the_engine():
    for kind in (DistOpt, distopt.Trainer, type(distopt.simulate(2))):
        assert distopt.engine.engine.Engine not in kind.__mro__
        names = [name for base in kind.__mro__[1:] for name in vars(base) if name.startswith("_") and name[1] != "_"]
        assert not set(names) & set(vars(kind)), "no private member of a base is overridden"


class Own(TopK):
    """A user's, which may keep what its repr does not tell."""


def test_a_compressor_made_anew_in_each_step_keeps_the_plan_of_the_last_one():
    p, opt = Parameter("w", np.zeros(8, np.float32)), DistOpt(SGD(0.1))
    used = []
    for make in [lambda: ErrorFeedback(TopK(0.5))] * 3 + [lambda: ErrorFeedback(TopK(0.25))] + [lambda: Own(0.5)] * 2:
        opt.step([(p, np.ones(8, np.float32))], make())
        used.append(opt.engine.compressor)
    assert [a is b for a, b in itertools.pairwise(used)] == [True, True, False, False, False]
    assert repr(used[3]) == "ErrorFeedback(TopK(0.25, per_tensor=False))"
