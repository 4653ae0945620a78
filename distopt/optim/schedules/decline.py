"""Learning rates that decline to a final value over a given number of updates."""

import abc
import math
from typing import Any

from distopt.checks import check_float, check_int, check_positive
from distopt.optim.schedules.warmup import WarmUp


class Decline(WarmUp):
    """A base class of schedules that decline: ``final_lr + (base_lr - final_lr) left(p)``.

    p grows from 0 at the end of the warm-up to 1 at ``max_update``, from where on the value is ``final_lr``.
    """

    def __init__(self, base_lr: float, max_update: int, final_lr: float, **warmup: Any):
        super().__init__(base_lr, **warmup)
        self.max_update = check_int("max_update", max_update, least=1)
        if self.max_update <= self.warmup_steps:
            raise ValueError(f"max_update must be above warmup_steps={self.warmup_steps}, got {max_update}")
        self.final_lr = check_float("final_lr", final_lr)

    def after(self, k: int) -> float:
        if k >= self.max_update:
            return self.final_lr
        progress = (k - self.warmup_steps) / (self.max_update - self.warmup_steps)
        return self.final_lr + (self.base_lr - self.final_lr) * self.left(progress)

    @abc.abstractmethod
    def left(self, progress: float) -> float:
        """Return the part of the decline that is still to come, from 1 at ``progress`` 0 to 0 at 1."""


class Poly(Decline):
    """A polynomial decline: ``final_lr + (base_lr - final_lr) (1 - p)^pwr``.

    p = (k - warmup_steps) / (max_update - warmup_steps).  With ``final_lr=0`` and no warm-up this is MXNet's
    PolyScheduler.  The polynomial begins where the warm-up ends, at ``base_lr``; ``schedules.resnet50_32k`` is one that
    does not.

    Args:
        base_lr: the value at the end of the warm-up, at least 0.
        max_update: the number of the update from which on the value is ``final_lr``, above ``warmup_steps``.
        pwr: the exponent, above 0.
        final_lr: at least 0.
        **warmup: ``warmup_steps``, ``warmup_begin_lr`` and ``warmup_mode`` ('linear' or 'constant').

    Raises:
        TypeError: an argument is no number, or a count no integer.
        ValueError: a number is out of its range or not finite.

    Example:
        >>> from distopt.optim import Poly
        >>> lr = Poly(0.8, max_update=6, warmup_steps=2)
        >>> [round(lr(k), 3) for k in range(8)]
        [0.0, 0.4, 0.8, 0.45, 0.2, 0.05, 0.0, 0.0]
    """

    def __init__(self, base_lr: float, max_update: int, pwr: float = 2.0, final_lr: float = 0.0, **warmup: Any):
        super().__init__(base_lr, max_update, final_lr, **warmup)
        self.pwr = check_positive("pwr", pwr)

    def left(self, progress: float) -> float:
        return float((1 - progress) ** self.pwr)


class Cosine(Decline):
    """A cosine decline: ``final_lr + (base_lr - final_lr) (1 + cos(pi p)) / 2`` (Loshchilov and Hutter, 2017).

    p = (k - warmup_steps) / (max_update - warmup_steps).  There are no restarts.

    Args:
        base_lr: the value at the end of the warm-up, at least 0.
        max_update: the number of the update from which on the value is ``final_lr``, above ``warmup_steps``.
        final_lr: at least 0.
        **warmup: ``warmup_steps``, ``warmup_begin_lr`` and ``warmup_mode`` ('linear' or 'constant').

    Raises:
        TypeError: an argument is no number, or a count no integer.
        ValueError: a number is out of its range or not finite.

    Example:
        >>> from distopt.optim import Cosine
        >>> lr = Cosine(0.8, max_update=4)
        >>> [round(lr(k), 3) for k in range(6)]
        [0.8, 0.683, 0.4, 0.117, 0.0, 0.0]
    """

    def __init__(self, base_lr: float, max_update: int, final_lr: float = 0.0, **warmup: Any):
        super().__init__(base_lr, max_update, final_lr, **warmup)

    def left(self, progress: float) -> float:
        return (1 + math.cos(math.pi * progress)) / 2


def resnet50_32k(k: int) -> float:
    """Return MoXing's learning rate for ResNet-50 in batches of 32,768 at update k, for LARS over momentum 0.9.

    ``2 + (29 - 2) k / 200`` for k < 200, then ``1e-4 + (29 - 1e-4) (1 - min(k, 3600) / 3600)^2``.  The polynomial is
    not offset by the warm-up, so the value drops from 28.865 at k = 199 to 25.87 at k = 200, as it was published;
    ``Poly(29.0, 3600, final_lr=1e-4, warmup_steps=200, warmup_begin_lr=2.0)`` does not drop.

    Example:
        >>> from distopt.optim.schedules import resnet50_32k
        >>> [round(resnet50_32k(k), 3) for k in (0, 199, 200, 3600)]
        [2.0, 28.865, 25.867, 0.0]
    """
    k = check_int("k", k, least=0)
    return 2.0 + (29.0 - 2.0) * k / 200 if k < 200 else Poly(29.0, 3600, pwr=2.0, final_lr=1e-4)(k)
