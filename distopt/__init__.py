"""Wrap any optimizer so that N processes train one model.

Pack the gradients, exchange what is worth sending, keep the rest, take the mean, step.
"""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import TYPE_CHECKING, Any

from distopt import comm, compress, optim
from distopt.comm import run_ranks, world
from distopt.comm.mpi_start import guard_start
from distopt.dist_opt import DistOpt
from distopt.engine.nonfinite import LossScaler
from distopt.engine.parameters import Parameter
from distopt.kernels.signatures import check_not_shadowing
from distopt.version import __version__

if TYPE_CHECKING:
    from distopt import volume
    from distopt.local_steps import LocalSteps
    from distopt.trainer import Trainer
    from distopt.volume import cost, experiment, fit
    from distopt.volume.experiment import callbacks as monitor
    from distopt.volume.simulate import simulate
    from distopt.volume.simulate_local import simulate_local
    from distopt.volume.tape import Tape

check_not_shadowing()
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
    "experiment",
    "fit",
    "monitor",
    "optim",
    "run_ranks",
    "simulate",
    "simulate_local",
    "volume",
    "world",
]

# Public names that most programs never use, and where they are: a module, or a name in one, imported when first used.
_LATER = {
    "LocalSteps": "local_steps:LocalSteps",
    "Tape": "volume.tape:Tape",
    "Trainer": "trainer:Trainer",
    "cost": "volume.cost",
    "experiment": "volume.experiment",
    "fit": "volume.fit",
    "monitor": "volume.experiment.callbacks",
    "simulate": "volume.simulate:simulate",
    "simulate_local": "volume.simulate_local:simulate_local",
    "volume": "volume",
}


def __getattr__(name: str) -> Any:
    """Import a public name that not every program needs, when it is first used."""
    if name not in _LATER:
        raise AttributeError(f"module 'distopt' has no attribute {name!r}")
    place, _, attribute = _LATER[name].partition(":")
    module = importlib.import_module(f"distopt.{place}")
    return getattr(module, attribute) if attribute else module


class _PublicModules(MetaPathFinder, Loader):
    """Lets ``from distopt.fit import read`` find the module that ``distopt.fit`` is, which lies in ``volume/``."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """None for any other module."""
        package, _, module = name.rpartition(".")
        place = _LATER.get(module, "")
        public = package == __name__ and module != place and ":" not in place
        return spec_from_loader(name, self, origin=f"{__name__}.{place}") if place and public else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself, not a second one."""
        module = importlib.import_module(str(spec.origin))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run; what it is called stays as it was."""
        if module.__spec__:
            module.__spec__ = module.__spec__.loader_state


sys.meta_path.append(_PublicModules())


def __dir__() -> list[str]:
    """List the public names alone, not the modules that they come from."""
    return list(__all__)
