"""SINGA's schedules, and the checked form of a hyper-parameter that is a number or a schedule."""

import abc
import math
from collections.abc import Callable
from numbers import Real

from distopt.checks import check_float

Schedule = Callable[[int], float]
Number = float | Schedule


class DecayScheduler(abc.ABC):
    """A base class of schedules, as in SINGA: a callable that takes the update's number and returns a value.

    Args:
        init_value: the value at the first update.

    Example:
        >>> from distopt.optim import SGD, DecayScheduler
        >>> class Inverse(DecayScheduler):
        ...     def __call__(self, k):
        ...         return self.init_value / (1 + k)
        >>> lr = Inverse(1.0)
        >>> [lr(0), lr(1), lr(3)]
        [1.0, 0.5, 0.25]
        >>> SGD(lr).lr_value
        1.0
    """

    def __init__(self, init_value: float):
        self.init_value = init_value

    @abc.abstractmethod
    def __call__(self, k: int) -> float:
        """Return the value for update number k, the number of updates applied so far."""

    def __repr__(self) -> str:
        """Return the schedule's class and numbers."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class Constant(DecayScheduler):
    """A schedule whose value is always ``init_value``.

    Example:
        >>> from distopt.optim import Constant
        >>> lr = Constant(0.1)
        >>> lr(0), lr(1000)
        (0.1, 0.1)
    """

    def __call__(self, k: int) -> float:
        return self.init_value


class ExponentialDecay(DecayScheduler):
    """An exponential decay: ``init_value * decay_rate ** (k / decay_steps)``.

    Args:
        init_value: the value at the first update.
        decay_steps: the number of updates in which the value is multiplied by ``decay_rate``, above 0.
        decay_rate: at least 0.
        staircase: True floors the exponent, so that the value drops once in ``decay_steps`` updates.

    Raises:
        TypeError: an argument is no number.
        ValueError: ``decay_steps`` is not above 0, or ``decay_rate`` is negative or not finite.

    Example:
        >>> from distopt.optim import ExponentialDecay
        >>> smooth, stairs = ExponentialDecay(1.0, 2, 0.25), ExponentialDecay(1.0, 2, 0.25, staircase=True)
        >>> [smooth(k) for k in range(4)]
        [1.0, 0.5, 0.25, 0.125]
        >>> [stairs(k) for k in range(4)]
        [1.0, 1.0, 0.25, 0.25]
    """

    def __init__(self, init_value: float, decay_steps: int, decay_rate: float, staircase: bool = False):
        super().__init__(init_value)
        if not decay_steps > 0:
            raise ValueError(f"decay_steps must be positive, got {decay_steps}")
        check_float("decay_rate", decay_rate)
        self.decay_steps, self.decay_rate, self.staircase = decay_steps, decay_rate, staircase

    def __call__(self, k: int) -> float:
        exponent = k // self.decay_steps if self.staircase else k / self.decay_steps
        return float(self.init_value * self.decay_rate**exponent)


class Hyper:
    """A hyper-parameter: a schedule, or a constant, of which every value is checked.

    Args:
        name: the hyper-parameter's name, for the error's text.
        setting: a number, or a schedule k -> number.
        least: the least value allowed.
        most: the largest value allowed.

    Raises:
        TypeError: the value is no number.
        ValueError: the value is outside [least, most] or not finite.  Both come at once, or at the call at which the
            schedule returns the value.

    Example:
        >>> from distopt.optim.schedules import Hyper
        >>> momentum = Hyper("momentum", lambda k: 0.5 + k / 4, most=1.0)
        >>> [momentum(k) for k in range(3)]
        [0.5, 0.75, 1.0]
        >>> momentum(3)
        Traceback (most recent call last):
        ValueError: momentum must be finite and in [0.0, 1.0], got 1.25 at update 3
    """

    def __init__(self, name: str, setting: Number, least: float = 0.0, most: float = math.inf):
        if not callable(setting) and (isinstance(setting, bool) or not isinstance(setting, Real)):
            raise TypeError(f"{name} must be a number or a schedule k -> number, got {type(setting).__name__}")
        self._name, self._given, self._least, self._most = name, setting, least, most
        self.constant: float | None = None
        first = self(0)
        if not callable(setting):
            self.constant = first

    def __call__(self, k: int) -> float:
        """Return the value for update number k, checked."""
        if self.constant is not None:
            return self.constant
        result = self._given(k) if callable(self._given) else self._given
        try:
            value = float(result)
        except (TypeError, ValueError):
            raise TypeError(f"{self._name} must be a number at update {k}, got {result!r}") from None
        if not (self._least <= value <= self._most and math.isfinite(value)):
            raise ValueError(
                f"{self._name} must be finite and in [{self._least}, {self._most}], got {value} at update {k}"
            )
        return value

    def __repr__(self) -> str:
        """Return the schedule's repr, or 'constant' and the number."""
        return repr(self._given) if callable(self._given) else f"constant {self(0)}"
