"""Several calls that make one step: gradients are added up, and exchanged once."""

from collections.abc import Callable, Iterator

import numpy as np

from distopt import kernels
from distopt.buckets import Buffers, Sum

Exchange = Callable[[list[np.ndarray]], Iterator[Sum]]  # of an array per bucket


class Window:
    """``num_batches`` calls to a step; with ``sync_on_apply`` their sum is exchanged at the last one, else each call's.

    The sums so far live beside the buckets as the state 'window', so that they survive a change of plan.
    """

    def __init__(self, num_batches: int, sync_on_apply: bool):
        self.num_batches, self.sync_on_apply = num_batches, sync_on_apply
        self.batches = 0  # calls since the last step
        self.contributions = 0.0  # of ranks, in these and the present call
        self.sent: bool | None = None  # are the gradients of these calls sums over ranks?  None: not known

    @property
    def exchanges(self) -> int:
        """Of a step."""
        return 1 if self.sync_on_apply else self.num_batches

    def check(self, sent: bool) -> None:
        """ValueError for a call whose gradients cannot be added to those of the calls since the last step."""
        if self.batches and not self.sync_on_apply and self.sent is not None and sent != self.sent:
            first, now = (("partial", "whole")[kind] for kind in (self.sent, sent))
            raise ValueError(
                f"sync_on_apply=False: the {self.num_batches} calls of a step must be of one kind, got a {now} one "
                f"behind a {first} one: change between steps, or use sync_on_apply=True"
            )

    def add(self, buffers: Buffers, exchange: Exchange, refused: np.ndarray | None = None) -> Iterator[Sum] | None:
        """Take in this call's gradients, or their sum over ranks, unless ``refused`` (compress.At).

        Returns per bucket the sum over ranks and over the window, each exchanged when it is asked for, or None as long
        as the window is open.
        """
        gradients = [b.gradient for b in buffers]
        if self.num_batches == 1:
            return exchange(gradients)
        self.batches += 1
        closes = self.batches == self.num_batches
        for buffer in buffers:
            window = buffer.kept("window")
            if closes:  # the window itself stays as it is until the step has been applied
                kernels.accumulate(window, buffer.gradient)
            else:
                kernels.accumulate(buffer.gradient, window, refused)
        if not closes:
            return None
        return exchange(gradients)

    def start(self, buffers: Buffers, refused: np.ndarray | None = None) -> None:
        """The step has been applied: begin the next window."""
        self.contributions = 0.0
        if self.num_batches > 1:
            self.batches = 0
            for buffer in buffers:
                kernels.clear(buffer.kept("window"), refused)
