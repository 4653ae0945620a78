"""The adapter for optimizers of ``torch.optim``."""

from typing import Any

import numpy as np

from distopt.device.tensors import as_tensor
from distopt.optim.adapters.base import OptimizerAdapter


class TorchAdapter(OptimizerAdapter):
    """An adapter that gives every parameter its mean gradient as ``grad``, and then calls ``step()``.

    Parameters are those of ``engine.torch_model``, with a ``tensor``.
    """

    def update_one(self, name: str, param: Any, value: np.ndarray, mean: np.ndarray) -> None:
        param.tensor.grad = as_tensor(mean, like=param.tensor).to(param.tensor.dtype)

    def momentum(self) -> str:
        momentum = momentum_of(self.opt)
        return f"{type(self.opt).__name__}'s momentum={momentum}" if momentum else ""

    def numbers(self) -> list[str]:
        return [f"learning rate {group['lr']!r} of group {k}" for k, group in enumerate(self.opt.param_groups)]


def momentum_of(optimizer: Any) -> float:
    """Return the largest momentum, or first beta, of an optimizer's groups of parameters.

    Example:
        >>> import torch
        >>> momentum_of(torch.optim.Adam([torch.zeros(1)]))
        0.9
    """
    groups = optimizer.param_groups
    return max((float(g.get("momentum") or g.get("betas", (0.0,))[0]) for g in groups), default=0.0)
