"""How DistOpt talks to the optimizer that it wraps; one file per kind of optimizer."""

from distopt.adapters.adapter import Adapter
from distopt.adapters.buckets import ByBucket
from distopt.adapters.names import ByName
from distopt.adapters.params import ByParam
from distopt.optim.optimizer import Optimizer
from distopt.optim.strangers import way


def adapt(opt: object) -> Adapter:
    """The adapter for an optimizer object, by what it offers; TypeError if it offers nothing that is known."""
    found = way(opt)
    if isinstance(opt, Optimizer):
        return ByBucket(opt)
    return ByName(opt) if found == "apply" else ByParam(opt)


__all__ = ["Adapter", "ByBucket", "ByName", "ByParam", "adapt"]
