"""Learning rates that drop by a factor."""

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

from distopt.checks import check_float, check_int
from distopt.optim.schedules.warmup import WarmUp


class Factor(WarmUp):
    """A schedule that drops by a factor every ``step`` updates: ``max(base_lr factor^floor(k / step), stop_lr)``.

    It drops at k = step, 2 step, ...; a warm-up's steps count too.  This follows the published step counts of MXNet's
    FactorScheduler, whose code counts from 1 and drops at step + 1.

    Args:
        base_lr: the value before the first drop, at least 0.
        step: the number of updates between two drops, at least 1.
        factor: in [0, 1].
        stop_lr: the least value, in [0, base_lr].
        **warmup: ``warmup_steps``, ``warmup_begin_lr`` and ``warmup_mode`` ('linear' or 'constant').

    Raises:
        TypeError: an argument is no number, or a count no integer.
        ValueError: a number is out of its range or not finite.

    Example:
        >>> from distopt.optim import Factor
        >>> lr = Factor(0.8, step=2, factor=0.5, stop_lr=0.3)
        >>> [lr(k) for k in range(6)]
        [0.8, 0.8, 0.4, 0.4, 0.3, 0.3]
    """

    def __init__(self, base_lr: float, step: int, factor: float, stop_lr: float = 1e-8, **warmup: Any):
        super().__init__(base_lr, **warmup)
        self.step = check_int("step", step, least=1)
        self.factor = check_float("factor", factor, most=1.0)
        self.stop_lr = check_float("stop_lr", stop_lr, most=self.base_lr)

    def after(self, k: int) -> float:
        return max(self.base_lr * self.factor ** (k // self.step), self.stop_lr)


class MultiFactor(WarmUp):
    """A schedule that drops by a factor at given updates: ``base_lr factor^n``, where n of the steps are at most k.

    A warm-up's steps count too.

    Args:
        base_lr: the value before the first drop, at least 0.
        step: the updates at which the value drops: a list of integers, each at least 1 and above the one before it.
        factor: in [0, 1].
        **warmup: ``warmup_steps``, ``warmup_begin_lr`` and ``warmup_mode`` ('linear' or 'constant').

    Raises:
        TypeError: ``step`` is no list of integers, or an argument is no number.
        ValueError: a number is out of its range or not finite, or the steps do not increase.

    Example:
        >>> from distopt.optim import MultiFactor
        >>> lr = MultiFactor(0.8, step=[2, 5], factor=0.5)
        >>> [lr(k) for k in range(7)]
        [0.8, 0.8, 0.4, 0.4, 0.4, 0.2, 0.2]
    """

    def __init__(self, base_lr: float, step: Sequence[int], factor: float, **warmup: Any):
        super().__init__(base_lr, **warmup)
        if not isinstance(step, list | tuple):
            raise TypeError(f"step must be a list of integers, got {step!r}")
        self.step = tuple(check_int("step", s, least=1) for s in step)
        if not step or any(a >= b for a, b in itertools.pairwise(self.step)):
            raise ValueError(f"step must be one or more integers, each above the one before it, got {list(step)}")
        self.factor = check_float("factor", factor, most=1.0)

    def after(self, k: int) -> float:
        return float(self.base_lr * self.factor ** bisect.bisect_right(self.step, k))
