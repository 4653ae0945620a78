"""Schedules that begin with a warm-up."""

import abc

from distopt.checks import check_float, check_int
from distopt.optim.schedules.scheduler import DecayScheduler

MODES = ("linear", "constant")


class WarmUp(DecayScheduler):
    """A base class of schedules whose first ``warmup_steps`` updates are a warm-up; ``after(k)`` gives later values.

    The steps of the warm-up count: the schedule after it is not shifted, unless the subclass says so.
    """

    # Everything is computed anew from k and the numbers given here at every call.  So calls may come in any order, and
    # a `base_lr` that is assigned later is that of the whole schedule, warm-up included.

    def __init__(
        self, base_lr: float, *, warmup_steps: int = 0, warmup_begin_lr: float = 0.0, warmup_mode: str = "linear"
    ):
        self.base_lr = check_float("base_lr", base_lr)
        self.warmup_steps = check_int("warmup_steps", warmup_steps, least=0)
        self.warmup_begin_lr = check_float("warmup_begin_lr", warmup_begin_lr, most=self.base_lr)
        if warmup_mode not in MODES:
            raise ValueError(f"warmup_mode must be one of {MODES}, got {warmup_mode!r}")
        self.warmup_mode = warmup_mode

    @property
    def init_value(self) -> float:  # type: ignore[override]
        """The value at the first update."""
        return self(0)

    def __call__(self, k: int) -> float:
        k = check_int("k", k, least=0)
        if k >= self.warmup_steps:
            return self.after(k)
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        return self.warmup_begin_lr + (self.base_lr - self.warmup_begin_lr) * k / self.warmup_steps

    @abc.abstractmethod
    def after(self, k: int) -> float:
        """Return the value for update number k >= ``warmup_steps``."""
