"""Schedules of the sparsity of what is sent: functions of k, the updates applied so far."""

import math
from collections.abc import Callable, Sequence

from distopt.checks import check_float, check_int

Sparsity = Callable[[int], float]  # of update k: the fraction that is not sent
BELOW_ONE = math.nextafter(1.0, 0.0)


class Stages:
    """One sparsity per epoch, the last one from then on: MoXing's ``dgc_sparsity_strategy``.

    Raises ValueError for no stages, a sparsity outside [0, 1) or an epoch of no steps, TypeError for what is no number.
    """

    def __init__(self, sparsities: Sequence[float], steps_per_epoch: int):
        self.sparsities = tuple(check_float("warmup", s, most=BELOW_ONE) for s in sparsities)
        if not self.sparsities:
            raise ValueError("warmup must be a sparsity per epoch, at least one, got none")
        self.steps_per_epoch = check_int("steps_per_epoch", steps_per_epoch, least=1)

    def __call__(self, k: int) -> float:
        """Return the sparsity of update k."""
        return self.sparsities[min(k // self.steps_per_epoch, len(self.sparsities) - 1)]

    def __repr__(self) -> str:
        return f"Stages({list(self.sparsities)}, {self.steps_per_epoch})"


def geometric(density: float, epochs: int, steps_per_epoch: int) -> Stages:
    """Make ``epochs`` stages whose densities fall by the same factor each, down to ``density`` after them.

    The paper's 25 %, 6.25 %, 1.5625 %, 0.4 %, 0.1 % (section 3.3) is four epochs of it, to rounding.
    """
    stages = check_int("warmup", epochs, least=1) + 1
    return Stages([1 - density ** (k / stages) for k in range(1, stages)] + [1 - density], steps_per_epoch)
