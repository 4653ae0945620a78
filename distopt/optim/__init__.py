"""Optimizers and schedules.  Adding one is a kernel text, one file here, one test file, and one line below."""

from distopt.optim.adagrad import AdaGrad
from distopt.optim.adam import Adam
from distopt.optim.optimizer import Optimizer
from distopt.optim.rmsprop import RMSProp
from distopt.optim.schedules import (
    Constant,
    Cosine,
    DecayScheduler,
    ExponentialDecay,
    Factor,
    MultiFactor,
    Poly,
    from_strategy,
)
from distopt.optim.sgd import SGD

__all__ = [
    "SGD",
    "AdaGrad",
    "Adam",
    "Constant",
    "Cosine",
    "DecayScheduler",
    "ExponentialDecay",
    "Factor",
    "MultiFactor",
    "Optimizer",
    "Poly",
    "RMSProp",
    "from_strategy",
]
