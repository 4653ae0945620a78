"""The AdaGrad optimizer."""

import math
from typing import Any

import numpy as np

from distopt import kernels
from distopt.kernels.layout import BucketLayout
from distopt.optim.optimizer import ElementwiseOptimizer, Optimizer
from distopt.optim.schedules import Number


class AdaGrad(ElementwiseOptimizer):
    """An AdaGrad optimizer (Duchi et al., 2011) as in SINGA, with epsilon inside the root.

    ``d = g + weight_decay w;  h += d^2;  w -= lr d / sqrt(h + epsilon)``.  The state is ``history``, h.

    Args:
        lr: the learning rate, at least 0: a number, or a schedule of k, the number of updates applied so far.
        epsilon: at least 0, a number or a schedule.
        weight_decay: at least 0, a number or a schedule.
        **options: the keyword arguments that every ``Optimizer`` takes, such as ``clip_gradient``.

    Raises:
        ValueError: a hyper-parameter is negative or not finite.

    Example:
        >>> import numpy as np
        >>> from distopt.optim import AdaGrad
        >>> opt, w = AdaGrad(lr=0.1), np.array([1.0, -2.0])
        >>> for _ in range(2):
        ...     opt.apply("w", w, np.array([0.5, 0.25]))
        ...     opt.step()
        >>> w.round(4).tolist()
        [0.8293, -2.1707]
    """

    slots, struct = ("history",), "AdaGrad"
    hypers = Optimizer.hypers | {"epsilon": (0.0, math.inf)}

    def __init__(self, lr: Number = 0.1, epsilon: Number = 1e-8, weight_decay: Number = 0.0, **options: Any):
        super().__init__(lr, weight_decay, **options)
        self.epsilon = epsilon

    def rule_numbers(self) -> dict[str, float]:
        return {"epsilon": self.at("epsilon")}

    def run_kernel(self, members: BucketLayout, grad: np.ndarray, slots: dict[str, np.ndarray], *rest: Any) -> None:
        kernels.adagrad(members, grad, slots["history"], *rest)
