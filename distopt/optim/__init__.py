"""Optimizers, wrappers that stand in front of any optimizer, and schedules of hyper-parameters.

A new optimizer is a kernel in ``native/``, one file here, its entry in ``ALL`` below, and its line of
docs/guides/optimizers.md: laws, benchmarks and ``distopt prove`` have what ``ALL`` has.
"""

from collections.abc import Callable

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
from distopt.optim.part import OptimizerPart, TimedOptimizer
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
from distopt.optim.wrapper import OptimizerWrapper, Wrapper

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
    "OptimizerWrapper",
    "Poly",
    "RMSProp",
    "Signum",
    "SupportsApply",
    "SupportsUpdate",
    "Wrapper",
    "from_strategy",
]


def _around(opt: AnyOptimizer) -> LarsWrapper:
    """Return LARS around an optimizer, with numbers that show."""
    return LarsWrapper(opt, ratio=0.02, weight_decay=0.1)


def _falling() -> ExponentialDecay:
    """Return a learning rate that falls on the way."""
    return ExponentialDecay(0.1, 2, 0.5, staircase=True)


# By class, a function that says all that the rest of the library is to know of it; a training asks nothing.
ALL: dict[type[Optimizer | OptimizerWrapper], Callable[[], OptimizerPart]] = {
    SGD: lambda: OptimizerPart(
        laws={
            # all of its state
            "sgd": lambda: SGD(_falling(), momentum=0.9, weight_decay=1e-3),
            "plain sgd": lambda: SGD(0.1),
            "nesterov": lambda: SGD(0.05, momentum=0.9, nesterov=True),
        },
        timed={
            "sgd": TimedOptimizer(lambda: SGD(1e-6), 3),
            "momentum sgd": TimedOptimizer(lambda: SGD(1e-6, momentum=0.9, weight_decay=1e-4), 5),
            "nesterov": TimedOptimizer(lambda: SGD(1e-6, momentum=0.9, nesterov=True), 5),
        },
    ),
    RMSProp: lambda: OptimizerPart(
        laws={"rmsprop": lambda: RMSProp(0.01, epsilon=1e-3)},
        timed={"rmsprop": TimedOptimizer(lambda: RMSProp(1e-6), 5)},
    ),
    AdaGrad: lambda: OptimizerPart(
        laws={"adagrad": lambda: AdaGrad(0.1, epsilon=1e-3)},
        timed={"adagrad": TimedOptimizer(lambda: AdaGrad(1e-6), 5)},
    ),
    Signum: lambda: OptimizerPart(
        laws={"signum": lambda: Signum(0.05, momentum=0.9)},
        timed={"signum": TimedOptimizer(lambda: Signum(1e-6, momentum=0.9), 5)},
    ),
    Adam: lambda: OptimizerPart(
        laws={"adam": lambda: Adam(0.01, epsilon=1e-3, weight_decay=1e-3)},
        timed={"adam": TimedOptimizer(lambda: Adam(1e-6), 7)},
    ),
    AdamW: lambda: OptimizerPart(
        laws={"adamw": lambda: AdamW(0.01, epsilon=1e-3, weight_decay=1e-3)},
        timed={"adamw": TimedOptimizer(lambda: AdamW(1e-6), 7)},
    ),
    LARS: lambda: OptimizerPart(
        laws={"lars": lambda: LARS(1.0, momentum=0.9, eta=0.01, weight_decay=1e-3, exclude=["3", "6"])},
        # of which 2 for norms
        timed={"lars": TimedOptimizer(lambda: LARS(1e-6, momentum=0.9), 7)},
    ),
    LAMB: lambda: OptimizerPart(
        laws={"lamb": lambda: LAMB(0.01, epsilon=1e-3, weight_decay=1e-3, upper_bound=10.0, exclude=["3", "6"])},
        timed={"lamb": TimedOptimizer(lambda: LAMB(1e-6), 10)},
    ),
    LANS: lambda: OptimizerPart(
        laws={"lans": lambda: LANS(0.01, epsilon=1e-3, weight_decay=1e-3, exclude=["3", "6"])},
        timed={"lans": TimedOptimizer(lambda: LANS(1e-6), 12)},
    ),
    LBSGD: lambda: OptimizerPart(
        laws={
            "lbsgd": lambda: LBSGD(0.1, momentum=0.9, batch_scale=2, warmup_strategy="sqrt"),
            "lbsgd lars": lambda: LBSGD(0.01, momentum=0.9, weight_decay=1e-3, warmup_strategy="lars"),
        },
        timed={"lbsgd": TimedOptimizer(lambda: LBSGD(1e-6, momentum=0.9), 7)},
    ),
    Muon: lambda: OptimizerPart(laws={"muon": lambda: Muon(0.05, weight_decay=1e-3, exclude=["6"])}, of_blas=True),
    LarsWrapper: lambda: OptimizerPart(
        laws={
            "lars": lambda: _around(SGD(_falling(), 0.9)),
            "lars with epsilon": lambda: LarsWrapper(Adam(0.01, epsilon=1e-3), epsilon=0.1, exclude=["1", "3"]),
        }
    ),
    BatchGradients: lambda: OptimizerPart(
        laws={
            "batch gradients": lambda: BatchGradients(SGD(_falling(), momentum=0.9, weight_decay=1e-3), 2),
            "three batches": lambda: BatchGradients(Adam(0.01, epsilon=1e-3), 3),
            "lars of two batches": lambda: BatchGradients(_around(SGD(_falling(), 0.9)), 2),
            "batches of lars": lambda: _around(BatchGradients(SGD(0.1, 0.9), 2)),
        }
    ),
}
