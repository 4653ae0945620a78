"""Optimizers, wrappers that stand in front of any optimizer, and schedules of hyper-parameters.

A new optimizer takes a kernel in ``native/``, one file here, one test file, and one line in this package's exports.
"""

from distopt.optim.adagrad import AdaGrad
from distopt.optim.adam import Adam
from distopt.optim.adamw import AdamW
from distopt.optim.batch_gradients import BatchGradients
from distopt.optim.lamb import LAMB
from distopt.optim.lans import LANS
from distopt.optim.lars import LARS
from distopt.optim.lars_wrapper import LarsWrapper
from distopt.optim.lbsgd import LBSGD
from distopt.optim.muon import Muon
from distopt.optim.optimizer import Optimizer
from distopt.optim.protocols import AnyOptimizer, SupportsApply, SupportsUpdate
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
from distopt.optim.signum import Signum
from distopt.optim.wrapper import Wrapper

__all__ = [
    "LAMB",
    "LANS",
    "LARS",
    "LBSGD",
    "SGD",
    "AdaGrad",
    "Adam",
    "AdamW",
    "AnyOptimizer",
    "BatchGradients",
    "Constant",
    "Cosine",
    "DecayScheduler",
    "ExponentialDecay",
    "Factor",
    "LarsWrapper",
    "MultiFactor",
    "Muon",
    "Optimizer",
    "Poly",
    "RMSProp",
    "Signum",
    "SupportsApply",
    "SupportsUpdate",
    "Wrapper",
    "from_strategy",
]
