"""The LBSGD optimizer."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distopt import kernels
from distopt.checks import check_float, check_int
from distopt.kernels.layout import BucketLayout
from distopt.optim.layerwise import Layerwise
from distopt.optim.optimizer import Optimizer, Part, State, SumOverRanks, TableState
from distopt.optim.schedules import Number

# The fraction of the multiplier's growth to ``batch_scale`` that is done at a fraction of the warm-up.
WARMUPS: dict[str, Callable[[float], float]] = {
    "linear": lambda part: part,
    "power2": lambda part: part * part,
    "sqrt": math.sqrt,
    "lars": lambda part: 1.0,
}


class LBSGD(Layerwise):
    """A large-batch SGD as in MXNet, with gradient accumulation and a learning rate that warms up.

    The gradients of ``batch_scale`` calls make one update, and the learning rate is multiplied by up to ``batch_scale``
    (Goyal et al., "Accurate, large minibatch SGD", 2017).  With g the mean over the calls,
    ``d = clip(rescale_grad g) + weight_decay w;  b = momentum b - lr multiplier d;  w += b``.

    With n calls so far, those of ``begin_epoch`` epochs before this run included, and N = ``warmup_epochs
    updates_per_epoch`` calls of warm-up, the multiplier is ``batch_scale`` from N on, and before
    ``1 + (batch_scale - 1) f(n / N)``, where f depends on ``warmup_strategy``.

    Schedules are functions of k, the number of updates applied so far, not of calls.  The states are ``moments``, b,
    and ``window``, the sum of the open window.  ``DistOpt(num_batches=)`` exchanges gradients once per window; with
    this optimizer each call's gradients are exchanged.

    Args:
        lr: the learning rate, at least 0, a number or a schedule.
        momentum: in [0, 1], a number or a schedule.
        weight_decay: at least 0, a number or a schedule.
        warmup_strategy: 'linear' for f(x) = x, 'power2' for x^2, 'sqrt' for the square root; or 'lars', where the
            multiplier is ``sqrt(|w|^2 / (|g|^2 + weight_decay |w|^2 + 1e-18))`` of each parameter, held in [0.01, 100].
            This is about 1000 times LARS's ratio and excludes no parameter: prefer ``LARS``.
        warmup_epochs: the length of the warm-up.
        batch_scale: the number of calls in a window, at least 1.
        updates_per_epoch: the number of calls in an epoch.
        begin_epoch: the number of epochs before this run.
        num_epochs: accepted for compatibility with MXNet, without effect.
        **options: the keyword arguments that every ``Optimizer`` takes, such as ``clip_gradient``.

    Attributes:
        batches: the number of calls in the open window.

    Raises:
        TypeError: ``batch_scale`` is no integer, or an argument is no number.
        ValueError: the strategy is unknown, ``batch_scale`` is below 1, or a number is negative or not finite.

    Example:
        >>> import numpy as np
        >>> from distopt.optim import LBSGD
        >>> opt, w = LBSGD(lr=0.1, batch_scale=2, warmup_epochs=0), np.array([1.0, -2.0])
        >>> for grad in ([1.0, 0.0], [3.0, 2.0]):
        ...     opt.apply("w", w, np.array(grad))
        ...     opt.step()
        ...     print(w.round(4).tolist())
        [1.0, -2.0]
        [0.6, -2.2]
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
        if not isinstance(warmup_strategy, str) or warmup_strategy not in WARMUPS:
            raise ValueError(f"warmup_strategy must be one of {', '.join(WARMUPS)}, got {warmup_strategy!r}")
        super().__init__(lr, weight_decay, exclude=(), **options)
        self.batches = 0
        self.momentum, self.warmup_strategy = momentum, warmup_strategy
        self.batch_scale = check_int("batch_scale", batch_scale, least=1)
        per_epoch = check_float("updates_per_epoch", updates_per_epoch)
        self.calls_before = check_float("begin_epoch", begin_epoch) * per_epoch
        self.warmup_calls = check_float("warmup_epochs", warmup_epochs) * per_epoch
        self.same_each_step = self.batch_scale == 1

    @property
    def multiplier(self) -> float:
        """The factor by which the learning rate is multiplied at the next update.

        It is 1 with the strategy 'lars', whose factors, one for each parameter, the kernel computes.
        """
        calls = self.calls_before + (self.step_counter + 1) * self.batch_scale
        if self.warmup_strategy == "lars":
            return 1.0
        if calls >= self.warmup_calls:
            return float(self.batch_scale)
        part = WARMUPS[self.warmup_strategy](calls / self.warmup_calls) if self.warmup_calls > 1 else 0.0
        return 1.0 + (self.batch_scale - 1) * part

    def rule_numbers(self) -> dict[str, float]:
        rescale = self.rescale_grad / self.batch_scale
        return {"rescale": rescale, "momentum": self.at("momentum"), "batches": self.batch_scale}

    def kernel_numbers(self, scale: float) -> dict[str, float]:
        return super().kernel_numbers(scale) | {"scale": scale, "lr": self.at("lr") * self.multiplier}

    def update_parts(
        self,
        table_state: TableState,
        parts: Sequence[Part],
        skip_flag: np.ndarray | None,
        sum_over_ranks: SumOverRanks | None,
    ) -> None:
        window, moments = table_state.slots["window"], table_state.slots["moments"]
        if self.batches + 1 < self.batch_scale:
            for members, grad in parts:
                kernels.lbsgd_gather(members, grad, window, self._now, skip_flag)
        elif self.warmup_strategy == "lars":
            self.widen(parts, skip_flag)

            def measure(members: BucketLayout, grad: np.ndarray, chunks: np.ndarray) -> None:
                kernels.lbsgd_squares(members, grad, window, chunks, self._now)

            squares = self.sums_over_tensors(table_state, parts, measure, "sums", 2, sum_over_ranks)
            for members, grad in parts:
                kernels.lbsgd_lars(members, grad, window, moments, squares, self._now, skip_flag)
        else:
            for members, grad in parts:
                kernels.lbsgd(members, grad, window, moments, self._now, skip_flag)

    def step(self) -> None:
        """Complete a call; the last one of a window counts as an update."""
        self.batches = (self.batches + 1) % self.batch_scale
        self.step_counter += self.batches == 0

    def take_back(self) -> None:
        self.step_counter -= self.batches == 0
        self.batches = (self.batches - 1) % self.batch_scale

    def check_loaded(self, states: State) -> None:
        super().check_loaded(states)
        if states.get("batches", 0) >= self.batch_scale:
            raise ValueError(f"batches must be in [0, {self.batch_scale - 1}], got {states['batches']}")
