"""A few numbers that host and GPU tell each other, and nobody waits: a mirror goes there, a readback comes back."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from distopt.device import pinned, streams
from distopt.device.arrays import address
from distopt.device.copies import DEVICE_TO_HOST, copy
from distopt.device.gpus import cupy, current_gpu
from distopt.device.streams import current_stream


class Mirror:
    """A small host array, and its copies on a GPU, which follow when a kernel asks for one and the array has changed.

    Each stream has a copy of its own: what one writes to it, no other one may still want to read.
    """

    def __init__(self, host: np.ndarray):
        self.host = host
        self._raw = host.reshape(-1).view(np.uint8)
        self._copies: dict[tuple[int, int], tuple[Any, np.ndarray]] = {}  # by stream, and what is in them

    @property
    def size(self) -> int:
        """Elements."""
        return self.host.size

    def address(self, gpu: int | None) -> int:
        """Where the numbers are, on the host or on the current GPU."""
        if gpu is None:
            return int(self.host.ctypes.data)
        stream = gpu, current_stream().ptr
        there, sent = self._copies.get(stream, (None, None))
        if sent is None or not np.array_equal(self._raw, sent):
            there = cupy().empty(self._raw.size, np.uint8) if there is None else there
            copy(there, self._raw)
            self._copies[stream] = there, self._raw.copy()
        return address(there)


class Readback:
    """A few int64 numbers on their way from a GPU to the host, which looks at them later."""

    def __init__(self, n: int):
        self._pinned, self._n = pinned.pool.take(8 * n), n
        weakref.finalize(self, pinned.pool.give, self._pinned, current_gpu()).atexit = False
        self.pending = False

    def fetch(self, x: Any) -> None:
        """Enqueue a copy of x, which has ``n`` elements."""
        stream, to = current_stream(), self._pinned.bytes.ctypes.data
        cupy().cuda.runtime.memcpyAsync(to, x.data.ptr, x.nbytes, DEVICE_TO_HOST, stream.ptr)
        if not stream.is_capturing():  # a captured copy is not on its way
            self.expect()

    def expect(self) -> None:
        """A copy was enqueued."""
        self._pinned.event.record(current_stream())
        self.pending = True

    def result(self, look: Callable[[], None] = lambda: None) -> np.ndarray:
        """What was fetched, when it is there; ``look`` is called meanwhile, and may raise."""
        streams.wait(self._pinned.event, look)
        self.pending = False
        return self._pinned.bytes[: 8 * self._n].view(np.int64).copy()
