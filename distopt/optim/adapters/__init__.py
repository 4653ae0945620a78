"""Adapters, by which ``DistOpt`` calls the optimizer that it wraps; one file per kind of optimizer."""

from distopt.optim.adapters.base import OptimizerAdapter
from distopt.optim.adapters.fused import FusedAdapter
from distopt.optim.adapters.param import ParamAdapter
from distopt.optim.adapters.singa import SingaAdapter
from distopt.optim.foreign import call_style, is_torchs, is_transformation, refuse_closure
from distopt.optim.optimizer import Optimizer


def adapt(opt: object) -> OptimizerAdapter:
    """Return the adapter for an optimizer, by its class and methods; TypeError if it has no method that is known."""
    if isinstance(opt, OptimizerAdapter):
        return opt
    if is_torchs(opt):
        refuse_closure(opt)
        from distopt.torch.adapter import TorchAdapter

        return TorchAdapter(opt)
    if is_transformation(opt):
        from distopt.optim.adapters.optax import OptaxAdapter

        return OptaxAdapter(opt)
    method = call_style(opt)
    if isinstance(opt, Optimizer):
        return FusedAdapter(opt)
    return SingaAdapter(opt) if method == "apply" else ParamAdapter(opt)


__all__ = ["FusedAdapter", "OptimizerAdapter", "ParamAdapter", "SingaAdapter", "adapt"]
