"""Stochastic gradient descent."""

from typing import Any

import numpy as np

from distopt import kernels
from distopt.numbers import flag
from distopt.optim.optimizer import Optimizer
from distopt.optim.schedules import Number
from distopt.tables import Members


class SGD(Optimizer):
    """SGD with momentum as in SINGA (and PyTorch): the learning rate stands outside the momentum buffer.

    ``d = g + weight_decay w``; without momentum ``w -= lr d``.  With momentum
    ``b = momentum b + (1 - dampening) d``, b zero at first, so that dampening acts from the first step on, and
    ``w -= lr b``; with ``nesterov`` ``w -= lr (d + momentum b)`` (Sutskever et al., 2013).

    Every hyper-parameter is a number or a schedule of k, the updates applied so far.  Raises ValueError for a
    negative or infinite value, and for nesterov without momentum or with dampening.
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
        self.nesterov = flag("nesterov", nesterov)
        if nesterov and (not self._has_momentum or callable(dampening) or dampening != 0):
            raise ValueError("nesterov needs momentum above 0 and no dampening")

    def __setattr__(self, name: str, value: Any) -> None:
        """As ever; ValueError for a momentum if this was made without: it has no buffer."""
        if name == "momentum" and not self._has_momentum and (callable(value) or value != 0):
            raise ValueError(f"momentum must be 0 in an SGD that was made without, got {value!r}")
        super().__setattr__(name, value)

    def _own(self) -> dict[str, float]:
        return {"momentum": self.at("momentum"), "gain": 1.0 - self.at("dampening")} if self._has_momentum else {}

    def _update(self, members: Members, grad: np.ndarray, state: dict[str, np.ndarray], *rest: Any) -> None:
        if self.nesterov:
            kernels.sgd_nesterov(members, grad, state["moments"], *rest)
        elif self._has_momentum:
            kernels.sgd_momentum(members, grad, state["moments"], *rest)
        else:
            kernels.sgd(members, grad, *rest)
