"""What DistOpt asks of an optimizer."""

import abc
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from distopt.adapters.first_update import FirstUpdate
from distopt.buckets import Buffer, Buffers, Sum
from distopt.checkpoint.foreign import has_named, typed
from distopt.gradients import Known
from distopt.optim import Wrapper
from distopt.optim.optimizer import Optimizer, Together
from distopt.tables import Members

MOMENTUM = "momentum", "beta_1", "beta1"  # what it is called
Whole = Callable[[Members, np.ndarray], np.ndarray]


class Adapter(abc.ABC):
    """One way to hand gradients to an optimizer object; the default is one parameter after the other."""

    updates_shares = False  # can it update a part of the parameters, whatever their names?
    looks = False  # do its kernels look whether the step is refused?
    version = 0  # of its states' memory
    same_each_step = True  # does an update always call the same kernels?

    def __init__(self, opt: Any):
        self.opt = opt
        self._first = None if isinstance(opt, Optimizer | Wrapper) else FirstUpdate(opt)

    def apply(self, name: str, param: Any, value: np.ndarray, mean: np.ndarray) -> None:
        """Update one parameter: ``param`` as the caller gave it, ``value`` its array."""
        if self._first is None:
            self._apply(name, param, value, mean)
        else:
            self._first.look(param, value, mean)
            self._first.check_returned(name, value, self._apply(name, param, value, mean))

    @abc.abstractmethod
    def _apply(self, name: str, param: Any, value: np.ndarray, mean: np.ndarray) -> Any:
        """Let the optimizer update one parameter; what it returns."""

    def check(self, buffers: Buffers) -> None:  # noqa: B027  strangers are not asked
        """Raise now what would fail in the middle of an update with these buffers."""

    def reserve(self, buffers: Buffers) -> None:  # noqa: B027  strangers make theirs themselves
        """Make the memory that updates with these buffers need; MemoryError if there is none."""

    def masters(self, buffer: Buffer) -> np.ndarray | None:
        """The float32 values of a bucket's 16-bit parameters, flat and up to date; None if none are kept."""
        return None

    def numbers(self) -> list[str]:
        """What all ranks must have alike for the next update, in a text for each number."""
        return []

    def update(
        self,
        buffers: Buffers,
        order: Mapping[str, Known],
        sums: Iterable[Sum],
        scale: float,
        refused: np.ndarray | None = None,
        together: Together | None = None,
    ) -> None:
        """Update all parameters by ``scale`` times the sums of their buckets, in backward order.

        ``refused`` (compress.At) is only given to optimizers that look at it; ``together``, which adds up the ranks'
        numbers, where each updates its share.
        """
        self.one_by_one(buffers, order, sums, scale)

    def one_by_one(self, buffers: Buffers, order: Mapping[str, Known], sums: Iterable[Sum], scale: float) -> None:
        """Update these parameters, in this order, and no others; the sums are finite."""
        means: dict[str, np.ndarray] = {}
        for buffer, total in zip(buffers, sums, strict=True):
            means |= buffer.mean(total, scale)
        for name, known in order.items():
            self.apply(name, known.param, known.value, means[name])

    def momentum(self) -> str:
        """The number that gives the next update momentum of its own, and whose it is; '' if there is none."""
        opt = self._innermost
        for name in MOMENTUM:
            given = getattr(opt, name, None)
            value = given(opt.step_counter) if isinstance(opt, Optimizer) and callable(given) else given
            if isinstance(value, Real) and value:
                return f"{type(opt).__name__}'s {name}={value}"
        return ""

    def multiply(self, buffers: Buffers) -> None:
        """Write down the multipliers of each parameter in the next update, for a compressor that has weight decay."""
        opt = self._innermost
        for buffer in buffers if isinstance(opt, Optimizer) else ():
            opt.multiply(buffer.parameters)

    @property
    def _innermost(self) -> Any:
        """The optimizer that is in all wrappers."""
        opt = self.opt
        while isinstance(opt, Wrapper):
            opt = opt.opt
        return opt

    def step(self) -> None:
        """All parameters have been updated."""
        if hasattr(self.opt, "step"):
            self.opt.step()
        if self._first and self._first.finish():
            self._first = None

    def prepare(self, scale: float, gpu: int | None) -> None:  # noqa: B027  for those that look
        """Put the numbers of the next update where kernels find them."""

    def take_back(self) -> None:  # noqa: B027  strangers are not stepped before it is known
        """The last step was refused on the GPU after all."""

    def state_dict(self, whole: Whole | None = None) -> Any:
        """The optimizer's own states, None if it has no ``state_dict`` or ``get_states``.

        ``whole``, where ranks update a share each, makes of a flat array one that has the shares of all.
        """
        save = getattr(self.opt, "state_dict", getattr(self.opt, "get_states", None))
        return save() if save else None

    @property
    def has_state(self) -> bool:
        """Has the optimizer ``state_dict`` or ``get_states``?"""
        return hasattr(self.opt, "state_dict") or hasattr(self.opt, "get_states")

    def load_state_dict(self, state: Any) -> None:
        """Hand states back to the optimizer."""
        load = getattr(self.opt, "load_state_dict", getattr(self.opt, "set_states", None))
        if load and state is not None:
            load(self._typed(state))

    def _typed(self, state: Any) -> Any:
        """States whose named tuples are of the optimizer's own classes, where it has states already."""
        return typed(state, self.state_dict()) if has_named(state) else state

    def __repr__(self) -> str:
        return f"optimizer {type(self.opt).__name__}"
