"""Learning rates per layer, from the norms of whole parameters."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distopt import device, kernels
from distopt.numbers import number
from distopt.optim.exclude import Exclude, described, left_out, predicate
from distopt.optim.optimizer import Kept, Optimizer, Part, Together
from distopt.optim.schedules import Number
from distopt.tables import Members

Measure = Callable[[Members, np.ndarray, np.ndarray], None]  # of a part, its gradients: a chunk's sums, in the last one


class Layerwise(Optimizer):
    """What rules have in common that need norms: sums of squares by chunk, folded in a fixed order (native/reduce.cu).

    So the norms, and with them the parameters, are the same bits on host and GPU, however tensors share buckets and
    ranks share chunks.  Parameters that ``exclude`` names take no part: their layer-wise rate is 1.  It is a predicate
    on the name, or a list of suffixes.

    A subclass says in ``kinds`` how many sums it needs of a tensor at a time, and calls ``_measured`` in its
    ``_update_all``.
    """

    kinds: int
    planned = ("exclude", "left_out")
    options = (*Optimizer.options, *planned)

    def __init__(self, lr: Number, weight_decay: Number, exclude: Exclude, **options: Any):
        self._excluded = predicate(exclude)
        self.exclude = described(self._excluded)
        self.left_out: tuple[str, ...] = ()  # of the parameters so far
        super().__init__(lr, weight_decay, **options)

    def check(self, members: Members) -> None:
        """As for all; and ``exclude`` is asked, before anything moves, so that ranks can agree on what it says."""
        super().check(members)
        self.left_out = left_out(self.left_out, members.names, self._excluded)

    def _scratch(self, members: Members, like: np.ndarray) -> dict[str, np.ndarray]:
        out = set(self.left_out)
        members.rows["adapts"] = [name not in out for name in members.names]
        rows = len(members.names)
        sizes = {"chunks": self.kinds * max(rows, members.chunks), "sums": self.kinds * rows, "squares": rows}
        found = {name: device.lasting_zeros(n, np.float64, like) for name, n in sizes.items()}
        return super()._scratch(members, like) | found

    def _widen(self, parts: Sequence[Part], refused: np.ndarray | None) -> None:
        """Norms of 16-bit parameters are those of what they are worked on as."""
        for members, grad in parts:
            if members.narrow:
                kernels.widen(members, grad, refused)

    def _measured(
        self, kept: Kept, parts: Sequence[Part], measure: Measure, name: str, kinds: int, together: Together | None
    ) -> np.ndarray:
        """``kinds`` sums for each tensor, from what ``measure`` finds of each chunk; in the scratch of that name."""
        chunks, sums = kept.scratch["chunks"], kept.scratch[name]
        if together:
            chunks[:] = 0
        for members, grad in parts:
            measure(members, grad, chunks)
        if together:
            together(chunks)
        kernels.fold_partials(kept.members, chunks, sums, kinds)
        return sums


def bounds(lower: float | None, upper: float | None) -> dict[str, float]:
    """Bounds of a norm, 0 for none; TypeError for no number, ValueError for NaN or a lower one above the upper."""
    given = {"lower": lower, "upper": upper}
    found = {n: 0.0 if b is None else number(f"{n}_bound", b, least=-math.inf) for n, b in given.items()}
    if 0 < found["upper"] < found["lower"]:
        raise ValueError(f"lower_bound must be at most upper_bound, got {lower} and {upper}")
    return found
