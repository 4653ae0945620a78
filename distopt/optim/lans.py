"""LANS."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from distopt import kernels
from distopt.optim.adam import MOMENTS, moments
from distopt.optim.exclude import Exclude
from distopt.optim.layerwise import Layerwise, bounds
from distopt.optim.optimizer import Kept, Optimizer, Part, Together
from distopt.optim.schedules import Number
from distopt.tables import Members


class LANS(Layerwise):
    """LANS (Zheng et al., "Accelerated large batch optimization of BERT pretraining in 54 minutes", 2020).

    ``h = clip(g / |g|)``, 0 for a gradient of zeros, so that rescaling changes nothing;
    ``m = b1 m + (1 - b1) h;  v = b2 v + (1 - b2) h^2;  den = sqrt(v / (1 - b2^t)) + epsilon``, t = 1 at the first
    update; ``um = (m / (1 - b1^t)) / den + weight_decay w;  ug = h / den + weight_decay w``, both with the old w;
    ``w -= lr (b1 |w| / |um| um + (1 - b1) |w| / |ug| ug)``, a ratio being 1 if a norm is 0.

    ``lower_bound`` and ``upper_bound`` hold |w|; None or <= 0 is none.  ``exclude`` (``Layerwise``): these names have
    both ratios 1.

    Every other hyper-parameter is a number or a schedule of k, the updates applied so far.  Raises ValueError for a
    negative or infinite value, a beta outside [0, 1), or a lower bound above the upper one.
    """

    slots, struct, kinds = ("m", "v"), "Lans", 3
    options = (*Layerwise.options, "bounds")
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
        exclude: Exclude = (),
        **options: Any,
    ):
        super().__init__(lr, weight_decay, exclude, **options)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.bounds = bounds(lower_bound, upper_bound)

    def _own(self) -> dict[str, float]:
        return moments(self.at, self.step_counter + 1) | self.bounds

    def _update_all(
        self, kept: Kept, parts: Sequence[Part], refused: np.ndarray | None, together: Together | None
    ) -> None:
        m, v = kept.state["m"], kept.state["v"]
        square = self._measured(kept, parts, kernels.partial_squares, "squares", 1, together)

        def measure(members: Members, grad: np.ndarray, chunks: np.ndarray) -> None:
            kernels.lans_moments(members, grad, m, v, square, chunks, self._now, refused)

        self._widen(parts, refused)
        squares = self._measured(kept, parts, measure, "sums", 3, together)
        for members, grad in parts:
            kernels.lans(members, grad, m, v, square, squares, self._now, refused)
