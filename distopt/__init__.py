"""Wrap any optimizer so that N processes train one model.

Pack the gradients, exchange what is worth sending, keep the rest, take the mean, step.
"""

import importlib
from typing import TYPE_CHECKING, Any

from distopt import comm, compress, optim
from distopt.comm import run_ranks, world
from distopt.comm.mpi_start import guard_start
from distopt.dist_opt import DistOpt
from distopt.engine.nonfinite import LossScaler
from distopt.engine.parameters import Parameter
from distopt.kernels.signatures import warn_if_shadowing
from distopt.version import __version__

if TYPE_CHECKING:
    from distopt import cost, data, experiment, fit, lab, monitor
    from distopt.lab.simulate import simulate
    from distopt.lab.simulate_local import simulate_local
    from distopt.lab.tape import Tape
    from distopt.local_steps import LocalSteps
    from distopt.trainer import Trainer

warn_if_shadowing()
guard_start()

__all__ = [
    "DistOpt",
    "LocalSteps",
    "LossScaler",
    "Parameter",
    "Tape",
    "Trainer",
    "__version__",
    "comm",
    "compress",
    "cost",
    "data",
    "experiment",
    "fit",
    "lab",
    "monitor",
    "optim",
    "run_ranks",
    "simulate",
    "simulate_local",
    "world",
]

# Public names that most programs never use, and where they are: a module, or a name in one, imported when first used.
_LATER = {
    "LocalSteps": "local_steps:LocalSteps",
    "Tape": "lab.tape:Tape",
    "Trainer": "trainer:Trainer",
    "cost": "cost",
    "data": "data",
    "experiment": "experiment",
    "fit": "fit",
    "lab": "lab",
    "monitor": "monitor",
    "simulate": "lab.simulate:simulate",
    "simulate_local": "lab.simulate_local:simulate_local",
    "volume": "volume",
}


def __getattr__(name: str) -> Any:
    """Import a public name that not every program needs, when it is first used."""
    if name not in _LATER:
        raise AttributeError(f"module 'distopt' has no attribute {name!r}")
    place, _, attribute = _LATER[name].partition(":")
    module = importlib.import_module(f"distopt.{place}")
    return getattr(module, attribute) if attribute else module


def __dir__() -> list[str]:
    """List the public names alone, not the modules that they come from."""
    return list(__all__)
