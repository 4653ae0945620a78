"""Base classes of optimizers whose learning rates depend on the norms of whole parameters."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distopt import device, kernels
from distopt.checks import check_float
from distopt.kernels.layout import BucketLayout
from distopt.optim.adam import MOMENTS, moments
from distopt.optim.exclude import Exclude, described, left_out, predicate
from distopt.optim.optimizer import Optimizer, Part, SumOverRanks, TableState
from distopt.optim.schedules import Number

# It writes the sums of a part's chunks into its last argument.
Measure = Callable[[BucketLayout, np.ndarray, np.ndarray], None]


class Layerwise(Optimizer):
    """A base class of layer-wise optimizers, whose subclasses call ``sums_over_tensors`` in their ``update_parts``."""

    # Sums of squares are taken by chunk and folded in a fixed order.  So the norms, and with them the parameters, are
    # the same bits on host and GPU, however tensors share buckets and ranks share chunks (native/reduce.cu).

    # the sums that a subclass needs of a tensor at a time
    kinds: int
    planned = ("exclude", "left_out")
    options = (*Optimizer.options, *planned)

    def __init__(self, lr: Number, weight_decay: Number, exclude: Exclude, **options: Any):
        self._excluded = predicate(exclude)
        self.exclude = described(self._excluded)
        self.left_out: tuple[str, ...] = ()
        super().__init__(lr, weight_decay, **options)

    def check(self, members: BucketLayout) -> None:
        """Check that loaded states fit these parameters, and ask ``exclude`` about their names.

        Both happen before anything moves, so that ranks can agree on the answers, which are in ``left_out``.
        """
        super().check(members)
        self.left_out = left_out(self.left_out, members.names, self._excluded)

    def allocate_scratch(self, members: BucketLayout, like: np.ndarray) -> dict[str, np.ndarray]:
        out = set(self.left_out)
        members.records["adapts"] = [name not in out for name in members.names]
        tensors = len(members.names)
        sizes = {"chunks": self.kinds * max(tensors, members.chunks), "sums": self.kinds * tensors, "squares": tensors}
        scratch = {name: device.persistent_zeros(n, np.float64, like) for name, n in sizes.items()}
        return super().allocate_scratch(members, like) | scratch

    def widen(self, parts: Sequence[Part], skip_flag: np.ndarray | None) -> None:
        """Convert 16-bit parameters to the float32 values that they are updated in, whose norms count."""
        for members, grad in parts:
            if members.narrow:
                kernels.widen(members, grad, skip_flag)

    def sums_over_tensors(
        self,
        table_state: TableState,
        parts: Sequence[Part],
        measure: Measure,
        name: str,
        kinds: int,
        sum_over_ranks: SumOverRanks | None,
    ) -> np.ndarray:
        """Return sums over each tensor, float64 of shape ``(kinds * tensors,)``, in the scratch array of a name.

        Args:
            table_state: the table's slots and scratch.
            parts: shards of the table, with their gradients.
            measure: writes the sums of each chunk of a part into its last argument, float64.
            name: the scratch array for the result.
            kinds: the number of sums for each tensor.
            sum_over_ranks: adds up the chunks' sums over ranks, where each has a shard; or None.
        """
        chunks, sums = table_state.scratch["chunks"], table_state.scratch[name]
        if sum_over_ranks:
            chunks[:] = 0
        for members, grad in parts:
            measure(members, grad, chunks)
        if sum_over_ranks:
            sum_over_ranks(chunks)
        kernels.fold_partials(table_state.members, chunks, sums, kinds)
        return sums


class LayerwiseAdam(Layerwise):
    """A base class of optimizers that scale Adam's direction by ratios of norms; ``LANS`` describes the arguments."""

    slots = ("m", "v")
    options = (*Layerwise.options, "bounds")
    hypers = Optimizer.hypers | MOMENTS

    def __init__(
        self,
        lr: Number = 0.001,
        beta_1: Number = 0.9,
        beta_2: Number = 0.999,
        epsilon: Number = 1e-6,
        weight_decay: Number = 0.0,
        lower_bound: float | None = None,
        upper_bound: float | None = None,
        exclude: Exclude = (),
        **options: Any,
    ):
        super().__init__(lr, weight_decay, exclude, **options)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        # of |w|, as the kernel's `lower` and `upper`; 0 for none
        self.bounds = {
            name: 0.0 if bound is None else check_float(f"{name}_bound", bound, least=-math.inf)
            for name, bound in (("lower", lower_bound), ("upper", upper_bound))
        }
        if 0 < self.bounds["upper"] < self.bounds["lower"]:
            raise ValueError(f"lower_bound must be at most upper_bound, got {lower_bound} and {upper_bound}")

    def rule_numbers(self) -> dict[str, float]:
        return moments(self.at, self.step_counter + 1) | self.bounds
