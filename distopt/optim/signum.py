"""The Signum optimizer."""

from typing import Any

import numpy as np

from distopt import kernels
from distopt.kernels.layout import BucketLayout
from distopt.optim.optimizer import ElementwiseOptimizer, Optimizer
from distopt.optim.schedules import Number


class Signum(ElementwiseOptimizer):
    """A sign descent optimizer (Bernstein et al., "signSGD: compressed optimisation for non-convex problems", 2018).

    ``b = momentum b + g``, b zero at first; ``w -= lr weight_decay w``, and ``w -= lr sign(b)``, where sign(0) is 0.
    Weight decay stands beside the step, as in AdamW.  The state is ``moments``, b, if there is momentum.  Without it
    this is the second half of DeMo (Peng et al., 2024), whose momentum is its compressor's residual (``compress.DCT``).

    Args:
        lr: the learning rate, at least 0: a number, or a schedule of k, the number of updates applied so far.
        momentum: in [0, 1], a number or a schedule.  It cannot be assigned to a Signum that was made without, which has
            no buffer.
        weight_decay: at least 0, a number or a schedule.
        **options: the keyword arguments that every ``Optimizer`` takes, such as ``clip_gradient``.

    Raises:
        ValueError: a hyper-parameter is out of its range or not finite.

    Example:
        >>> import numpy as np
        >>> from distopt.optim import Signum
        >>> opt, w = Signum(lr=0.1), np.array([1.0, -2.0, 3.0])
        >>> opt.apply("w", w, np.array([0.5, -1e-9, 0.0]))
        >>> w.tolist()
        [0.9, -1.9, 3.0]
    """

    hypers = Optimizer.hypers | {"momentum": (0.0, 1.0)}

    def __init__(self, lr: Number = 1e-3, momentum: Number = 0.0, weight_decay: Number = 0.0, **options: Any):
        self._has_momentum = callable(momentum) or momentum != 0
        self.slots, self.struct = (("moments",), "Signum") if self._has_momentum else ((), "Update")
        super().__init__(lr, weight_decay, **options)
        self.momentum = momentum

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; ValueError for a momentum if the optimizer was made without one, and so has no buffer."""
        if name == "momentum" and not self._has_momentum and (callable(value) or value != 0):
            raise ValueError(f"momentum must be 0 in a Signum that was made without, got {value!r}")
        super().__setattr__(name, value)

    def rule_numbers(self) -> dict[str, float]:
        return {"momentum": self.at("momentum")} if self._has_momentum else {}

    def run_kernel(self, members: BucketLayout, grad: np.ndarray, slots: dict[str, np.ndarray], *rest: Any) -> None:
        if self._has_momentum:
            kernels.signum(members, grad, slots["moments"], *rest)
        else:
            kernels.sign_descent(members, grad, *rest)
