"""A learning rate that drops by a factor."""

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

from distopt.numbers import number, whole
from distopt.optim.schedules.warmup import WarmUp


class Factor(WarmUp):
    """``max(base_lr factor^floor(k / step), stop_lr)``: drops at k = step, 2 step, ...; a warm-up's steps count too.

    The published step counts of MXNet's FactorScheduler, which counts from 1 and drops at step + 1.

    Raises what ``WarmUp`` raises, and for a ``step`` that is not whole or below 1, a ``factor`` outside [0, 1], or a
    ``stop_lr`` outside [0, base_lr].
    """

    def __init__(self, base_lr: float, step: int, factor: float, stop_lr: float = 1e-8, **warmup: Any):
        super().__init__(base_lr, **warmup)
        self.step = whole("step", step, least=1)
        self.factor = number("factor", factor, most=1.0)
        self.stop_lr = number("stop_lr", stop_lr, most=self.base_lr)

    def after(self, k: int) -> float:
        """The value for update number k >= ``warmup_steps``."""
        return max(self.base_lr * self.factor ** (k // self.step), self.stop_lr)


class MultiFactor(WarmUp):
    """``base_lr factor^n``, where n of the given steps are at most k; a warm-up's steps count too.

    Raises what ``WarmUp`` raises, and for a ``step`` that is no list of whole numbers, each at least 1 and above the
    one before it, or a ``factor`` outside [0, 1].
    """

    def __init__(self, base_lr: float, step: Sequence[int], factor: float, **warmup: Any):
        super().__init__(base_lr, **warmup)
        self.step = _increasing(step)
        self.factor = number("factor", factor, most=1.0)

    def after(self, k: int) -> float:
        """The value for update number k >= ``warmup_steps``."""
        return float(self.base_lr * self.factor ** bisect.bisect_right(self.step, k))


def _increasing(given: Sequence[int]) -> tuple[int, ...]:
    """The steps, checked."""
    if not isinstance(given, list | tuple):
        raise TypeError(f"step must be a list of integers, got {given!r}")
    steps = tuple(whole("step", s, least=1) for s in given)
    if not steps or any(a >= b for a, b in itertools.pairwise(steps)):
        raise ValueError(f"step must be one or more integers, each above the one before it, got {list(given)}")
    return steps
