"""A learning rate that declines to its final value over a given number of updates."""

import abc
import math
from typing import Any

from distopt.numbers import number, positive, whole
from distopt.optim.schedules.warmup import WarmUp


class Decline(WarmUp):
    """``final_lr + (base_lr - final_lr) left(p)``, p growing from 0 to 1 between the warm-up and ``max_update``.

    From ``max_update`` on it is ``final_lr``, whatever was asked before.

    Raises what ``WarmUp`` raises, and for a ``max_update`` that is not whole or not above ``warmup_steps``, or a
    ``final_lr`` that is negative or not finite.
    """

    def __init__(self, base_lr: float, max_update: int, final_lr: float, **warmup: Any):
        super().__init__(base_lr, **warmup)
        self.max_update = whole("max_update", max_update, least=1)
        if self.max_update <= self.warmup_steps:
            raise ValueError(f"max_update must be above warmup_steps={self.warmup_steps}, got {max_update}")
        self.final_lr = number("final_lr", final_lr)

    def after(self, k: int) -> float:
        """The value for update number k >= ``warmup_steps``."""
        if k >= self.max_update:
            return self.final_lr
        progress = (k - self.warmup_steps) / (self.max_update - self.warmup_steps)
        return self.final_lr + (self.base_lr - self.final_lr) * self.left(progress)

    @abc.abstractmethod
    def left(self, progress: float) -> float:
        """The part of the decline that is still to come, from 1 to 0."""


class Poly(Decline):
    """``final_lr + (base_lr - final_lr) (1 - p)^pwr``, p = (k - warmup_steps) / (max_update - warmup_steps).

    With ``final_lr=0`` and no warm-up this is MXNet's PolyScheduler.  The polynomial begins where the warm-up ends, at
    ``base_lr``; one that does not is ``schedules.resnet50_32k``.

    Raises what ``Decline`` raises, and for a ``pwr`` that is not above 0.
    """

    def __init__(self, base_lr: float, max_update: int, pwr: float = 2.0, final_lr: float = 0.0, **warmup: Any):
        super().__init__(base_lr, max_update, final_lr, **warmup)
        self.pwr = positive("pwr", pwr)

    def left(self, progress: float) -> float:
        """(1 - p)^pwr."""
        return float((1 - progress) ** self.pwr)


class Cosine(Decline):
    """``final_lr + (base_lr - final_lr) (1 + cos(pi p)) / 2``, p = (k - warmup_steps) / (max_update - warmup_steps).

    Loshchilov and Hutter, 2017, without restarts.  Raises what ``Decline`` raises.
    """

    def __init__(self, base_lr: float, max_update: int, final_lr: float = 0.0, **warmup: Any):
        super().__init__(base_lr, max_update, final_lr, **warmup)

    def left(self, progress: float) -> float:
        """(1 + cos(pi p)) / 2."""
        return (1 + math.cos(math.pi * progress)) / 2


def resnet50_32k(k: int) -> float:
    """MoXing's learning rate for ResNet-50 in batches of 32,768: 3,600 updates, with LARS over momentum 0.9.

    ``2 + (29 - 2) k / 200`` for k < 200, then ``1e-4 + (29 - 1e-4) (1 - min(k, 3600) / 3600)^2``.  The polynomial is
    not offset by the warm-up, so the value drops from 28.865 at k = 199 to 25.87 at k = 200, as it was published; the
    form that does not is ``Poly(29.0, 3600, final_lr=1e-4, warmup_steps=200, warmup_begin_lr=2.0)``.
    """
    k = whole("k", k, least=0)
    return 2.0 + (29.0 - 2.0) * k / 200 if k < 200 else Poly(29.0, 3600, pwr=2.0, final_lr=1e-4)(k)
