"""Adam."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from distopt import kernels
from distopt.optim.optimizer import Optimizer
from distopt.optim.schedules import Number
from distopt.tables import Members

BELOW_1 = float(np.nextafter(1.0, 0.0))
MOMENTS = {"beta_1": (0.0, BELOW_1), "beta_2": (0.0, BELOW_1), "epsilon": (0.0, math.inf)}  # hyper-parameters


def moments(at: Callable[[str], float], t: int, corrects: bool = True) -> dict[str, float]:
    """Their numbers at update t = 1, 2, ..., where ``at`` is their values; a bias is 1 if nothing ``corrects`` it."""
    b1, b2 = at("beta_1"), at("beta_2")
    first = {"b1": b1, "fade1": 1.0 - b1, "bias1": 1.0 - b1**t if corrects else 1.0}
    return first | {"b2": b2, "fade2": 1.0 - b2, "bias2": 1.0 - b2**t if corrects else 1.0, "epsilon": at("epsilon")}


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015) as in SINGA, epsilon outside the root, after the bias correction.

    ``d = g + weight_decay w;  m = b1 m + (1 - b1) d;  v = b2 v + (1 - b2) d^2``, then
    ``w -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon)`` with t = k + 1 at update number k.  Where a beta is
    a schedule, b^t is its present value to the power of t.

    Every hyper-parameter is a number or a schedule of k.  Raises ValueError for a negative or infinite value, or a beta
    outside [0, 1).
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

    def _own(self) -> dict[str, float]:
        return moments(self.at, self.step_counter + 1)

    def _update(self, members: Members, grad: np.ndarray, state: dict[str, np.ndarray], *rest: Any) -> None:
        kernels.adam(members, grad, state["m"], state["v"], *rest)
