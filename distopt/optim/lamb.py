"""LAMB."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from distopt import kernels
from distopt.numbers import flag
from distopt.optim.adam import MOMENTS, moments
from distopt.optim.exclude import Exclude
from distopt.optim.layerwise import Layerwise, bounds
from distopt.optim.optimizer import Kept, Optimizer, Part, Together
from distopt.optim.schedules import Number
from distopt.tables import Members


class LAMB(Layerwise):
    """LAMB (You et al., "Large batch optimization for deep learning", 2020, algorithm 2).

    ``m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2``, with g clipped and without decay;
    ``u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon) + weight_decay w``, t = 1 at the first update, or m and v
    as they are without ``bias_correction``; ``w -= lr |w| / |u| u``, the ratio being 1 if a norm is 0.

    ``lower_bound`` and ``upper_bound`` hold |w| (not the ratio); None or <= 0 is none.  ``exclude`` (``Layerwise``):
    these names have the ratio 1; ``wd_mult`` spares them the decay.

    Every other hyper-parameter is a number or a schedule of k, the updates applied so far.  Raises ValueError for a
    negative or infinite value, a beta outside [0, 1), or a lower bound above the upper one.
    """

    slots, struct, kinds = ("m", "v"), "Lamb", 2
    options = (*Layerwise.options, "bounds", "bias_correction")
    hypers = Optimizer.hypers | MOMENTS

    def __init__(
        self,
        lr: Number = 0.001,
        beta_1: Number = 0.9,
        beta_2: Number = 0.999,
        epsilon: Number = 1e-6,
        weight_decay: Number = 0.0,
        lower_bound: float | None = None,
        upper_bound: float | None = None,
        bias_correction: bool = True,
        exclude: Exclude = (),
        **options: Any,
    ):
        super().__init__(lr, weight_decay, exclude, **options)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.bounds, self.bias_correction = bounds(lower_bound, upper_bound), flag("bias_correction", bias_correction)

    def _own(self) -> dict[str, float]:
        return moments(self.at, self.step_counter + 1, self.bias_correction) | self.bounds

    def _update_all(
        self, kept: Kept, parts: Sequence[Part], refused: np.ndarray | None, together: Together | None
    ) -> None:
        m, v = kept.state["m"], kept.state["v"]

        def measure(members: Members, grad: np.ndarray, chunks: np.ndarray) -> None:
            kernels.lamb_moments(members, grad, m, v, chunks, self._now, refused)

        self._widen(parts, refused)
        squares = self._measured(kept, parts, measure, "sums", 2, together)
        for members, _ in parts:
            kernels.lamb(members, m, v, squares, self._now, refused)
