"""Wrap any optimizer so that N processes train one model.

Pack the gradients, exchange what is worth sending, keep the rest, take the mean, step.
"""

from distopt import comm, compress, cost, experiment, fit, monitor, optim, volume
from distopt.comm import run_ranks, world
from distopt.dist_opt import DistOpt
from distopt.gradients import Parameter
from distopt.nonfinite import LossScaler
from distopt.tape import Tape
from distopt.trainer import Trainer
from distopt.version import __version__
from distopt.virtual_ranks import simulate

__all__ = [
    "DistOpt",
    "LossScaler",
    "Parameter",
    "Tape",
    "Trainer",
    "__version__",
    "comm",
    "compress",
    "cost",
    "experiment",
    "fit",
    "monitor",
    "optim",
    "run_ranks",
    "simulate",
    "volume",
    "world",
]
