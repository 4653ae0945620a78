"""Small messages between host and GPU without a wait: a ``DeviceMirror`` uploads, an ``AsyncReadback`` downloads."""

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from distopt.device import copies, pinned, streams
from distopt.device.arrays import address
from distopt.device.gpus import cupy, current_gpu
from distopt.device.streams import current_stream

_thread = threading.local()


@contextlib.contextmanager
def mirrors_used() -> Iterator[dict["DeviceMirror", None]]:
    """Give the mirrors, each once, whose addresses on a GPU this thread asks for in this context."""
    outer, _thread.used = getattr(_thread, "used", None), dict[DeviceMirror, None]()
    try:
        yield _thread.used
    finally:
        _thread.used = outer


class DeviceMirror:
    """A small host array with copies on GPUs, which are updated when their address is asked for."""

    def __init__(self, host: np.ndarray):
        self.host, self.size = host, host.size
        self._on_host = address(host)
        self._raw = host.reshape(-1).view(np.uint8)
        # a copy, its address and what it has, by stream: none overwrites numbers that another one has still to read
        self._copies: dict[tuple[int, int], tuple[Any, int, bytes]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeviceMirror":
        """Copy the host array; the copy starts without copies on GPUs."""
        twin = copy.copy(self)
        DeviceMirror.__init__(twin, copy.deepcopy(self.host, memo))
        return twin

    def address(self, gpu: int | None) -> int:
        """Return the address of the numbers on the host (``gpu`` None), or of an up-to-date copy on the current GPU."""
        if gpu is None:
            return self._on_host
        if (used := getattr(_thread, "used", None)) is not None:
            used[self] = None
        stream, wanted = (gpu, current_stream().ptr), self._raw.tobytes()
        memory, pointer, sent = self._copies.get(stream, (None, 0, b""))
        if memory is None:
            memory = cupy().empty(self._raw.size, np.uint8)
            pointer = address(memory)
        elif wanted == sent:
            # Bytes compare in a tenth of the time of arrays.
            return pointer
        copies.copy(memory, self._raw)
        self._copies[stream] = memory, pointer, wanted
        return pointer


class AsyncReadback:
    """A few int64 numbers on their way from a GPU to the host, which reads them later."""

    def __init__(self, n: int):
        self._pinned, self._n = pinned.pool.acquire(8 * n), n
        weakref.finalize(self, pinned.pool.release, self._pinned, current_gpu()).atexit = False
        # whether a copy is enqueued whose result was not read yet
        self.pending = False

    def fetch(self, x: Any) -> None:
        """Enqueue a copy of an int64 array of ``n`` elements on the current GPU."""
        stream, to = current_stream(), self._pinned.bytes.ctypes.data
        cupy().cuda.runtime.memcpyAsync(to, x.data.ptr, x.nbytes, copies.DEVICE_TO_HOST, stream.ptr)
        # A captured copy is not on its way.
        if not stream.is_capturing():
            self.expect()

    def expect(self) -> None:
        """Note that a copy was enqueued, by ``fetch`` or by the replay of a graph."""
        self._pinned.event.record(current_stream())
        self.pending = True

    def discard(self) -> None:
        """Forget a copy that is on its way."""
        self.pending = False

    def result(self, poll: Callable[[], None] = lambda: None) -> np.ndarray:
        """Return the numbers, int64 of shape ``(n,)``, after waiting until they are there."""
        streams.wait(self._pinned.event, poll)
        self.pending = False
        return self._pinned.bytes[: 8 * self._n].view(np.int64).copy()
