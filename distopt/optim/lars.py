"""LARS."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from distopt import kernels
from distopt.optim.exclude import SUFFIXES, Exclude
from distopt.optim.layerwise import Layerwise
from distopt.optim.optimizer import Kept, Optimizer, Part, Together
from distopt.optim.schedules import Number


class LARS(Layerwise):
    """Layer-wise adaptive rate scaling (You, Gitman and Ginsburg, 2017), as in MXNet.

    ``q = eta |w| / (|g| + weight_decay |w| + epsilon)``, or 1 if a norm is 0, with g rescaled and not yet clipped; then
    ``b = momentum b - lr q (clip(g) + weight_decay w);  w += b``: the learning rate stands inside the buffer.

    ``exclude`` (``Layerwise``): by default names that end in gamma, beta or bias have q = 1; momentum and weight decay
    still apply.  A layer whose gradient is 0 decays at the full learning rate, as in the paper.

    Every other hyper-parameter is a number or a schedule of k, the updates applied so far.  Raises ValueError for a
    negative or infinite value.
    """

    slots, struct, kinds = ("moments",), "Lars", 2
    hypers = Optimizer.hypers | {"momentum": (0.0, 1.0), "eta": (0.0, math.inf), "epsilon": (0.0, math.inf)}

    def __init__(
        self,
        lr: Number = 0.1,
        momentum: Number = 0.0,
        eta: Number = 0.001,
        epsilon: Number = 1e-8,
        weight_decay: Number = 0.0,
        exclude: Exclude = SUFFIXES,
        **options: Any,
    ):
        super().__init__(lr, weight_decay, exclude, **options)
        self.momentum, self.eta, self.epsilon = momentum, eta, epsilon

    def _own(self) -> dict[str, float]:
        return {name: self.at(name) for name in ("momentum", "eta", "epsilon")}

    def _update_all(
        self, kept: Kept, parts: Sequence[Part], refused: np.ndarray | None, together: Together | None
    ) -> None:
        self._widen(parts, refused)
        squares = self._measured(kept, parts, kernels.lars_squares, "sums", 2, together)
        for members, grad in parts:
            kernels.lars(members, grad, kept.state["moments"], squares, self._now, refused)
