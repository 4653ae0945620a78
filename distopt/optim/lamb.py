"""The LAMB optimizer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from distopt import kernels
from distopt.checks import check_bool
from distopt.kernels.layout import BucketLayout
from distopt.optim.adam import moments
from distopt.optim.exclude import Exclude
from distopt.optim.layerwise import LayerwiseAdam
from distopt.optim.optimizer import Part, SumOverRanks, TableState
from distopt.optim.schedules import Number


class LAMB(LayerwiseAdam):
    """A LAMB optimizer (You et al., "Large batch optimization for deep learning", 2020, algorithm 2).

    ``m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2``, with g clipped and without decay;
    ``u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon) + weight_decay w``, t = 1 at the first update;
    ``w -= lr |w| / |u| u``, where the trust ratio |w| / |u| is 1 if a norm is 0.  The states are ``m`` and ``v``.

    Args:
        lr: the learning rate, at least 0: a number, or a schedule of k, the number of updates applied so far.
        beta_1: the decay rate b1 of the first moment, in [0, 1), a number or a schedule.
        beta_2: the decay rate b2 of the second moment, in [0, 1), a number or a schedule.
        epsilon: at least 0, a number or a schedule.
        weight_decay: at least 0, a number or a schedule.
        lower_bound: |w| counts as at least this (the norm, not the ratio); None or <= 0 is no bound.
        upper_bound: |w| counts as at most this; None or <= 0 is no bound.
        bias_correction: False takes m and v without their division by ``1 - b^t``.
        exclude: parameters whose trust ratio is 1: a predicate on the name, or a list of suffixes.  The weight decay
            still applies to them, unless ``wd_mult`` removes it.
        **options: the keyword arguments that every ``Optimizer`` takes, such as ``clip_gradient``.

    Raises:
        ValueError: a hyper-parameter is negative or not finite, a beta is outside [0, 1), or ``lower_bound`` is above
            ``upper_bound``.

    Example:
        >>> import numpy as np
        >>> from distopt.optim import LAMB
        >>> opt, w = LAMB(lr=0.1), np.array([1.0, -2.0])
        >>> for _ in range(2):
        ...     opt.apply("w", w, np.array([0.5, 0.25]))
        ...     opt.step()
        >>> w.round(4).tolist()
        [0.6781, -2.3219]
    """

    struct, kinds = "Lamb", 2
    options = (*LayerwiseAdam.options, "bias_correction")

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
        super().__init__(lr, beta_1, beta_2, epsilon, weight_decay, lower_bound, upper_bound, exclude, **options)
        self.bias_correction = check_bool("bias_correction", bias_correction)

    def rule_numbers(self) -> dict[str, float]:
        return moments(self.at, self.step_counter + 1, self.bias_correction) | self.bounds

    def update_parts(
        self,
        table_state: TableState,
        parts: Sequence[Part],
        skip_flag: np.ndarray | None,
        sum_over_ranks: SumOverRanks | None,
    ) -> None:
        m, v = table_state.slots["m"], table_state.slots["v"]

        def measure(members: BucketLayout, grad: np.ndarray, chunks: np.ndarray) -> None:
            kernels.lamb_moments(members, grad, m, v, chunks, self._now, skip_flag)

        self.widen(parts, skip_flag)
        squares = self.sums_over_tensors(table_state, parts, measure, "sums", 2, sum_over_ranks)
        for members, _ in parts:
            kernels.lamb(members, m, v, squares, self._now, skip_flag)
