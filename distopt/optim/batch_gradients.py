"""Gradient accumulation in front of any optimizer."""

import numpy as np

from distopt import device, kernels
from distopt.checks import check_int
from distopt.kernels.layout import BucketLayout, compute_dtype
from distopt.optim.arrays import check, check_states, widened
from distopt.optim.optimizer import State
from distopt.optim.protocols import AnyOptimizer
from distopt.optim.wrapper import OptimizerWrapper


class BatchGradients(OptimizerWrapper):
    """A wrapper that lets an optimizer update once in ``num_batches`` steps, by the mean of their gradients.

    It is MoXing's wrapper 'batch_gradients'.  The steps between two updates are a *window*.  A window's sums are
    float32, or float64 for float64 gradients, and they are copies: a gradient may be overwritten as soon as ``apply``
    returns.  A parameter that has no gradient in some of the batches counts as zeros there; one that has none in a
    whole window is not updated.  The inner optimizer's ``step_counter``, and so its schedules, count windows.

    A ``DistOpt`` around this wrapper exchanges the gradients of each batch; ``DistOpt(num_batches=)`` exchanges once
    per window.

    Args:
        opt: the inner optimizer, with ``apply(name, value, grad)`` or ``update(param, grad)``.
        num_batches: the number of steps in a window, at least 1.

    Attributes:
        batches: the number of complete batches in the open window.

    Raises:
        TypeError: ``num_batches`` is no integer, or ``opt`` is no optimizer.
        ValueError: ``num_batches`` is below 1.

    Example:
        >>> import numpy as np
        >>> from distopt.optim import SGD, BatchGradients
        >>> opt, w = BatchGradients(SGD(lr=0.1), num_batches=2), np.zeros(2)
        >>> for grad in ([1.0, 0.0], [3.0, 2.0]):
        ...     opt.apply("w", w, np.array(grad))
        ...     print(opt.step(), w.round(4).tolist())
        False [0.0, 0.0]
        True [-0.2, -0.1]
    """

    own = ("batches", "sums")

    def __init__(self, opt: AnyOptimizer, num_batches: int):
        super().__init__(opt)
        self.num_batches = check_int("num_batches", num_batches, least=1)
        self.batches = 0
        # the open window's sums of gradients, by parameter name
        self._sums: dict[str, np.ndarray] = {}
        # the arrays of their parameters; a checkpoint has none
        self._values: dict[str, np.ndarray] = {}
        # whether a gradient was applied since the last step
        self._in_batch = False

    def apply(self, name: str, value: np.ndarray, grad: np.ndarray) -> None:
        """Add one parameter's gradient to the window's sum; ``value`` and ``grad`` stay as they are.

        Args:
            name: the parameter's name.
            value: its array, which the window's last ``step`` updates in place.
            grad: an array of the same shape and dtype, or float32 for a 16-bit ``value``.

        Raises:
            TypeError: value or gradient is no array of floats, or they are not on the same host or GPU.
            ValueError: the gradient has another shape or dtype than the parameter or the window's sum, or the parameter
                is read-only.
        """
        check(name, value, grad)
        total = self._sum(name, value)
        kernels.accumulate(widened(grad), total)
        self._sums[name], self._values[name], self._in_batch = total, value, True

    def step(self) -> bool:
        """Complete a batch, and update at the end of the window.

        Returns:
            True if this was the window's last batch, and the inner optimizer has updated.
        """
        self.batches, self._in_batch = self.batches + 1, False
        return self.batches >= self.num_batches and self.flush()

    def flush(self) -> bool:
        """Update now, by the mean of the batches in the open window, however many it has.

        Returns:
            True if the inner optimizer has updated; False if the window has no batch.

        Raises:
            RuntimeError: a batch is not complete, or a checkpoint had an open window, and some of its parameters have
                had no gradient since, so that their arrays are not known.
        """
        if self._in_batch:
            raise RuntimeError("flush must be called between batches, got a call in the middle of one; step() ends it")
        unseen = [name for name in self._sums if name not in self._values]
        if unseen:
            raise RuntimeError(
                "each parameter of a window that a checkpoint had open must get a gradient before the update, got "
                f"none for {', '.join(unseen[:5])}; apply one, whose value is the array to update"
            )
        if not self.batches:
            return False
        for name, value in self._values.items():
            total = self._sums[name]
            kernels.scale(total, 1.0 / self.batches)
            self.hand_over(name, value, total)
            device.wait_for_last_use(total)
        # not cleared: the inner optimizer may keep these arrays
        self._sums, self._values, self.batches = {}, {}, 0
        super().step()
        return True

    def get_states(self) -> State:
        """Return all that changes between steps.

        Returns:
            The inner optimizer's states as ``opt``, the number of batches in the open window as ``batches``, and copies
            of its sums as ``sums``, by parameter name.
        """
        sums = {name: device.host_copy(total) for name, total in self._sums.items()}
        return super().get_states() | {"batches": self.batches, "sums": sums}

    def set_states(self, states: State) -> None:
        """Load states that ``get_states`` returned.

        Raises:
            ValueError: these are not the states of such a wrapper and of such an inner optimizer, or ``batches`` is not
                below ``num_batches``; nothing has changed then.
            TypeError: a value has the wrong type; nothing has changed then.
        """
        super().set_states(states)
        self.batches = int(states["batches"])
        self._sums = {name: np.array(total, order="C") for name, total in states["sums"].items()}
        self._values, self._in_batch = {}, False

    def check(self, members: BucketLayout) -> None:
        """Check, before anything moves, that loaded states fit these parameters.

        Raises:
            ValueError: a state or a sum of the window does not have its parameter's shape.
        """
        super().check(members)
        for name, shape in zip(members.names, members.shapes, strict=True):
            self._check_sum(name, shape, members.dtype)

    def check_own_states(self, states: State) -> None:
        if check_int("batches", states["batches"], least=0) >= self.num_batches:
            raise ValueError(f"batches must be below num_batches={self.num_batches}, got {states['batches']}")
        check_states("sums", states["sums"])

    def _sum(self, name: str, value: np.ndarray) -> np.ndarray:
        """Return the array in which a parameter's gradients are added up, on its GPU if it is on one."""
        window_sum, dtype = self._sums.get(name), compute_dtype(value.dtype)
        self._check_sum(name, value.shape, dtype)
        if window_sum is not None and device.gpu_of(window_sum) == device.gpu_of(value):
            return window_sum
        total = device.zeros(value.size, dtype, like=value).reshape(value.shape)
        if window_sum is not None:
            device.copy(total, window_sum)
        return total

    def _check_sum(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        window_sum = self._sums.get(name)
        if window_sum is not None and (window_sum.shape, window_sum.dtype) != (shape, dtype):
            began = f"{window_sum.shape} {window_sum.dtype}"
            raise ValueError(f"{name}: gradients of the open window must be {began}, got {shape} {dtype}")

    def own_numbers(self) -> dict[str, float]:
        return {"num_batches": self.num_batches, "batches": self.batches}

    def settings_text(self) -> str:
        return f"num_batches={self.num_batches}"
