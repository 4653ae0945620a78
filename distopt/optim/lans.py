"""The LANS optimizer."""

from collections.abc import Sequence

import numpy as np

from distopt import kernels
from distopt.kernels.layout import BucketLayout
from distopt.optim.layerwise import LayerwiseAdam
from distopt.optim.optimizer import Part, SumOverRanks, TableState


class LANS(LayerwiseAdam):
    """A LANS optimizer (Zheng et al., "Accelerated large batch optimization of BERT pretraining in 54 minutes", 2020).

    ``h = clip(g / |g|)``, 0 for a gradient of zeros, so that rescaling the gradient changes nothing;
    ``m = b1 m + (1 - b1) h;  v = b2 v + (1 - b2) h^2;  den = sqrt(v / (1 - b2^t)) + epsilon``, t = 1 at the first
    update; ``um = (m / (1 - b1^t)) / den + weight_decay w;  ug = h / den + weight_decay w``, both with the old w;
    ``w -= lr (b1 |w| / |um| um + (1 - b1) |w| / |ug| ug)``, where a ratio is 1 if one of its norms is 0.  The states
    are ``m`` and ``v``.

    Args:
        lr: the learning rate, at least 0: a number, or a schedule of k, the number of updates applied so far.
        beta_1: the decay rate b1 of the first moment, in [0, 1), a number or a schedule.
        beta_2: the decay rate b2 of the second moment, in [0, 1), a number or a schedule.
        epsilon: at least 0, a number or a schedule.
        weight_decay: at least 0, a number or a schedule.
        lower_bound: |w| counts as at least this; None or <= 0 is no bound.
        upper_bound: |w| counts as at most this; None or <= 0 is no bound.
        exclude: parameters of which both ratios are 1: a predicate on the name, or a list of suffixes.
        **options: the keyword arguments that every ``Optimizer`` takes, such as ``clip_gradient``.

    Raises:
        ValueError: a hyper-parameter is negative or not finite, a beta is outside [0, 1), or ``lower_bound`` is above
            ``upper_bound``.

    Example:
        >>> import numpy as np
        >>> from distopt.optim import LANS
        >>> opt, w = LANS(lr=0.1), np.array([1.0, -2.0])
        >>> for _ in range(2):
        ...     opt.apply("w", w, np.array([0.5, 0.25]))
        ...     opt.step()
        >>> w.round(4).tolist()
        [0.6781, -2.3219]
    """

    struct, kinds = "Lans", 3

    def update_parts(
        self,
        table_state: TableState,
        parts: Sequence[Part],
        skip_flag: np.ndarray | None,
        sum_over_ranks: SumOverRanks | None,
    ) -> None:
        m, v = table_state.slots["m"], table_state.slots["v"]
        square = self.sums_over_tensors(table_state, parts, kernels.partial_squares, "squares", 1, sum_over_ranks)

        def measure(members: BucketLayout, grad: np.ndarray, chunks: np.ndarray) -> None:
            kernels.lans_moments(members, grad, m, v, square, chunks, self._now, skip_flag)

        self.widen(parts, skip_flag)
        squares = self.sums_over_tensors(table_state, parts, measure, "sums", 3, sum_over_ranks)
        for members, grad in parts:
            kernels.lans(members, grad, m, v, square, squares, self._now, skip_flag)
