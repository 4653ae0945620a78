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
        for k, group in enumerate(self.opt.param_groups):
            for name, value in (("momentum", group.get("momentum")), ("betas[0]", group.get("betas", (0.0,))[0])):
                if value:
                    return f"{type(self.opt).__name__}'s {name}={float(value)} of group {k}"
        return ""

    def numbers(self) -> list[str]:
        return [f"learning rate {group['lr']!r} of group {k}" for k, group in enumerate(self.opt.param_groups)]
