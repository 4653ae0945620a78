"""Schedules of hyper-parameters: pure functions of k, the number of updates applied so far (0 at the first update)."""

from distopt.optim.schedules.decline import Cosine, Poly, resnet50_32k
from distopt.optim.schedules.factor import Factor, MultiFactor
from distopt.optim.schedules.scheduler import Constant, DecayScheduler, ExponentialDecay, Hyper, Number, Schedule
from distopt.optim.schedules.strategy import Strategy, from_strategy

__all__ = [
    "Constant",
    "Cosine",
    "DecayScheduler",
    "ExponentialDecay",
    "Factor",
    "Hyper",
    "MultiFactor",
    "Number",
    "Poly",
    "Schedule",
    "Strategy",
    "from_strategy",
    "resnet50_32k",
]
