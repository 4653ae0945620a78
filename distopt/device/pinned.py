"""Host memory that a GPU reads and writes itself, so that nobody waits for a copy."""

import threading

import numpy as np

from distopt.device.gpus import cupy, current_gpu


class Pinned:
    """A piece of host memory that the GPU reads and writes itself, and the event behind its last use."""

    def __init__(self, nbytes: int):
        self.memory = cupy().cuda.alloc_pinned_memory(max(1, nbytes))
        self.bytes = np.frombuffer(self.memory, np.uint8, max(1, nbytes))
        self.event = cupy().cuda.Event(disable_timing=True)


class Pool:
    """Pinned memory that nobody uses; a piece is taken again when the GPU is done with it, and never freed.

    cupy's own pool would hand a piece out again while a copy to it is still on its way.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[Pinned]] = {}  # by GPU, whose events they have
        self._lock = threading.RLock()  # a collection may give a piece back in the middle of taking one

    def take(self, nbytes: int) -> Pinned:
        """A piece of at least so many bytes."""
        with self._lock:
            idle = self._idle.setdefault(current_gpu(), [])
            found = next((p for p in idle if p.bytes.size >= nbytes and p.event.done), None)
            if found:
                idle.remove(found)
        return found or Pinned(1 << max(0, nbytes - 1).bit_length())

    def give(self, piece: Pinned, gpu: int) -> None:
        """Others may have it when what was enqueued is done."""
        with self._lock:
            self._idle[gpu].append(piece)


pool = Pool()
