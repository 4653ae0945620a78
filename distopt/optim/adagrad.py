"""AdaGrad."""

import math
from typing import Any

import numpy as np

from distopt import kernels
from distopt.optim.optimizer import Optimizer
from distopt.optim.schedules import Number
from distopt.tables import Members


class AdaGrad(Optimizer):
    """AdaGrad (Duchi et al., 2011) as in SINGA: ``h += d^2;  w -= lr d / sqrt(h + epsilon)``, epsilon inside the root.

    ``d = g + weight_decay w``.  Every hyper-parameter is a number or a schedule of k, the updates applied so far.
    Raises ValueError for a negative or infinite value.
    """

    slots, struct = ("history",), "AdaGrad"
    hypers = Optimizer.hypers | {"epsilon": (0.0, math.inf)}

    def __init__(self, lr: Number = 0.1, epsilon: Number = 1e-8, weight_decay: Number = 0.0, **options: Any):
        super().__init__(lr, weight_decay, **options)
        self.epsilon = epsilon

    def _own(self) -> dict[str, float]:
        return {"epsilon": self.at("epsilon")}

    def _update(self, members: Members, grad: np.ndarray, state: dict[str, np.ndarray], *rest: Any) -> None:
        kernels.adagrad(members, grad, state["history"], *rest)
