"""The adapter for optimizers of ``torch.optim``."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from distopt.buckets import BucketSet, Reduced
from distopt.device.tensors import as_tensor
from distopt.optim.adapters.base import Known, OptimizerAdapter

# hyper-parameters of torch's optimizers, which a script may change between steps
COMPARED = "lr", "momentum", "dampening", "nesterov", "betas", "alpha", "rho", "eps", "weight_decay"


class TorchAdapter(OptimizerAdapter):
    """An adapter that gives every parameter its mean gradient as ``grad``, and then calls ``step()``.

    Parameters are those of ``engine.torch_model``, with a ``tensor``.
    """

    def one_by_one(self, buckets: BucketSet, order: Mapping[str, Known], sums: Iterable[Reduced], scale: float) -> None:
        for group in self.opt.param_groups:
            for p in group["params"]:
                p.grad = None  # a parameter without a mean is left alone, as by one process
        super().one_by_one(buckets, order, sums, scale)

    def update_one(self, name: str, param: Any, value: np.ndarray, mean: np.ndarray) -> None:
        param.tensor.grad = as_tensor(mean, like=param.tensor).to(param.tensor.dtype)

    def momentum(self) -> str:
        for k, group in enumerate(self.opt.param_groups):
            for name, value in (("momentum", group.get("momentum")), ("betas[0]", group.get("betas", (0.0,))[0])):
                if value:
                    return f"{type(self.opt).__name__}'s {name}={float(value)} of group {k}"
        return ""

    def numbers(self) -> list[str]:
        return [
            text
            for k, group in enumerate(self.opt.param_groups)
            for text in (
                f"{len(group['params'])} parameters in group {k}",
                *(f"{_word(name)} {group[name]!r} of group {k}" for name in COMPARED if name in group),
            )
        ]


def _word(name: str) -> str:
    return "learning rate" if name == "lr" else name
