"""How DistOpt talks to the optimizer that it wraps; one file per kind of optimizer."""

from distopt.adapters.adapter import Adapter
from distopt.adapters.buckets import ByBucket
from distopt.adapters.names import ByName
from distopt.adapters.params import ByParam


def adapt(opt: object) -> Adapter:
    """The adapter for an optimizer object, by what it offers; TypeError if it offers nothing that is known."""
    if isinstance(opt, type):
        raise TypeError(f"opt must be an optimizer, got the class {opt.__name__}: make an instance of it")
    for kind in (ByBucket, ByName, ByParam):
        if kind.fits(opt):
            return kind(opt)
    raise TypeError(f"opt must have apply(name, value, grad) or update(param, grad), got {type(opt).__name__}")


__all__ = ["Adapter", "ByBucket", "ByName", "ByParam", "adapt"]
