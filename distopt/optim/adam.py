"""The Adam optimizer, and the moments that Adam, LAMB and LANS have in common."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from distopt import kernels
from distopt.kernels.layout import BucketLayout
from distopt.optim.optimizer import ElementwiseOptimizer, Optimizer
from distopt.optim.schedules import Number

BELOW_1 = float(np.nextafter(1.0, 0.0))
# hyper-parameters
MOMENTS = {"beta_1": (0.0, BELOW_1), "beta_2": (0.0, BELOW_1), "epsilon": (0.0, math.inf)}


def moments(at: Callable[[str], float], t: int, corrects: bool = True) -> dict[str, float]:
    """Return the kernel's numbers for the first and second moments at one update."""
    b1, b2 = at("beta_1"), at("beta_2")
    first = {"beta1": b1, "one_minus_beta1": 1.0 - b1, "bias1": 1.0 - b1**t if corrects else 1.0}
    second = {"beta2": b2, "one_minus_beta2": 1.0 - b2, "bias2": 1.0 - b2**t if corrects else 1.0}
    return {**first, **second, "epsilon": at("epsilon")}


class Adam(ElementwiseOptimizer):
    """An Adam optimizer (Kingma and Ba, 2015) as in SINGA: epsilon outside the root, after the bias correction.

    ``d = g + weight_decay w;  m = b1 m + (1 - b1) d;  v = b2 v + (1 - b2) d^2``, then
    ``w -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon)`` with t = k + 1, where k is the number of updates
    applied so far.  Where a beta is a schedule, b^t is its present value to the power of t.  The states are ``m`` and
    ``v``.

    Args:
        lr: the learning rate, at least 0: a number, or a schedule of k.
        beta_1: the decay rate b1 of the first moment, in [0, 1), a number or a schedule.
        beta_2: the decay rate b2 of the second moment, in [0, 1), a number or a schedule.
        epsilon: at least 0, a number or a schedule.
        weight_decay: an L2 penalty, at least 0, a number or a schedule; ``AdamW`` decouples it.
        **options: the keyword arguments that every ``Optimizer`` takes, such as ``clip_gradient``.

    Raises:
        ValueError: a hyper-parameter is negative or not finite, or a beta is outside [0, 1).

    Example:
        >>> import numpy as np
        >>> from distopt.optim import Adam
        >>> opt, w = Adam(lr=0.1), np.array([1.0, -2.0])
        >>> for _ in range(2):
        ...     opt.apply("w", w, np.array([0.5, 0.25]))
        ...     opt.step()
        >>> w.round(4).tolist()
        [0.8, -2.2]
    """

    slots, struct = ("m", "v"), "Adam"
    hypers = Optimizer.hypers | MOMENTS

    def __init__(
        self,
        lr: Number = 0.1,
        beta_1: Number = 0.9,
        beta_2: Number = 0.999,
        epsilon: Number = 1e-8,
        weight_decay: Number = 0.0,
        **options: Any,
    ):
        super().__init__(lr, weight_decay, **options)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon

    def rule_numbers(self) -> dict[str, float]:
        return moments(self.at, self.step_counter + 1)

    def run_kernel(self, members: BucketLayout, grad: np.ndarray, slots: dict[str, np.ndarray], *rest: Any) -> None:
        kernels.adam(members, grad, slots["m"], slots["v"], *rest)
