"""Wrap any optimizer so that N processes train one model.

Pack the gradients, exchange what is worth sending, keep the rest, take the mean, step.
"""

import importlib
from typing import TYPE_CHECKING, Any

from distopt import comm, compress, cost, optim
from distopt.comm import run_ranks, world
from distopt.comm.mpi_start import guard_start
from distopt.dist_opt import DistOpt
from distopt.gradients import Parameter
from distopt.nonfinite import LossScaler
from distopt.tape import Tape
from distopt.texts import check_not_shadowing
from distopt.version import __version__

if TYPE_CHECKING:
    from distopt import experiment, fit, monitor, volume
    from distopt.trainer import Trainer
    from distopt.virtual_ranks import simulate

check_not_shadowing()
guard_start()

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

# Public names that most programs never use, and their modules, which are imported when somebody asks.
_LATER = {"Trainer": "trainer", "simulate": "virtual_ranks"} | {
    module: module for module in ("experiment", "fit", "monitor", "volume")
}


def __getattr__(name: str) -> Any:
    """Import a public name that not every program needs, when it is first used."""
    if name not in _LATER:
        raise AttributeError(f"module 'distopt' has no attribute {name!r}")
    module = importlib.import_module(f"distopt.{_LATER[name]}")
    return module if _LATER[name] == name else getattr(module, name)


def __dir__() -> list[str]:
    """List the public names alone, not the modules that they come from."""
    return list(__all__)
