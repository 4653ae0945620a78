"""What every wrapper is made of: SINGA's protocol outside, and any optimizer inside."""

import abc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from distopt import device
from distopt.optim.optimizer import Optimizer, State
from distopt.optim.protocols import AnyOptimizer
from distopt.optim.strangers import way
from distopt.tables import Members


@dataclass(eq=False)
class Named:
    """A parameter for an optimizer that wants one; the same object for the same name, since it may be a key there."""

    name: str
    data: np.ndarray


class Wrapper(abc.ABC):
    """An optimizer that changes what another one, ``opt``, is given.

    The inner one is distopt's, another wrapper, or any object with ``apply(name, value, grad)`` or ``update(param,
    grad)``, and with ``step()`` if it wants to be told.  ``lr`` is the inner one's, and may be assigned.

    Raises TypeError for an ``opt`` that has neither, or takes other arguments.
    """

    own: tuple[str, ...] = ()  # states beside the inner one's

    def __init__(self, opt: AnyOptimizer):
        self.opt: Any = opt
        self._way = way(opt)
        self._params: dict[str, Named] = {}

    @abc.abstractmethod
    def apply(self, name: str, value: np.ndarray, grad: np.ndarray) -> None:
        """Take in the gradient of one parameter, an array like ``value``, which stays as it is."""

    def step(self) -> bool:
        """Every parameter has had its gradient; True unless the inner optimizer says that it has updated nothing."""
        return not hasattr(self.opt, "step") or self.opt.step() is not False

    def __call__(self, pairs: Iterable[tuple[Any, np.ndarray]]) -> bool:
        """``apply`` for every pair of (parameter with ``name`` and ``data``, gradient), then one ``step``."""
        for param, grad in pairs:
            self.apply(param.name, param.data, grad)
        return self.step()

    @property
    def lr(self) -> Any:
        """The inner optimizer's, a number or a schedule."""
        return self.opt.lr

    @lr.setter
    def lr(self, value: Any) -> None:
        if not hasattr(self.opt, "lr"):
            raise AttributeError(f"{type(self.opt).__name__} has no lr that could be assigned")
        self.opt.lr = value

    @property
    def lr_value(self) -> float:
        """The learning rate of the next update."""
        return float(self.opt.lr_value)

    @property
    def step_counter(self) -> int:
        """Updates applied by the inner optimizer."""
        return int(self.opt.step_counter)

    def get_states(self) -> State:
        """Everything that changes between steps: the inner optimizer's states as 'opt', None if it has none."""
        save = getattr(self.opt, "state_dict", getattr(self.opt, "get_states", None))
        return {"opt": save() if save else None}

    def set_states(self, states: State) -> None:
        """Go on from what ``get_states`` returned.

        Raises ValueError, before anything changes, if these are not the states of such a wrapper, or of such an
        optimizer in it.
        """
        names = ("opt", *self.own)
        if not isinstance(states, dict) or set(states) != set(names):
            got = sorted(states) if isinstance(states, dict) else type(states).__name__
            raise ValueError(f"{type(self).__name__} has the states {names}, got {got}")
        self._check_own(states)
        load = getattr(self.opt, "load_state_dict", getattr(self.opt, "set_states", None))
        if load is None and states["opt"] is not None:
            raise ValueError(f"{type(self.opt).__name__} has no load_state_dict or set_states to take what 'opt' has")
        if load and states["opt"] is not None:
            load(states["opt"])

    def _check_own(self, states: State) -> None:  # noqa: B027  most have none
        """ValueError or TypeError for states beside the inner one's that are not what they must be."""

    def state_dict(self) -> State:
        """As ``get_states``."""
        return self.get_states()

    def load_state_dict(self, states: State) -> None:
        """As ``set_states``."""
        self.set_states(states)

    def check(self, members: Members) -> None:
        """ValueError if what there is for these parameters does not fit them; known before anything moves."""
        if isinstance(self.opt, Optimizer | Wrapper):
            self.opt.check(members)

    def masters(self, members: Members, like: np.ndarray) -> np.ndarray | None:
        """As ``Optimizer.masters``, of the inner one; None for a stranger."""
        return self.opt.masters(members, like) if isinstance(self.opt, Optimizer | Wrapper) else None

    def numbers(self) -> list[str]:
        """What ranks must have alike for the next update, in a text for each; ValueError for a number out of range."""
        own = [f"{type(self).__name__}'s {name}={value!r}" for name, value in self._numbers().items()]
        return own + (self.opt.numbers() if isinstance(self.opt, Optimizer | Wrapper) else [])

    @abc.abstractmethod
    def _numbers(self) -> dict[str, float]:
        """The wrapper's own part of ``numbers``, by name."""

    @abc.abstractmethod
    def _says(self) -> str:
        """The wrapper's own part of its repr."""

    def __repr__(self) -> str:
        """The wrapper, what is in it, and their numbers; the same text on every rank."""
        inner = repr(self.opt) if isinstance(self.opt, Optimizer | Wrapper) else type(self.opt).__name__
        return f"{type(self).__name__}({inner}, {self._says()})"

    def _hand_over(self, name: str, value: np.ndarray, grad: np.ndarray) -> None:
        """Let the inner optimizer update a parameter, by a gradient that it may change."""
        if self._way == "apply":
            self.opt.apply(name, value, grad)
            return
        param = self._params.setdefault(name, Named(name, value))
        param.data = value
        self.opt.update(param, grad)
        if param.data is not value:  # it has made a new array instead of changing this one
            device.copy(value, param.data)
