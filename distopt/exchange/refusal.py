"""What is not finite, found and agreed on without the host: a number on the GPU that kernels look at."""

import numpy as np

from distopt import kernels
from distopt.buckets import Buffers
from distopt.comm import Communicator
from distopt.device import Readback


class Refusal:
    """The number of entries, of all ranks, that are not finite in this step.

    Kernels that change what outlives the step do nothing while it is not 0, so the host may have enqueued all of the
    step before anybody knows.  It learns the number when it asks for the ``outcome``, after the next step at the
    latest.
    """

    def __init__(self, buffers: Buffers, wire: Communicator):
        self._wire, self._counts = wire.bare, buffers.bad
        self.number = buffers.bad[-1:]
        self._readback = Readback(1)

    def agree(self) -> None:
        """All gradients have been packed: sum up what was counted, over members and ranks."""
        with self._wire.aside():
            kernels.sum_counts(self._counts[:-1], self.number)
            self._wire.all_reduce(self.number)
        self._wire.wait()

    def look_at(self, total: np.ndarray) -> None:
        """Count what is not finite in a sum, too, of which all ranks have the same bits."""
        kernels.count_nonfinite(total, self.number)

    def send(self) -> None:
        """The number is final: let the host have it."""
        self._readback.fetch(self.number)

    def expect(self) -> None:
        """A captured step sends the number."""
        self._readback.expect()

    @property
    def pending(self) -> bool:
        """Was a number sent that nobody asked for?"""
        return self._readback.pending

    def outcome(self) -> int:
        """The number, when it is there.  Raises RuntimeError if the communicator fails meanwhile."""
        return int(self._readback.result(self._wire.check)[0])
