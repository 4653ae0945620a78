"""The capacity of payloads whose length depends on the data: on a GPU a number that all ranks know before."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from distopt import device
from distopt.buckets import BucketSet
from distopt.comm import Communicator
from distopt.compress import Compressor
from distopt.compress.base import count_selected
from distopt.device import AsyncReadback

Count = Callable[[np.ndarray, np.ndarray], None]

# One of so many entries fits in the first step.
FIRST = 64
# Entries that always fit.
LEAST = 256


class PayloadCapacity:
    """Entries per bucket, the same on every rank: twice what the rank with most wanted to send in the last step."""

    # The host learns that number one step late, so it need not wait; what does not fit stays in the residual.  Without
    # a residual entries are counted first, and the host waits once for the counts of all buckets.

    def __init__(self, buckets: BucketSet, comm: Communicator):
        self._comm, self._sizes = comm.unwrapped, [b.spec.size for b in buckets]
        count = len(self._sizes)
        self._wanted = device.gpu_zeros(count, np.int64)
        self._of_all_ranks = device.gpu_zeros(count * comm.size, np.int64)
        self._readback = AsyncReadback(count * comm.size)
        self._entries = [min(n, n // FIRST + LEAST) for n in self._sizes]

    def __getitem__(self, number: int) -> int:
        """Entries of a bucket."""
        return self._entries[number]

    def wanted(self, number: int) -> np.ndarray:
        """The int64, shape (1,), to which a kernel writes how many entries of a bucket it wanted to send."""
        place: np.ndarray = self._wanted[number : number + 1]
        return place

    def send(self) -> None:
        """Gather the counts of all ranks, once all buckets' entries have been counted."""
        with self._comm.on_comm_stream():
            self._comm.all_gather(self._wanted, into=self._of_all_ranks)
            self._readback.fetch(self._of_all_ranks)

    def poll(self, spare: int = 2, count: bool = True) -> None:
        """Take ``spare`` times the counts that were sent last, if any were, and if they ``count``."""
        if self._readback.pending:
            with self._comm.control.waits("the GPU's counts"):
                counts = self._readback.result(self._comm.check)
            wanted = counts.reshape(self._comm.size, -1).max(axis=0).tolist()
            if count:
                self._entries = [min(n, max(LEAST, spare * m)) for n, m in zip(self._sizes, wanted, strict=True)]

    def discard(self) -> None:
        """Forget the counts of a step that is made again."""
        self._readback.discard()

    def count(self, arrays: Sequence[np.ndarray], count: Count) -> None:
        """Take exactly what is wanted of these arrays, one per bucket.  Collective; the host waits."""
        with self._comm.on_comm_stream():
            device.clear(self._wanted)
            for number, x in enumerate(arrays):
                count(x, self.wanted(number))
        self.send()
        self.poll(spare=1)

    @contextlib.contextmanager
    def counted(self, compressor: Compressor, arrays: Sequence[np.ndarray]) -> Iterator[None]:
        """Exchange arrays, one per bucket: with their own counts, or with a residual for the next step.  Collective."""
        if not compressor.traits.stateful:
            self.count(arrays, functools.partial(count_selected, compressor))
        yield
        if compressor.traits.stateful:
            self.send()

    def state(self) -> list[int]:
        """Return the numbers that a resumed run needs."""
        self.poll()
        return list(self._entries)

    def restore(self, entries: Sequence[int]) -> None:
        """Take the numbers of a checkpoint, if the plan is the same."""
        if len(entries) == len(self._entries):
            self._entries = [min(n, max(LEAST, k)) for n, k in zip(self._sizes, entries, strict=True)]
