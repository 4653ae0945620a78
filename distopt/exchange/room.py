"""How much of what depends on the data is sent: on a GPU a number that all ranks knew before."""

from collections.abc import Callable, Sequence

import numpy as np

from distopt import device
from distopt.buckets import Buffers
from distopt.comm import Communicator
from distopt.device import Readback

Count = Callable[[np.ndarray, np.ndarray], None]

FIRST = 64  # one of so many entries has room in the first step
LEAST = 256  # entries that always have room


class Rooms:
    """Entries per bucket, the same on every rank: twice what the rank with most wanted to send in the last step.

    The host learns that number one step late, so it need not wait; what there is no room for stays behind.  Where
    nothing may stay behind, entries are counted first, and the host waits once for the counts of all buckets.
    """

    def __init__(self, buffers: Buffers, wire: Communicator):
        self._wire, self._sizes = wire.bare, [b.bucket.size for b in buffers]
        count = len(self._sizes)
        self._found = device.gpu_zeros(count, np.int64)
        self._everyone = device.gpu_zeros(count * wire.size, np.int64)
        self._readback = Readback(count * wire.size)
        self._rooms = [min(n, n // FIRST + LEAST) for n in self._sizes]

    def __getitem__(self, number: int) -> int:
        """Of a bucket."""
        return self._rooms[number]

    def found(self, number: int) -> np.ndarray:
        """Where a kernel tells how many entries of a bucket it would have liked to send."""
        found: np.ndarray = self._found[number : number + 1]
        return found

    def send(self) -> None:
        """All buckets' entries have been counted: let all hosts have all ranks' counts."""
        with self._wire.aside():
            self._wire.all_gather(self._found, into=self._everyone)
            self._readback.fetch(self._everyone)

    def learn(self, spare: int = 2, count: bool = True) -> None:
        """Make room for ``spare`` times the counts that were sent last, if any were, and if they ``count``."""
        if self._readback.pending:
            with self._wire.control.waits("the GPU's counts"):
                counts = self._readback.result(self._wire.check)
            most = counts.reshape(self._wire.size, -1).max(axis=0).tolist()
            if count:
                self._rooms = [min(n, max(LEAST, spare * m)) for n, m in zip(self._sizes, most, strict=True)]

    def count(self, arrays: Sequence[np.ndarray], count: Count) -> None:
        """Make room for exactly what is wanted of these arrays, one per bucket."""
        with self._wire.aside():
            device.clear(self._found)
            for number, x in enumerate(arrays):
                count(x, self.found(number))
        self.send()
        self.learn(spare=1)

    def state(self) -> list[int]:
        """What a resumed run needs to go on as if it had not been stopped."""
        self.learn()
        return list(self._rooms)

    def restore(self, rooms: Sequence[int]) -> None:
        """Go on from there, if the plan is the same."""
        if len(rooms) == len(self._rooms):
            self._rooms = [min(n, max(LEAST, room)) for n, room in zip(self._sizes, rooms, strict=True)]
