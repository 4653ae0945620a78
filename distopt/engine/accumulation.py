"""Gradient accumulation: several calls make one step."""

import operator
from collections.abc import Callable, Iterator

import numpy as np

from distopt import kernels
from distopt.buckets import Reduced
from distopt.compress.state import WINDOW
from distopt.engine.bucket_store import BucketStore

# Reduces a flat array per bucket.
Reduce = Callable[[list[np.ndarray]], Iterator[Reduced]]


class GradientAccumulator:
    """Sum the gradients of ``num_batches`` calls, of which the last one makes a step."""

    # With `sync_on_apply` the sum is reduced over ranks at the last call, else each call's gradients are.  The sum so
    # far is a state of the buckets, so that it survives a change of plan, and a checkpoint.

    # The attributes that a step replaces (``Undo.keep_fields``).
    CHANGES = "batches", "num_gradients", "reduced", "brought", "expected", "joined", "missing"

    def __init__(self, num_batches: int, sync_on_apply: bool):
        self.num_batches, self.sync_on_apply = num_batches, sync_on_apply
        # Exchanges in a step.
        self.exchanges = 1 if sync_on_apply else num_batches
        # Every call's gradients are reduced before they are added.
        self.holds_sums = self.exchanges > 1
        # Calls since the last step.
        self.batches = 0
        # Gradients in the sum, of all ranks, the present call's included.
        self.num_gradients = 0.0
        # Are they sums over ranks?  None if that is not known.
        self.reduced: bool | None = None
        # How many ranks have brought gradients to what is reduced next.
        self.brought = 0
        # Gradients in the sum once later calls, if sums over ranks are added, have brought as many as this one.
        self.expected = 0.0
        # The ranks that bring none to the present call.
        self.joined: frozenset[int] = frozenset()
        # The parameters that none of them is of, as ``GradientCollector.missing``.
        self.missing = 0

    @property
    def closes(self) -> bool:
        """Whether the next call is the last one of a step."""
        return self.batches + 1 == self.num_batches

    def check(self, reduced: bool) -> None:
        """Raise ValueError for a call whose gradients cannot be added to those of the calls since the last step."""
        if not self.sync_on_apply and self.reduced is not None and reduced != self.reduced:
            first, now = (("partial", "whole")[kind] for kind in (self.reduced, reduced))
            raise ValueError(
                f"sync_on_apply=False: the {self.num_batches} calls of a step must be of one kind, got a {now} one "
                f"after a {first} one: change between steps, or use sync_on_apply=True"
            )

    def meet(self, ranks: int, joined: frozenset[int]) -> None:
        """Learn how many ranks bring gradients to the present call, and which have joined."""
        goes_on = self.batches and not self.holds_sums
        self.brought, self.joined = max(ranks, self.brought) if goes_on else ranks, joined

    def open(self, gradients: int, reduced: bool) -> None:
        """Begin a call, which brings so many gradients."""
        self.num_gradients += gradients
        self.reduced = reduced
        later = self.num_batches - self.batches - 1 if self.holds_sums else 0
        self.expected = self.num_gradients + later * gradients

    def bound(self, ranks: int) -> None:
        """Count no gradients of ranks that were lost, whose windows nobody has; those in sums over ranks stay."""
        if self.sync_on_apply:
            self.num_gradients = min(self.num_gradients, float(self.batches * ranks))
            self.brought = min(self.brought, ranks)

    def add(self, store: BucketStore, reduce: Reduce) -> Iterator[Reduced] | None:
        """Add a call's gradients to the sum; return the sums over ranks at the last call, else None."""
        # On a GPU the sum stays as it is if the number at the skip flag is not 0.
        gradients, skip_flag = list(map(operator.attrgetter("gradient"), store.buckets)), store.skip_flag
        if self.num_batches == 1:
            return reduce(gradients)
        self.batches += 1
        closes = self.batches == self.num_batches
        for bucket in store.all_buckets:
            total = bucket.state_array(WINDOW)
            if closes:
                # The sum itself stays as it is until the step has been applied.
                kernels.accumulate(total, bucket.gradient)
            else:
                kernels.accumulate(bucket.gradient, total, skip_flag)
        return reduce(gradients) if closes else None

    def reset(self, store: BucketStore, skip_flag: np.ndarray | None = None) -> None:
        """Begin the next step."""
        self.num_gradients = 0.0
        if self.num_batches > 1:
            self.batches = 0
            for bucket in store.all_buckets:
                kernels.clear(bucket.state_array(WINDOW), skip_flag)
