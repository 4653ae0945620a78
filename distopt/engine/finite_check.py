"""Find what is not finite in a step: by the host before the step goes on, or by the GPU while the host goes on."""

import itertools
import math
import operator
from collections.abc import Iterable, Sequence

import numpy as np

from distopt import kernels
from distopt.buckets import BucketSet, Reduced
from distopt.comm import Communicator
from distopt.compress.state import OWN
from distopt.device import AsyncReadback
from distopt.engine.undo import Undo


class NoCheck:
    """Check nothing: infinities and NaNs propagate.  The base of the other checks."""

    # An int64 on the GPU, shape (1,): if it is not 0, kernels change nothing that outlives the step (the found_inf of
    # mixed-precision training).
    skip_flag: np.ndarray | None = None
    # The host learns the outcome after it has enqueued the step.
    deferred = False
    # There is an outcome that the host has not asked for.
    pending = False
    # A gradient is multiplied by it before it is checked.
    headroom = 1.0
    # All ranks check the sums of the present step.
    doubted = False

    def nonfinite_gradients(self) -> list[dict[str, str]]:
        """Name packed gradients that are not finite, of each rank here (``BucketSet.nonfinite``); [] if all are."""
        return []

    @property
    def doubts(self) -> bool:
        """Whether finite gradients of this rank may have a sum that is not finite."""
        return False

    def begin(self, doubted: bool, stateful: bool, undo: Undo | None) -> None:
        """Prepare for the reduction of packed gradients; ``doubted``: on some rank their sums may not be finite."""
        # stateful: the compressor changes what outlives the step; undo: it has done so, and this puts it back.

    def nonfinite_sums(self, sums: Iterable[Reduced], may_overflow: bool) -> str:
        """Describe what is not finite in sums over ranks; '' if all is.  All ranks have the same bits, and text."""
        # If something is not finite, what outlives the step is put back as it was.
        return ""

    def passed(self) -> None:
        """Note that the sums of a step, or of several calls, are going to be applied."""

    def reset(self) -> None:
        """Note that a checkpoint has replaced what outlives a step."""

    def fetch(self) -> None:
        """Begin to copy the skip flag to the host."""

    def expect(self) -> None:
        """Expect the skip flag on the host, to which a captured step copies it."""

    def discard(self) -> None:
        """Forget the outcome of a call that is made again."""

    def outcome(self) -> int:
        """Wait for the number of entries of the last step, of all ranks, that were not finite."""
        return 0


class HostCheck(NoCheck):
    """Read what the kernels have counted when they return."""

    # A sum of `gradients` finite ones is checked where it may overflow.  In the first step that is not known;
    # afterwards it may if a gradient is above 1 / `headroom` of the largest number.  A residual grows with every step,
    # by no more than the sum of those before, so that after a check of it so many steps need none.

    STEPS = 1 << 16
    # What a residual grows by at most: above the square of STEPS, for a velocity that never decays.
    SPARE = 2.0**40
    # Above STEPS: what a residual, or a velocity, leaves of the range when it is not in doubt.
    LEFT = 2.0**20

    def __init__(self, of_ranks: Sequence[BucketSet], gradients: int):
        # of_ranks: the buckets of the ranks that live here.
        self._of_ranks, self._buckets = of_ranks, list(itertools.chain.from_iterable(of_ranks))
        self._sums = 2.0 ** math.ceil(math.log2(gradients))
        self.headroom = self._sums * self.SPARE
        self.doubted = self._large_states = True
        self._steps = 0
        # What outlives the step, while its sums are in doubt.
        self._undo: Undo | None = None

    def nonfinite_gradients(self) -> list[dict[str, str]]:
        for buckets in self._of_ranks:
            if buckets.bad.nonzero()[0].size:
                return [of_rank.nonfinite() for of_rank in self._of_ranks]
        return []

    @property
    def doubts(self) -> bool:
        """Whether a gradient, or a residual, is so large that a sum of it may overflow."""
        return (
            self._large_states
            or self._steps >= self.STEPS
            or any(map(operator.attrgetter("near_overflow"), self._buckets))
        )

    def begin(self, doubted: bool, stateful: bool, undo: Undo | None) -> None:
        """Keep a copy of what outlives the step, if the sums are in doubt."""
        self.doubted |= doubted
        self._undo = undo if self.doubted else None
        if self.doubted and stateful and undo is None:
            self._undo = Undo()
            for bucket in self._buckets:
                self._undo.keep_state(bucket.state)

    def nonfinite_sums(self, sums: Iterable[Reduced], may_overflow: bool) -> str:
        """Count entries, if the sums are in doubt or ``may_overflow`` whatever the gradients are."""
        if not (self.doubted or may_overflow):
            return ""
        count = np.zeros(1, np.int64)
        for total in sums:
            kernels.count_nonfinite(total[0].flat, count)
        if count[0] and self._undo:
            self._undo.undo()
        return f"the sum over ranks ({int(count[0])} entries)" if count[0] else ""

    def passed(self) -> None:
        """End the doubts, unless a residual is large."""
        self._steps += 1
        if self.doubted:
            self._steps, count = 0, np.zeros(1, np.int64)
            for bucket in self._buckets:
                bound = np.array(bucket.largest / (self._sums * self.LEFT), bucket.spec.dtype)
                for name, flat in bucket.state.items():
                    # Gradients that were accumulated end with the step.
                    if name not in OWN:
                        kernels.count_above(flat, count, int(bound.view(f"i{bound.itemsize}")))
            self._large_states = bool(count[0])
        self.doubted, self._undo = False, None

    def reset(self) -> None:
        self._large_states = True


class DeviceFlag(NoCheck):
    """A flag by which kernels on the GPU skip a step, the same on all ranks, while the host goes on."""

    # The host asks for the `outcome` after the next step at the latest.

    skip_flag: np.ndarray
    deferred = True

    def __init__(self, buckets: BucketSet, comm: Communicator):
        self._comm, self._buckets, self._counts = comm.unwrapped, buckets, buckets.bad
        self.skip_flag = buckets.bad[-1:]
        self._readback = AsyncReadback(1)

    def begin(self, doubted: bool, stateful: bool, undo: Undo | None) -> None:
        """Sum the counts over members and ranks."""
        with self._comm.on_comm_stream():
            kernels.sum_counts(self._counts[:-1], self.skip_flag)
            self._comm.all_reduce(self.skip_flag)
        self._comm.wait()

    def nonfinite_sums(self, sums: Iterable[Reduced], may_overflow: bool) -> str:
        """Add what is not finite in the sums to the skip flag, on the GPU; the host knows nothing yet."""
        for total in self._buckets.grouped(sums)[1]:
            kernels.count_nonfinite(total[0].flat, self.skip_flag)
        return ""

    def fetch(self) -> None:
        self._readback.fetch(self.skip_flag)

    def expect(self) -> None:
        self._readback.expect()

    def discard(self) -> None:
        self._readback.discard()

    @property
    def pending(self) -> bool:  # type: ignore[override]
        """Whether there is an outcome that the host has not asked for."""
        return self._readback.pending

    def outcome(self) -> int:
        """Wait for the number of entries that were not finite; RuntimeError if the communicator fails meanwhile."""
        with self._comm.control.waits("the GPU's outcome"):
            return int(self._readback.result(self._comm.check)[0])
