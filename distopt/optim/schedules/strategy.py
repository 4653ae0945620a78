"""A learning rate from a line of text: MoXing's ``learning_rate_strategy``."""

import bisect
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

from distopt.checks import check_int
from distopt.optim.schedules.scheduler import DecayScheduler

MODES = ("linear", "exponential")
# the largest epoch or learning rate that makes sense
LARGEST = 10**9


class Stage(NamedTuple):
    """A stage of a strategy."""

    end: int
    rates: list[float]


class Ramp(NamedTuple):
    """A warm-up from ``begin`` at k = 0 to ``end`` at k = ``steps``: 'linear', or 'exponential'."""

    begin: float
    end: float
    steps: int
    mode: str

    def __call__(self, k: int) -> float:
        if k == self.steps:
            return self.end
        if self.mode == "linear":
            return self.begin + (self.end - self.begin) * k / self.steps
        return float(self.begin * (self.end / self.begin) ** (k / self.steps))


class Strategy(DecayScheduler):
    """A piecewise constant schedule after an optional warm-up, which ``from_strategy`` makes.

    The value is ``ramp(k)`` for k <= ``ramp.steps``, if there is a ramp; then ``values[i]``, where i of the
    ``boundaries`` are below k.  So a boundary belongs to the stage before it, as in TensorFlow's
    ``piecewise_constant``.

    Args:
        ramp: the warm-up, or None.
        boundaries: the updates at which stages end, increasing.
        values: the learning rates of the stages, one more than boundaries.

    Example:
        >>> from distopt.optim.schedules import Strategy
        >>> lr = Strategy(None, boundaries=[1, 3], values=[0.4, 0.2, 0.1])
        >>> [lr(k) for k in range(6)]
        [0.4, 0.4, 0.2, 0.2, 0.1, 0.1]
    """

    def __init__(self, ramp: Ramp | None, boundaries: Sequence[int], values: Sequence[float]):
        self.ramp, self.boundaries, self.values = ramp, tuple(boundaries), tuple(values)

    @property
    def init_value(self) -> float:  # type: ignore[override]
        """The value at the first update."""
        return self(0)

    def __call__(self, k: int) -> float:
        k = check_int("k", k, least=0)
        if self.ramp and k <= self.ramp.steps:
            return self.ramp(k)
        return self.values[bisect.bisect_left(self.boundaries, k)]


def from_strategy(strategy: str, steps_per_epoch: int, warmup: str = "linear") -> Strategy:
    """Return the schedule that a text like ``'5:0.001->0.4,30:0.4,60:0.04'`` describes.

    Stages ``EPOCH:LR`` are separated by commas, and each lasts to the end of its epoch, counted from the first update;
    the last one lasts for ever, whatever its epoch.  The first stage may be a warm-up, ``EPOCH:FROM->TO``; if it is the
    only one, TO stays.  An epoch may be a fraction: the stage then ends with the last update that is wholly within it.

    Args:
        strategy: the text.
        steps_per_epoch: the number of updates in an epoch, at least 1.
        warmup: the shape of the warm-up, 'linear' or 'exponential'.

    Raises:
        TypeError: the strategy is no text.
        ValueError: ``steps_per_epoch`` is below 1, ``warmup`` is unknown, or a stage, which is named, is not written
            like this, has a number that is negative or above 10^9, does not end later than the one before it, is a
            warm-up and not the first, or is an exponential warm-up from or to 0.

    Example:
        >>> from distopt.optim import from_strategy
        >>> lr = from_strategy("2:0.1->0.5,4:0.5,6:0.05", steps_per_epoch=2)
        >>> [round(lr(k), 3) for k in range(11)]
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5, 0.5, 0.05, 0.05]
    """
    if not isinstance(strategy, str):
        raise TypeError(f"strategy must be a text like '5:0.1->0.4,30:0.4', got {strategy!r}")
    steps_per_epoch = check_int("steps_per_epoch", steps_per_epoch, least=1)
    if warmup not in MODES:
        raise ValueError(f"warmup must be one of {MODES}, got {warmup!r}")
    stages: list[Stage] = []
    for number, text in enumerate(strategy.split(","), 1):
        try:
            stages.append(_stage(text, steps_per_epoch, stages, warmup))
        except ValueError as error:
            raise ValueError(f"stage {number} of the strategy {strategy!r}: {error}") from None
    first, steady = stages[0], [s for s in stages if len(s.rates) == 1]
    ramp = Ramp(first.rates[0], first.rates[1], first.end, warmup) if len(first.rates) == 2 else None
    return Strategy(ramp, [s.end for s in steady[:-1]], [s.rates[0] for s in steady] or first.rates[1:])


def _stage(text: str, steps_per_epoch: int, earlier: Sequence[Stage], warmup: str) -> Stage:
    """Return the stage that a text describes, checked against the ``earlier`` ones."""
    epoch, colon, rate = text.partition(":")
    written = rate.split("->")
    if not colon or len(written) > 2:
        raise ValueError(f"must be EPOCH:LR, or EPOCH:FROM->TO for a warm-up, got {text.strip()!r}")
    is_warmup, rates = len(written) == 2, [float(_number("a learning rate", r)) for r in written]
    if is_warmup and earlier:
        raise ValueError(f"must be EPOCH:LR, got {text.strip()!r}; only the first stage may warm up (->)")
    if is_warmup and warmup == "exponential" and not all(rates):
        raise ValueError(f"must be from and to rates above 0 for an exponential warm-up, got {rate.strip()!r}")
    end = int(_number("an epoch", epoch) * steps_per_epoch)
    least = earlier[-1].end + 1 if earlier else int(not is_warmup)
    if end < least:
        raise ValueError(f"must end at update {least} or later, got epoch {epoch.strip()}, which ends at {end}")
    return Stage(end, rates)


def _number(what: str, text: str) -> Decimal:
    """Return a number as the decimal that is written: 0.29 epochs of 100 steps are 29, and not as in floats 28."""
    try:
        value = Decimal(text.strip())
    except InvalidOperation:
        raise ValueError(f"{what} must be a number, got {text.strip()!r}") from None
    if value.is_nan() or not 0 <= value <= LARGEST:
        raise ValueError(f"{what} must be in [0, {LARGEST}], got {text.strip()}")
    return value
