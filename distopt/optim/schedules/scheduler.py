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


class Hyper:
    """A hyper-parameter: a schedule, or a number for ever, whose every value is checked.

    Raises TypeError for what is no number, and ValueError for a value outside [least, most] or not finite: at once, or
    when the schedule gives it.
    """

    def __init__(self, name: str, given: Number, least: float = 0.0, most: float = math.inf):
        if not callable(given) and (isinstance(given, bool) or not isinstance(given, Real)):
            raise TypeError(f"{name} must be a number or a schedule k -> number, got {type(given).__name__}")
        self._name, self._given, self._least, self._most = name, given, least, most
        self._constant: float | None = None
        first = self(0)
        if not callable(given):
            self._constant = first

    def __call__(self, k: int) -> float:
        """The value for update number k."""
        if self._constant is not None:
            return self._constant
        found = self._given(k) if callable(self._given) else self._given
        try:
            v = float(found)
        except (TypeError, ValueError):
            raise TypeError(f"{self._name} must be a number at update {k}, got {found!r}") from None
        if not (self._least <= v <= self._most and math.isfinite(v)):
            raise ValueError(f"{self._name} must be finite and in [{self._least}, {self._most}], got {v} at update {k}")
        return v

    def __repr__(self) -> str:
        """The schedule, or the number that it is for ever."""
        return repr(self._given) if callable(self._given) else f"constant {self(0)}"
