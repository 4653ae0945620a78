"""Optimizers and schedules.  Adding one is a kernel text, one file here, one test file, and one line below."""

from distopt.optim.adagrad import AdaGrad
from distopt.optim.adam import Adam
from distopt.optim.adamw import AdamW
from distopt.optim.lamb import LAMB
from distopt.optim.lans import LANS
from distopt.optim.lars import LARS
from distopt.optim.lbsgd import LBSGD
from distopt.optim.optimizer import Optimizer
from distopt.optim.rmsprop import RMSProp
from distopt.optim.schedules import Constant, DecayScheduler, ExponentialDecay
from distopt.optim.sgd import SGD

__all__ = [
    "LAMB",
    "LANS",
    "LARS",
    "LBSGD",
    "SGD",
    "AdaGrad",
    "Adam",
    "AdamW",
    "Constant",
    "DecayScheduler",
    "ExponentialDecay",
    "Optimizer",
    "RMSProp",
]
