"""The RMSProp optimizer."""

import math
from typing import Any

import numpy as np

from distopt import kernels
from distopt.kernels.layout import BucketLayout
from distopt.optim.optimizer import ElementwiseOptimizer, Optimizer
from distopt.optim.schedules import Number


class RMSProp(ElementwiseOptimizer):
    """An RMSProp optimizer as in SINGA, with epsilon inside the root.

    ``d = g + weight_decay w;  r = rho r + (1 - rho) d^2;  w -= lr d / sqrt(r + epsilon)``.  The state is
    ``running_average``, r.

    Args:
        lr: the learning rate, at least 0: a number, or a schedule of k, the number of updates applied so far.
        rho: the decay rate of the running average, in [0, 1], a number or a schedule.
        epsilon: at least 0, a number or a schedule.
        weight_decay: at least 0, a number or a schedule.
        **options: the keyword arguments that every ``Optimizer`` takes, such as ``clip_gradient``.

    Raises:
        ValueError: a hyper-parameter is negative or not finite, or ``rho`` is above 1.

    Example:
        >>> import numpy as np
        >>> from distopt.optim import RMSProp
        >>> opt, w = RMSProp(lr=0.01), np.array([1.0, -2.0])
        >>> for _ in range(2):
        ...     opt.apply("w", w, np.array([0.5, 0.25]))
        ...     opt.step()
        >>> w.round(4).tolist()
        [0.9454, -2.0546]
    """

    slots, struct = ("running_average",), "RmsProp"
    hypers = Optimizer.hypers | {"rho": (0.0, 1.0), "epsilon": (0.0, math.inf)}

    def __init__(
        self, lr: Number = 0.1, rho: Number = 0.9, epsilon: Number = 1e-8, weight_decay: Number = 0.0, **options: Any
    ):
        super().__init__(lr, weight_decay, **options)
        self.rho, self.epsilon = rho, epsilon

    def rule_numbers(self) -> dict[str, float]:
        rho = self.at("rho")
        return {"rho": rho, "one_minus_rho": 1.0 - rho, "epsilon": self.at("epsilon")}

    def run_kernel(self, members: BucketLayout, grad: np.ndarray, slots: dict[str, np.ndarray], *rest: Any) -> None:
        kernels.rmsprop(members, grad, slots["running_average"], *rest)
