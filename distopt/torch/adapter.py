"""The adapter for optimizers of ``torch.optim``."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from distopt.buckets import BucketSet, Reduced
from distopt.optim.adapters.base import Known, OptimizerAdapter
from distopt.torch.tensors import as_tensor

# Hyper-parameters of torch's optimizers, which a script may change between steps, and what errors call them.
COMPARED = {"lr": "learning rate"} | {
    name: name for name in ("momentum", "dampening", "nesterov", "betas", "alpha", "rho", "eps", "weight_decay")
}


class TorchAdapter(OptimizerAdapter):
    """An adapter that gives the ``tensor`` of every parameter its mean as ``grad``, and then calls ``step()``."""

    def one_by_one(self, buckets: BucketSet, order: Mapping[str, Known], sums: Iterable[Reduced], scale: float) -> None:
        for group in self.opt.param_groups:
            for p in group["params"]:
                # a parameter without a mean is left alone, as by one process
                p.grad = None
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
                *(f"{word} {group[name]!r} of group {k}" for name, word in COMPARED.items() if name in group),
            )
        ]
