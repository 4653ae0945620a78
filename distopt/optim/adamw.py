"""AdamW."""

import math
from typing import Any

import numpy as np

from distopt import kernels
from distopt.numbers import flag
from distopt.optim.adam import MOMENTS
from distopt.optim.optimizer import Optimizer
from distopt.optim.schedules import Number
from distopt.tables import Members


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2): weight decay stands beside the adaptive step.

    ``m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2``, with g clipped and without decay, then
    ``w -= lr (sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + epsilon) + weight_decay w)``, t = 1 at the first update:
    epsilon before the bias correction, as in MXNet, whose bias correction however scales the decay too.
    ``correct_bias=False`` leaves the correction out.

    Every hyper-parameter is a number or a schedule of k, the updates applied so far.  Raises ValueError for a negative
    or infinite value, or a beta outside [0, 1).
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
        self.correct_bias = flag("correct_bias", correct_bias)

    def _own(self) -> dict[str, float]:
        b1, b2, t = self.at("beta_1"), self.at("beta_2"), self.step_counter + 1
        gain = math.sqrt(1.0 - b2**t) / (1.0 - b1**t) if self.correct_bias else 1.0
        return {"b1": b1, "fade1": 1.0 - b1, "b2": b2, "fade2": 1.0 - b2, "gain": gain, "epsilon": self.at("epsilon")}

    def _update(self, members: Members, grad: np.ndarray, state: dict[str, np.ndarray], *rest: Any) -> None:
        kernels.adamw(members, grad, state["m"], state["v"], *rest)
