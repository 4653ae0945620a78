"""The base class of wrappers, which change gradients on their way to any optimizer."""

import abc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from distopt import device
from distopt.kernels.layout import BucketLayout
from distopt.optim.foreign import call_style, state_methods
from distopt.optim.optimizer import Optimizer, State
from distopt.optim.protocols import AnyOptimizer


@dataclass(eq=False)
class NamedArray:
    """A parameter for optimizers that take one: one object for each name, since they may use it as a key."""

    name: str
    data: np.ndarray


class OptimizerWrapper(abc.ABC):
    """A base class of wrappers: optimizers that change the gradients that another one, ``opt``, is given.

    A subclass implements ``apply``, which passes gradients on by ``hand_over``, and ``own_numbers`` and
    ``settings_text``, which describe its settings.

    Args:
        opt: the inner optimizer: one of distopt's, another wrapper, or any object with ``apply(name, value, grad)`` or
            ``update(param, grad)``, and optionally ``step()``.

    Attributes:
        own: the names of the wrapper's states beside the inner optimizer's.

    Raises:
        TypeError: ``opt`` has neither method, or they take other arguments.

    Example:
        >>> import numpy as np
        >>> from distopt.optim import SGD, OptimizerWrapper
        >>> class Ascent(OptimizerWrapper):
        ...     def apply(self, name, value, grad):
        ...         self.hand_over(name, value, -grad)
        ...     def own_numbers(self):
        ...         return {}
        ...     def settings_text(self):
        ...         return "uphill"
        >>> opt, w = Ascent(SGD(lr=0.1)), np.zeros(2)
        >>> opt.apply("w", w, np.array([1.0, 2.0]))
        >>> opt.step()
        True
        >>> w.round(4).tolist()
        [0.1, 0.2]
    """

    own: tuple[str, ...] = ()

    def __init__(self, opt: AnyOptimizer):
        self.opt: Any = opt
        self._call_style = call_style(opt)
        self._params: dict[str, NamedArray] = {}

    @abc.abstractmethod
    def apply(self, name: str, value: np.ndarray, grad: np.ndarray) -> None:
        """Take in the gradient of one parameter.

        Args:
            name: the parameter's name.
            value: its array, which may be updated in place now or at a later ``step``.
            grad: an array like ``value``, which stays as it is.
        """

    def step(self) -> bool:
        """Complete a step, after every parameter has had its gradient.

        Returns:
            False if the inner optimizer's ``step`` has returned False, which says that it updated nothing; else True.
        """
        return not hasattr(self.opt, "step") or self.opt.step() is not False

    def __call__(self, pairs: Iterable[tuple[Any, np.ndarray]]) -> bool:
        """Apply pairs of (parameter with ``name`` and ``data``, gradient), then make one ``step``."""
        for param, grad in pairs:
            self.apply(param.name, param.data, grad)
        return self.step()

    @property
    def lr(self) -> Any:
        """The inner optimizer's learning rate, a number or a schedule; it may be assigned."""
        return self.opt.lr

    @lr.setter
    def lr(self, value: Any) -> None:
        if not hasattr(self.opt, "lr"):
            raise AttributeError(f"{type(self.opt).__name__} has no lr that could be assigned")
        self.opt.lr = value

    @property
    def lr_value(self) -> float:
        """The inner optimizer's learning rate at its next update."""
        return float(self.opt.lr_value)

    @property
    def step_counter(self) -> int:
        """The number of updates applied by the inner optimizer."""
        return int(self.opt.step_counter)

    def get_states(self) -> State:
        """Return all that changes between steps: the inner optimizer's states as ``opt``, None if it has none."""
        save = state_methods(self.opt).save
        return {"opt": save() if save else None}

    def set_states(self, states: State) -> None:
        """Load states that ``get_states`` returned.

        Raises:
            ValueError: these are not the states of such a wrapper, or of such an optimizer in it; nothing has changed
                then.
        """
        names = ("opt", *self.own)
        if not isinstance(states, dict) or set(states) != set(names):
            got = sorted(states) if isinstance(states, dict) else type(states).__name__
            raise ValueError(f"the states of {type(self).__name__} must be {', '.join(names)}, got {got}")
        self.check_own_states(states)
        load = state_methods(self.opt).load
        if load is None and states["opt"] is not None:
            raise ValueError(
                f"opt among the states must be None, got {type(states['opt']).__name__}; {type(self.opt).__name__} has "
                "no load_state_dict or set_states"
            )
        if load and states["opt"] is not None:
            load(states["opt"])

    def check_own_states(self, states: State) -> None:  # noqa: B027  most wrappers have no states
        """Check the wrapper's own states; ValueError or TypeError for one that cannot be loaded."""

    def state_dict(self) -> State:
        """Return ``get_states()``, under the name that PyTorch uses."""
        return self.get_states()

    def load_state_dict(self, states: State) -> None:
        """Load states by ``set_states(states)``, under the name that PyTorch uses."""
        self.set_states(states)

    def check(self, members: BucketLayout) -> None:
        """Check, before anything moves, that the states of these parameters fit them; ValueError if one does not."""
        if isinstance(self.opt, Optimizer | OptimizerWrapper):
            self.opt.check(members)

    def masters(self, members: BucketLayout, like: np.ndarray) -> np.ndarray | None:
        """Return the inner optimizer's float32 masters of 16-bit parameters, or None (``Optimizer.masters``)."""
        return self.opt.masters(members, like) if isinstance(self.opt, Optimizer | OptimizerWrapper) else None

    def numbers(self) -> list[str]:
        """Return a text for each number that ranks must have alike for the next update, the inner optimizer's included.

        Raises:
            ValueError: a number is out of its range.
        """
        settings = [f"{type(self).__name__}'s {name}={value!r}" for name, value in self.own_numbers().items()]
        return settings + (self.opt.numbers() if isinstance(self.opt, Optimizer | OptimizerWrapper) else [])

    @abc.abstractmethod
    def own_numbers(self) -> dict[str, float]:
        """Return the wrapper's own part of ``numbers``, by name."""

    @abc.abstractmethod
    def settings_text(self) -> str:
        """Return the wrapper's own part of its repr."""

    def __repr__(self) -> str:
        """Return the wrapper, the optimizer in it, and their settings; the same text on every rank."""
        inner = repr(self.opt) if isinstance(self.opt, Optimizer | OptimizerWrapper) else type(self.opt).__name__
        return f"{type(self).__name__}({inner}, {self.settings_text()})"

    def hand_over(self, name: str, value: np.ndarray, grad: np.ndarray) -> None:
        """Update a parameter by the inner optimizer.

        Args:
            name: the parameter's name.
            value: its array, which is updated in place.
            grad: an array of the same shape, which the inner optimizer may overwrite.
        """
        if self._call_style == "apply":
            self.opt.apply(name, value, grad)
            return
        param = self._params.setdefault(name, NamedArray(name, value))
        param.data = value
        self.opt.update(param, grad)
        # The optimizer made a new array instead of changing this one.
        if param.data is not value:
            device.copy(value, param.data)


# Its name until now.
Wrapper = OptimizerWrapper
