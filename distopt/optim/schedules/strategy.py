"""A learning rate in a line of text: MoXing's ``learning_rate_strategy``."""

import bisect
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

from distopt.numbers import whole
from distopt.optim.schedules.scheduler import DecayScheduler

MODES = ("linear", "exponential")
LARGEST = 10**9  # epoch or learning rate that makes sense


class Stage(NamedTuple):
    """What lasts to update number ``end``: one learning rate, or the two of a warm-up."""

    end: int
    rates: list[float]


class Ramp(NamedTuple):
    """From ``begin`` at k = 0 to ``end`` at k = ``steps``: a straight line, or ``begin (end / begin)^(k / steps)``."""

    begin: float
    end: float
    steps: int
    mode: str

    def __call__(self, k: int) -> float:
        """The value for update number k <= ``steps``."""
        if k == self.steps:
            return self.end
        if self.mode == "linear":
            return self.begin + (self.end - self.begin) * k / self.steps
        return float(self.begin * (self.end / self.begin) ** (k / self.steps))


class Strategy(DecayScheduler):
    """``ramp(k)`` for k <= ``ramp.steps``, if there is one; then ``values[i]``, i of the ``boundaries`` being below k.

    So a boundary belongs to what is before it, as in TensorFlow's ``piecewise_constant``.  ``from_strategy`` makes it.
    """

    def __init__(self, ramp: Ramp | None, boundaries: Sequence[int], values: Sequence[float]):
        self.ramp, self.boundaries, self.values = ramp, tuple(boundaries), tuple(values)

    @property
    def init_value(self) -> float:  # type: ignore[override]
        """The value at the first update."""
        return self(0)

    def __call__(self, k: int) -> float:
        """The value for update number k."""
        k = whole("k", k, least=0)
        if self.ramp and k <= self.ramp.steps:
            return self.ramp(k)
        return self.values[bisect.bisect_left(self.boundaries, k)]


def from_strategy(strategy: str, steps_per_epoch: int, warmup: str = "linear") -> Strategy:
    """The schedule that a text like ``'5:0.001->0.4,30:0.4,60:0.04'`` describes.

    Stages ``EPOCH:LR`` are separated by commas, and each lasts to the end of its epoch, counted from the first update;
    the last one lasts for ever, whatever its epoch.  The first stage may be a warm-up, ``EPOCH:FROM->TO``, 'linear' or
    'exponential'; if it is the only one, TO stays.  An epoch may be a fraction: the stage then ends with the last
    update that is wholly within it.

    Raises TypeError for a strategy that is no text, and ValueError that names the stage: for one that is not written
    like this, a number that is negative or above 10^9, epochs that do not increase, or that end at the same
    update, a warm-up elsewhere than in the first stage, an exponential one from or to 0; and for another ``warmup``, or
    ``steps_per_epoch`` below 1.
    """
    if not isinstance(strategy, str):
        raise TypeError(f"strategy must be a text like '5:0.1->0.4,30:0.4', got {strategy!r}")
    steps_per_epoch = whole("steps_per_epoch", steps_per_epoch, least=1)
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


def _stage(text: str, steps_per_epoch: int, before: Sequence[Stage], warmup: str) -> Stage:
    """A stage that follows others, checked."""
    epoch, colon, rate = text.partition(":")
    written = rate.split("->")
    if not colon or len(written) > 2:
        raise ValueError(f"must be EPOCH:LR, or EPOCH:FROM->TO for a warm-up, got {text.strip()!r}")
    is_warmup, rates = len(written) == 2, [float(_number("a learning rate", r)) for r in written]
    if is_warmup and before:
        raise ValueError("only the first one may be a warm-up (->)")
    if is_warmup and warmup == "exponential" and not all(rates):
        raise ValueError(f"an exponential warm-up begins and ends above 0, got {rate.strip()!r}")
    end = int(_number("an epoch", epoch) * steps_per_epoch)
    least = before[-1].end + 1 if before else int(not is_warmup)
    if end < least:
        raise ValueError(f"must end at update {least} or later, got epoch {epoch.strip()}, which ends at {end}")
    return Stage(end, rates)


def _number(what: str, text: str) -> Decimal:
    """A decimal number as it is written: 0.29 epochs of 100 steps are 29, which floats say they are not."""
    try:
        value = Decimal(text.strip())
    except InvalidOperation:
        raise ValueError(f"{what} must be a number, got {text.strip()!r}") from None
    if value.is_nan() or not 0 <= value <= LARGEST:
        raise ValueError(f"{what} must be in [0, {LARGEST}], got {text.strip()}")
    return value
