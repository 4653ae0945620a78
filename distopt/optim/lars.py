"""The LARS optimizer."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from distopt import kernels
from distopt.optim.exclude import SUFFIXES, Exclude
from distopt.optim.layerwise import Layerwise
from distopt.optim.optimizer import Optimizer, Part, SumOverRanks, TableState
from distopt.optim.schedules import Number


class LARS(Layerwise):
    """A LARS optimizer (layer-wise adaptive rate scaling; You, Gitman and Ginsburg, 2017), as in MXNet.

    ``q = eta |w| / (|g| + weight_decay |w| + epsilon)``, or 1 if a norm is 0, with g rescaled and not yet clipped; then
    ``b = momentum b - lr q (clip(g) + weight_decay w);  w += b``: the learning rate stands inside the buffer.  A layer
    whose gradient is 0 decays at the full learning rate, as in the paper.  The state is ``moments``, b.

    Args:
        lr: the learning rate, at least 0: a number, or a schedule of k, the number of updates applied so far.
        momentum: in [0, 1], a number or a schedule.
        eta: the trust coefficient, at least 0, a number or a schedule.
        epsilon: at least 0, a number or a schedule.
        weight_decay: at least 0, a number or a schedule.
        exclude: parameters with q = 1: a predicate on the name, or a list of suffixes; by default names that end in
            gamma, beta or bias.  Momentum and weight decay still apply to them.
        **options: the keyword arguments that every ``Optimizer`` takes, such as ``clip_gradient``.

    Raises:
        ValueError: a hyper-parameter is negative, not finite or out of its range.

    Example:
        >>> import numpy as np
        >>> from distopt.optim import LARS
        >>> opt = LARS(lr=10.0, momentum=0.9)
        >>> w, bias = np.array([1.0, -2.0]), np.zeros(1)
        >>> for _ in range(2):
        ...     opt.apply("w", w, np.array([0.5, 0.25]))
        ...     opt.apply("bias", bias, np.array([0.01]))
        ...     opt.step()
        >>> w.round(4).tolist(), bias.round(4).tolist()
        ([0.942, -2.029], [-0.29])
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

    def rule_numbers(self) -> dict[str, float]:
        return {name: self.at(name) for name in ("momentum", "eta", "epsilon")}

    def update_parts(
        self,
        table_state: TableState,
        parts: Sequence[Part],
        skip_flag: np.ndarray | None,
        sum_over_ranks: SumOverRanks | None,
    ) -> None:
        self.widen(parts, skip_flag)
        squares = self.sums_over_tensors(table_state, parts, kernels.lars_squares, "sums", 2, sum_over_ranks)
        for members, grad in parts:
            kernels.lars(members, grad, table_state.slots["moments"], squares, self._now, skip_flag)
