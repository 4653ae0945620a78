"""The AdamW optimizer."""

import math
from typing import Any

import numpy as np

from distopt import kernels
from distopt.checks import check_bool
from distopt.kernels.layout import BucketLayout
from distopt.optim.adam import MOMENTS
from distopt.optim.optimizer import ElementwiseOptimizer, Optimizer
from distopt.optim.schedules import Number


class AdamW(ElementwiseOptimizer):
    """An AdamW optimizer (Loshchilov and Hutter, 2019, algorithm 2): the weight decay stands beside the adaptive step.

    ``m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2``, with g clipped and without decay, then
    ``w -= lr (sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + epsilon) + weight_decay w)``, t = 1 at the first update.
    Epsilon is added before the bias correction, as in MXNet, whose bias correction however scales the decay too.  The
    states are ``m`` and ``v``.

    Args:
        lr: the learning rate, at least 0: a number, or a schedule of k, the number of updates applied so far.
        beta_1: the decay rate b1 of the first moment, in [0, 1), a number or a schedule.
        beta_2: the decay rate b2 of the second moment, in [0, 1), a number or a schedule.
        epsilon: at least 0, a number or a schedule.
        weight_decay: the decoupled decay, at least 0, a number or a schedule.
        correct_bias: False takes 1 for the factor ``sqrt(1 - b2^t) / (1 - b1^t)``.
        **options: the keyword arguments that every ``Optimizer`` takes, such as ``clip_gradient``.

    Raises:
        ValueError: a hyper-parameter is negative or not finite, or a beta is outside [0, 1).

    Example:
        >>> import numpy as np
        >>> from distopt.optim import AdamW
        >>> opt, w = AdamW(lr=0.1, weight_decay=0.01), np.array([1.0, -2.0])
        >>> for _ in range(2):
        ...     opt.apply("w", w, np.array([0.5, 0.25]))
        ...     opt.step()
        >>> w.round(4).tolist()
        [0.7981, -2.1959]
    """

    slots, struct = ("m", "v"), "AdamW"
    options = (*Optimizer.options, "correct_bias")
    hypers = Optimizer.hypers | MOMENTS

    def __init__(
        self,
        lr: Number = 0.001,
        beta_1: Number = 0.9,
        beta_2: Number = 0.999,
        epsilon: Number = 1e-6,
        weight_decay: Number = 0.0,
        correct_bias: bool = True,
        **options: Any,
    ):
        super().__init__(lr, weight_decay, **options)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.correct_bias = check_bool("correct_bias", correct_bias)

    def rule_numbers(self) -> dict[str, float]:
        b1, b2, t = self.at("beta_1"), self.at("beta_2"), self.step_counter + 1
        gain = math.sqrt(1.0 - b2**t) / (1.0 - b1**t) if self.correct_bias else 1.0
        decays = {"beta1": b1, "one_minus_beta1": 1.0 - b1, "beta2": b2, "one_minus_beta2": 1.0 - b2}
        return {**decays, "gain": gain, "epsilon": self.at("epsilon")}

    def run_kernel(self, members: BucketLayout, grad: np.ndarray, slots: dict[str, np.ndarray], *rest: Any) -> None:
        kernels.adamw(members, grad, slots["m"], slots["v"], *rest)
