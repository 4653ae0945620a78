"""Several batches to an update, in front of any optimizer."""

import numpy as np

from distopt import device, kernels
from distopt.numbers import whole
from distopt.optim.arrays import check, check_states, widened
from distopt.optim.optimizer import State
from distopt.optim.protocols import AnyOptimizer
from distopt.optim.wrapper import Wrapper
from distopt.tables import Members, wide


class BatchGradients(Wrapper):
    """Let an optimizer update once in ``num_batches`` steps, by the mean of their gradients.

    MoXing's wrapper 'batch_gradients'.  The sums of a window are float32, float64 for float64 gradients, and copies: a
    gradient may be overwritten as soon as ``apply`` returns.  A parameter that has no gradient in some of the batches
    counts as zeros there; one that has none in a whole window is not updated.  The inner optimizer's steps, and so its
    schedules, count windows.

    A DistOpt around it exchanges the gradients of each batch; ``DistOpt(num_batches=)`` exchanges once per window.

    Raises TypeError or ValueError for a ``num_batches`` that is not whole or below 1, or an ``opt`` that is no
    optimizer.
    """

    own = ("batches", "sums")

    def __init__(self, opt: AnyOptimizer, num_batches: int):
        super().__init__(opt)
        self.num_batches = whole("num_batches", num_batches, least=1)
        self.batches = 0  # complete ones in the open window
        self._sums: dict[str, np.ndarray] = {}  # of the window's gradients, by name
        self._values: dict[str, np.ndarray] = {}  # of their parameters; a checkpoint has none
        self._in_batch = False  # was something applied since the last step?

    def apply(self, name: str, value: np.ndarray, grad: np.ndarray) -> None:
        """Add one parameter's gradient to its sum; ``grad`` stays as it is.

        Raises TypeError or ValueError for a gradient that is not like the parameter, or one that cannot be updated.
        """
        check(name, value, grad)
        total = self._sum(name, value)
        kernels.accumulate(widened(grad), total)
        self._sums[name], self._values[name], self._in_batch = total, value, True

    def step(self) -> bool:
        """A batch is complete; True if it was the window's last one, and the inner optimizer has updated."""
        self.batches, self._in_batch = self.batches + 1, False
        return self.batches >= self.num_batches and self.flush()

    def flush(self) -> bool:
        """Update now, by the mean of the batches that the window has; False if it has none.

        Raises RuntimeError in the middle of a batch, and for parameters of a window that a checkpoint had open and that
        have had no gradient since: nobody has said where they are.
        """
        if self._in_batch:
            raise RuntimeError("flush() in the middle of a batch: step() ends it")
        unseen = [name for name in self._sums if name not in self._values]
        if unseen:
            raise RuntimeError(f"no gradient since the checkpoint, so no value to update: {', '.join(unseen[:5])}")
        if not self.batches:
            return False
        for name, value in self._values.items():
            total = self._sums[name]
            kernels.scale(total, 1.0 / self.batches)
            self._hand_over(name, value, total)
            device.last_read(total)
        self._sums, self._values, self.batches = {}, {}, 0  # not cleared: the inner one may keep what it was given
        super().step()
        return True

    def get_states(self) -> State:
        """The inner optimizer's states as 'opt', and of the open window 'batches', and 'sums' by parameter name."""
        sums = {name: device.host_copy(total) for name, total in self._sums.items()}
        return super().get_states() | {"batches": self.batches, "sums": sums}

    def set_states(self, states: State) -> None:
        """Go on from what ``get_states`` returned.

        Raises ValueError or TypeError, before anything changes, if these are not the states of such a wrapper, of a
        window of this ``num_batches``, or of such an optimizer in it.
        """
        super().set_states(states)
        self.batches = int(states["batches"])
        self._sums = {name: np.array(total, order="C") for name, total in states["sums"].items()}
        self._values, self._in_batch = {}, False

    def check(self, members: Members) -> None:
        """As for all; and ValueError for a sum that a checkpoint had of another parameter."""
        super().check(members)
        for name, shape in zip(members.names, members.shapes, strict=True):
            self._check_sum(name, shape, members.dtype)

    def _check_own(self, states: State) -> None:
        if whole("batches", states["batches"], least=0) >= self.num_batches:
            raise ValueError(f"batches must be below num_batches={self.num_batches}, got {states['batches']}")
        check_states("sums", states["sums"])

    def _sum(self, name: str, value: np.ndarray) -> np.ndarray:
        """Where a parameter's gradients are added up: on its GPU, if it is on one."""
        kept, dtype = self._sums.get(name), wide(value.dtype)
        self._check_sum(name, value.shape, dtype)
        if kept is not None and device.place(kept) == device.place(value):
            return kept
        total = device.zeros(value.size, dtype, like=value).reshape(value.shape)
        if kept is not None:
            device.copy(total, kept)
        return total

    def _check_sum(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        kept = self._sums.get(name)
        if kept is not None and (kept.shape, kept.dtype) != (shape, dtype):
            began = f"{kept.shape} {kept.dtype}"
            raise ValueError(f"{name}: the window began with {began}, the parameter's gradients are {shape} {dtype}")

    def _numbers(self) -> dict[str, float]:
        return {"num_batches": self.num_batches, "batches": self.batches}

    def _says(self) -> str:
        return f"num_batches={self.num_batches}"
