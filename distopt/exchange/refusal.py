"""What of a step is not finite: found by the host before the step goes on, or on a GPU while the host goes on."""

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

    def in_gradients(self) -> str:
        """This rank's packed gradients that are not finite, for the vote; '' if all are."""
        return ""

    def agree(self) -> None:
        """All ranks go on with their packed gradients."""

    def in_sums(self, sums: Iterable[Sum]) -> str:
        """What of the sums over ranks is not finite, of which all ranks have the same bits; '' if all is."""
        return ""

    def send(self) -> None:
        """Nothing more is looked at: let the host have what was found."""

    def expect(self) -> None:
        """A captured step has sent it."""

    def outcome(self) -> int:
        """How many entries of the last step, of all ranks, were not finite, when that is known."""
        return 0


class Seen(Blind):
    """The host sees what kernels have counted when they return."""

    def __init__(self, buffers: Buffers):
        self._buffers = buffers

    def in_gradients(self) -> str:
        """By parameter."""
        return self._buffers.nonfinite()

    def in_sums(self, sums: Iterable[Sum]) -> str:
        """How many entries."""
        count = np.zeros(1, np.int64)
        for total in sums:
            kernels.count_nonfinite(total[0].flat, count)
        return f"the sum over ranks ({int(count[0])} entries)" if count[0] else ""


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

    def agree(self) -> None:
        """Sum up what was counted, over members and ranks."""
        with self._wire.aside():
            kernels.sum_counts(self._counts[:-1], self.number)
            self._wire.all_reduce(self.number)
        self._wire.wait()

    def in_sums(self, sums: Iterable[Sum]) -> str:
        """Count it too, and go on."""
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
