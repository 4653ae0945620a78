"""A learning rate that begins low."""

import abc

from distopt.numbers import number, whole
from distopt.optim.schedules.scheduler import DecayScheduler

MODES = ("linear", "constant")


class WarmUp(DecayScheduler):
    """A schedule whose first ``warmup_steps`` updates are a warm-up; ``after(k)`` is the value of the others.

    'linear': ``warmup_begin_lr + (base_lr - warmup_begin_lr) k / warmup_steps``; 'constant': ``warmup_begin_lr``.
    The steps of the warm-up count: what follows is not shifted, unless the subclass says so.

    Everything is computed anew from k and the numbers given here at every call.  So calls may come in any order, and a
    ``base_lr`` that is assigned later is that of the whole schedule, warm-up included.

    Raises ValueError, or TypeError for what is no number, that names the field: ``base_lr`` negative or not finite,
    ``warmup_steps`` negative or not whole, ``warmup_begin_lr`` outside [0, base_lr], another ``warmup_mode``; and at a
    call for a k that is negative or not whole.
    """

    def __init__(
        self, base_lr: float, *, warmup_steps: int = 0, warmup_begin_lr: float = 0.0, warmup_mode: str = "linear"
    ):
        self.base_lr = number("base_lr", base_lr)
        self.warmup_steps = whole("warmup_steps", warmup_steps, least=0)
        self.warmup_begin_lr = number("warmup_begin_lr", warmup_begin_lr, most=self.base_lr)
        if warmup_mode not in MODES:
            raise ValueError(f"warmup_mode must be one of {MODES}, got {warmup_mode!r}")
        self.warmup_mode = warmup_mode

    @property
    def init_value(self) -> float:  # type: ignore[override]
        """The value at the first update."""
        return self(0)

    def __call__(self, k: int) -> float:
        """The value for update number k."""
        k = whole("k", k, least=0)
        if k >= self.warmup_steps:
            return self.after(k)
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        return self.warmup_begin_lr + (self.base_lr - self.warmup_begin_lr) * k / self.warmup_steps

    @abc.abstractmethod
    def after(self, k: int) -> float:
        """The value for update number k >= ``warmup_steps``."""
