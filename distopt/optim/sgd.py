"""The SGD optimizer."""

from typing import Any

import numpy as np

from distopt import kernels
from distopt.checks import check_bool
from distopt.kernels.layout import BucketLayout
from distopt.optim.optimizer import ElementwiseOptimizer, Optimizer
from distopt.optim.schedules import Number


class SGD(ElementwiseOptimizer):
    """A stochastic gradient descent optimizer with momentum as in SINGA and PyTorch.

    The learning rate stands outside the momentum buffer: ``d = g + weight_decay w``; without momentum ``w -= lr d``.
    With momentum ``b = momentum b + (1 - dampening) d``, b zero at first, so that dampening acts from the first step
    on, and ``w -= lr b``; with ``nesterov`` ``w -= lr (d + momentum b)`` (Sutskever et al., 2013).  The state is
    ``moments``, b, if there is momentum.

    Args:
        lr: the learning rate, at least 0: a number, or a schedule of k, the number of updates applied so far.
        momentum: in [0, 1], a number or a schedule.  It cannot be assigned to an SGD that was made without, which has
            no buffer.
        dampening: in [0, 1], a number or a schedule.
        weight_decay: at least 0, a number or a schedule.
        nesterov: True for Nesterov's momentum.
        **options: the keyword arguments that every ``Optimizer`` takes, such as ``clip_gradient``.

    Raises:
        ValueError: a hyper-parameter is out of its range or not finite, or ``nesterov`` goes without momentum or with
            dampening.

    Example:
        >>> import numpy as np
        >>> from distopt.optim import SGD
        >>> opt, w = SGD(lr=0.1, momentum=0.9), np.array([1.0, -2.0])
        >>> for _ in range(2):
        ...     opt.apply("w", w, np.array([0.5, 0.25]))
        ...     opt.step()
        >>> w.round(4).tolist()
        [0.855, -2.0725]
    """

    options = (*Optimizer.options, "nesterov")
    hypers = Optimizer.hypers | {"momentum": (0.0, 1.0), "dampening": (0.0, 1.0)}

    def __init__(
        self,
        lr: Number = 0.1,
        momentum: Number = 0.0,
        dampening: Number = 0.0,
        weight_decay: Number = 0.0,
        nesterov: bool = False,
        **options: Any,
    ):
        self._has_momentum = callable(momentum) or momentum != 0
        self.slots, self.struct = (("moments",), "Momentum") if self._has_momentum else ((), "Update")
        super().__init__(lr, weight_decay, **options)
        self.momentum, self.dampening = momentum, dampening
        self.nesterov = check_bool("nesterov", nesterov)
        if nesterov and (not self._has_momentum or callable(dampening) or dampening != 0):
            raise ValueError(
                f"nesterov must be with momentum above 0 and no dampening, got {momentum!r}, {dampening!r}"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; ValueError for a momentum if the optimizer was made without one, and so has no buffer."""
        if name == "momentum" and not self._has_momentum and (callable(value) or value != 0):
            raise ValueError(f"momentum must be 0 in an SGD that was made without, got {value!r}")
        super().__setattr__(name, value)

    def rule_numbers(self) -> dict[str, float]:
        return {"momentum": self.at("momentum"), "gain": 1.0 - self.at("dampening")} if self._has_momentum else {}

    def run_kernel(self, members: BucketLayout, grad: np.ndarray, slots: dict[str, np.ndarray], *rest: Any) -> None:
        if self.nesterov:
            kernels.sgd_nesterov(members, grad, slots["moments"], *rest)
        elif self._has_momentum:
            kernels.sgd_momentum(members, grad, slots["moments"], *rest)
        else:
            kernels.sgd(members, grad, *rest)
