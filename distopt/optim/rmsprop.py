"""RMSProp."""

import math
from typing import Any

import numpy as np

from distopt import kernels
from distopt.optim.optimizer import Optimizer
from distopt.optim.schedules import Number
from distopt.tables import Members


class RMSProp(Optimizer):
    """RMSProp as in SINGA: ``r = rho r + (1 - rho) d^2;  w -= lr d / sqrt(r + epsilon)``, epsilon inside the root.

    ``d = g + weight_decay w``.  Every hyper-parameter is a number or a schedule of k, the updates applied so far.
    Raises ValueError for a negative or infinite value, or a ``rho`` above 1.
    """

    slots, struct = ("running_average",), "RmsProp"
    hypers = Optimizer.hypers | {"rho": (0.0, 1.0), "epsilon": (0.0, math.inf)}

    def __init__(
        self, lr: Number = 0.1, rho: Number = 0.9, epsilon: Number = 1e-8, weight_decay: Number = 0.0, **options: Any
    ):
        super().__init__(lr, weight_decay, **options)
        self.rho, self.epsilon = rho, epsilon

    def _own(self) -> dict[str, float]:
        rho = self.at("rho")
        return {"rho": rho, "fade": 1.0 - rho, "epsilon": self.at("epsilon")}

    def _update(self, members: Members, grad: np.ndarray, state: dict[str, np.ndarray], *rest: Any) -> None:
        kernels.rmsprop(members, grad, state["running_average"], *rest)
