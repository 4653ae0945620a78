"""SINGA's schedules, and what becomes of a hyper-parameter that is a number or a schedule."""

import abc
import math
from collections.abc import Callable
from numbers import Real

from distopt.numbers import number

Schedule = Callable[[int], float]
Number = float | Schedule


class DecayScheduler(abc.ABC):
    """SINGA's protocol: ``schedule(k) -> value``."""

    def __init__(self, init_value: float):
        self.init_value = init_value

    @abc.abstractmethod
    def __call__(self, k: int) -> float:
        """The value for update number k."""

    def __repr__(self) -> str:
        """The schedule and its numbers."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class Constant(DecayScheduler):
    """``init_value``, for ever."""

    def __call__(self, k: int) -> float:
        """The value for update number k."""
        return self.init_value


class ExponentialDecay(DecayScheduler):
    """``init_value * decay_rate ** (k / decay_steps)``, with the exponent floored if ``staircase``.

    Raises TypeError or ValueError for ``decay_steps`` not above 0, or a ``decay_rate`` that is negative or not finite.
    """

    def __init__(self, init_value: float, decay_steps: int, decay_rate: float, staircase: bool = False):
        super().__init__(init_value)
        if not decay_steps > 0:
            raise ValueError(f"decay_steps must be positive, got {decay_steps}")
        number("decay_rate", decay_rate)
        self.decay_steps, self.decay_rate, self.staircase = decay_steps, decay_rate, staircase

    def __call__(self, k: int) -> float:
        """The value for update number k."""
        exponent = k // self.decay_steps if self.staircase else k / self.decay_steps
        return float(self.init_value * self.decay_rate**exponent)


def hyper(name: str, given: Number, least: float = 0.0, most: float = math.inf) -> Schedule:
    """A number or a schedule, as a schedule whose every value is checked.

    Raises TypeError for anything else, and ValueError for a value outside [least, most] or not finite: at once, or when
    the schedule says it.
    """
    if not callable(given) and (isinstance(given, bool) or not isinstance(given, Real)):
        raise TypeError(f"{name} must be a number or a schedule k -> number, got {type(given).__name__}")

    def value(k: int) -> float:
        found = given(k) if callable(given) else given
        try:
            v = float(found)
        except (TypeError, ValueError):
            raise TypeError(f"{name} must be a number at update {k}, got {found!r}") from None
        if not (least <= v <= most and math.isfinite(v)):
            raise ValueError(f"{name} must be finite and in [{least}, {most}], got {v} at update {k}")
        return v

    value(0)
    return value
