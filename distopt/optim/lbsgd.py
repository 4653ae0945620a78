"""LBSGD."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distopt import kernels
from distopt.numbers import number, whole
from distopt.optim.layerwise import Layerwise
from distopt.optim.optimizer import Kept, Optimizer, Part, State, Together
from distopt.optim.schedules import Number
from distopt.tables import Members

# By how much of its way to ``batch_scale`` the learning rate's multiplier has come, at so much of the warm-up.
WARMUPS: dict[str, Callable[[float], float]] = {
    "linear": lambda part: part,
    "power2": lambda part: part * part,
    "sqrt": math.sqrt,
    "lars": lambda part: 1.0,
}


class LBSGD(Layerwise):
    """Large-batch SGD, as in MXNet: the gradients of ``batch_scale`` calls make one update, at a learning rate that
    warms up to ``batch_scale`` times its own (Goyal et al., "Accurate, large minibatch SGD", 2017).

    ``g`` is the mean over the calls; ``d = clip(rescale_grad g) + weight_decay w;
    b = momentum b - lr multiplier d;  w += b``.  With n calls so far, those of ``begin_epoch`` epochs before this run
    included, and N = ``warmup_epochs updates_per_epoch`` calls of warm-up, the multiplier is ``batch_scale`` from N on,
    and before ``1 + (batch_scale - 1) f(n / N)``: f is n / N ('linear'), its square ('power2') or root ('sqrt').  With
    'lars' it is ``sqrt(|w|^2 / (|g|^2 + weight_decay |w|^2 + 1e-18))`` of each parameter, held in [0.01, 100], which is
    about 1000 times LARS's and excludes nothing: prefer ``LARS``.

    Schedules are functions of k, the updates applied so far, not of calls.  The sum of a window that is open is in the
    states.  ``num_epochs`` is taken for MXNet's sake and has no effect.  ``DistOpt(num_batches=)`` exchanges once per
    window; this exchanges each call's gradients.

    Raises TypeError or ValueError for an unknown strategy, a ``batch_scale`` that is not whole or below 1, or a
    negative number.
    """

    slots, struct, kinds = ("moments", "window"), "Lbsgd", 2
    counters = ("step_counter", "batches")
    options = (*Optimizer.options, "warmup_strategy", "batch_scale", "warmup_calls", "calls_before")
    hypers = Optimizer.hypers | {"momentum": (0.0, 1.0)}

    def __init__(
        self,
        lr: Number = 0.01,
        momentum: Number = 0.0,
        weight_decay: Number = 0.0,
        warmup_strategy: str = "linear",
        warmup_epochs: float = 5,
        batch_scale: int = 1,
        updates_per_epoch: float = 32,
        begin_epoch: float = 0,
        num_epochs: float = 60,
        **options: Any,
    ):
        if warmup_strategy not in WARMUPS:
            raise ValueError(f"warmup_strategy must be one of {', '.join(WARMUPS)}, got {warmup_strategy!r}")
        super().__init__(lr, weight_decay, exclude=(), **options)
        self.batches = 0  # calls in the open window
        self.momentum, self.warmup_strategy = momentum, warmup_strategy
        self.batch_scale = whole("batch_scale", batch_scale, least=1)
        per_epoch = number("updates_per_epoch", updates_per_epoch)
        self.calls_before = number("begin_epoch", begin_epoch) * per_epoch
        self.warmup_calls = number("warmup_epochs", warmup_epochs) * per_epoch
        self.same_each_step = self.batch_scale == 1

    @property
    def multiplier(self) -> float:
        """Of the learning rate at the next update."""
        calls = self.calls_before + (self.step_counter + 1) * self.batch_scale
        if self.warmup_strategy == "lars":
            return 1.0
        if calls >= self.warmup_calls:
            return float(self.batch_scale)
        part = WARMUPS[self.warmup_strategy](calls / self.warmup_calls) if self.warmup_calls > 1 else 0.0
        return 1.0 + (self.batch_scale - 1) * part

    def _own(self) -> dict[str, float]:
        rescale = self.rescale_grad / self.batch_scale
        return {"rescale": rescale, "momentum": self.at("momentum"), "batches": self.batch_scale}

    def _numbers(self, scale: float) -> dict[str, float]:
        return super()._numbers(scale) | {"scale": scale, "lr": self.at("lr") * self.multiplier}

    def _update_all(
        self, kept: Kept, parts: Sequence[Part], refused: np.ndarray | None, together: Together | None
    ) -> None:
        window, moments = kept.state["window"], kept.state["moments"]
        if self.batches + 1 < self.batch_scale:
            for members, grad in parts:
                kernels.lbsgd_gather(members, grad, window, self._now, refused)
        elif self.warmup_strategy == "lars":
            self._widen(parts, refused)

            def measure(members: Members, grad: np.ndarray, chunks: np.ndarray) -> None:
                kernels.lbsgd_squares(members, grad, window, chunks, self._now)

            squares = self._measured(kept, parts, measure, "sums", 2, together)
            for members, grad in parts:
                kernels.lbsgd_lars(members, grad, window, moments, squares, self._now, refused)
        else:
            for members, grad in parts:
                kernels.lbsgd(members, grad, window, moments, self._now, refused)

    def step(self) -> None:
        """A call is done: the window closes at the last one."""
        self.batches = (self.batches + 1) % self.batch_scale
        self.step_counter += self.batches == 0

    def take_back(self) -> None:
        """The last ``step`` was none."""
        self.step_counter -= self.batches == 0
        self.batches = (self.batches - 1) % self.batch_scale

    def _check_states(self, states: State) -> None:
        super()._check_states(states)
        if states["batches"] >= self.batch_scale:
            raise ValueError(f"batches must be in [0, {self.batch_scale - 1}], got {states['batches']}")
