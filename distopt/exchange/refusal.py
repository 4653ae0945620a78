"""What of a step is not finite: found by the host before the step goes on, or on a GPU while the host goes on."""

import math
from collections.abc import Iterable

import numpy as np

from distopt import kernels
from distopt.buckets import Buffers, Sum
from distopt.comm import Communicator
from distopt.device import Readback


class Blind:
    """Nobody looks."""

    number: np.ndarray | None = None  # that kernels look at; they change nothing that outlives the step if it is not 0
    later = False  # does the host learn later what was found?
    pending = False  # is there something that it has not asked for?
    headroom = 1.0  # what a gradient is multiplied by before it is looked at
    doubted = False  # do all ranks look at the sums of this step?

    def in_gradients(self) -> str:
        """This rank's packed gradients that are not finite, for the vote; '' if all are."""
        return ""

    @property
    def doubts(self) -> bool:
        """May finite gradients of this rank have a sum that is not finite, for all that it knows?"""
        return False

    def agree(self, doubted: bool, stateful: bool) -> None:
        """All ranks go on with their packed gradients; do some of them doubt, and is what outlives the step changed?"""

    def in_sums(self, sums: Iterable[Sum], may_overflow: bool) -> str:
        """What of the sums over ranks is not finite, of which all ranks have the same bits; '' if all is.

        If something is not, what outlives the step is as it was.
        """
        return ""

    def passed(self) -> None:
        """The sums of a step, or of a window of calls, are applied."""

    def start_again(self) -> None:
        """What outlives a step has come from elsewhere."""

    def send(self) -> None:
        """Nothing more is looked at: let the host have what was found."""

    def expect(self) -> None:
        """A captured step has sent it."""

    def outcome(self) -> int:
        """How many entries of the last step, of all ranks, were not finite, when that is known."""
        return 0


class Seen(Blind):
    """The host sees what kernels have counted when they return.

    A sum of ``gradients`` finite ones is looked at where it may overflow.  In the first step nobody knows; afterwards
    it may if a gradient is above 1 / ``headroom`` of the largest number.  What is left behind grows with every step, by
    no more than the sum of those before, so that after a look at it so many steps need none.
    """

    STEPS = 1 << 16
    SPARE = 2.0**40  # above the square of STEPS, for a velocity that never decays: so a residual grows at most
    LEFT = 2.0**20  # above STEPS: what a residual, or a velocity, leaves of the range when it is not in doubt

    def __init__(self, buffers: Buffers, gradients: int):
        self._buffers = buffers
        self._sums = 2.0 ** math.ceil(math.log2(gradients))
        self.headroom = self._sums * self.SPARE
        self.doubted = self._left_much = True
        self._steps = 0
        self._copies: list[dict[str, np.ndarray]] | None = None

    def in_gradients(self) -> str:
        """By parameter."""
        return self._buffers.nonfinite()

    @property
    def doubts(self) -> bool:
        """Is a gradient, or what was left behind, too large to be sure?"""
        return self._left_much or self._steps >= self.STEPS or any(b.near_overflow for b in self._buffers)

    def agree(self, doubted: bool, stateful: bool) -> None:
        """If it is in doubt, keep a copy of what outlives the step."""
        self.doubted |= doubted
        self._copies = self._buffers.copied_states() if self.doubted and stateful else None

    def in_sums(self, sums: Iterable[Sum], may_overflow: bool) -> str:
        """How many entries, if they are in doubt or ``may_overflow`` whatever the gradients are."""
        if not (self.doubted or may_overflow):
            return ""
        count = np.zeros(1, np.int64)
        for total in sums:
            kernels.count_nonfinite(total[0].flat, count)
        if count[0] and self._copies is not None:
            self._buffers.put_back(self._copies)
        return f"the sum over ranks ({int(count[0])} entries)" if count[0] else ""

    def passed(self) -> None:
        """Doubts end with the step, unless much is left behind."""
        self._steps += 1
        if self.doubted:
            self._left_much = self._leaves_much()
            self._steps = 0
        self.doubted, self._copies = False, None

    def start_again(self) -> None:
        """Doubt the next step."""
        self._left_much = True

    def _leaves_much(self) -> bool:
        count = np.zeros(1, np.int64)
        for buffer in self._buffers:
            bound = np.array(buffer.largest / (self._sums * self.LEFT), buffer.bucket.dtype)
            for name, flat in buffer.state.items():
                if name != "window":  # which ends with the step
                    kernels.count_above(flat, count, int(bound.view(f"i{bound.itemsize}")))
        return bool(count[0])


class Refusal(Blind):
    """A number on the GPU, the same for all ranks, by which kernels refuse to change what outlives the step.

    So the host may have enqueued all of the step before anybody knows.  It learns the number when it asks for the
    ``outcome``, after the next step at the latest.
    """

    number: np.ndarray
    later = True

    def __init__(self, buffers: Buffers, wire: Communicator):
        self._wire, self._counts = wire.bare, buffers.bad
        self.number = buffers.bad[-1:]
        self._readback = Readback(1)

    def agree(self, doubted: bool, stateful: bool) -> None:
        """Sum up what was counted, over members and ranks."""
        with self._wire.aside():
            kernels.sum_counts(self._counts[:-1], self.number)
            self._wire.all_reduce(self.number)
        self._wire.wait()

    def in_sums(self, sums: Iterable[Sum], may_overflow: bool) -> str:
        """Count it too, whatever the gradients were, which the host does not know, and go on."""
        for total in sums:
            kernels.count_nonfinite(total[0].flat, self.number)
        return ""

    def send(self) -> None:
        """The number is on its way."""
        self._readback.fetch(self.number)

    def expect(self) -> None:
        """The number is on its way."""
        self._readback.expect()

    @property
    def pending(self) -> bool:  # type: ignore[override]
        """Was a number sent that nobody asked for?"""
        return self._readback.pending

    def outcome(self) -> int:
        """The number, when it is there.  Raises RuntimeError if the communicator fails meanwhile."""
        with self._wire.control.waits("the GPU's outcome"):
            return int(self._readback.result(self._wire.check)[0])
