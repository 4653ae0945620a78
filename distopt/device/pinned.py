"""Pinned host memory, which a GPU reads and writes itself, so that the host need not wait for a copy."""

import threading

import numpy as np

from distopt.device.gpus import cupy, current_gpu


class Pinned:
    """A piece of pinned host memory as bytes, and an event that is done when the GPU no longer uses it."""

    def __init__(self, nbytes: int):
        self.memory = cupy().cuda.alloc_pinned_memory(max(1, nbytes))
        self.bytes = np.frombuffer(self.memory, np.uint8, max(1, nbytes))
        self.event = cupy().cuda.Event(disable_timing=True)


class Pool:
    """A pool of unused pinned memory, by GPU; a piece is reused when the GPU is done with it, and never freed."""

    # cupy's own pool would hand a piece out again while a copy to it is still on its way.

    def __init__(self) -> None:
        # by the GPU to which their events belong
        self._idle: dict[int, list[Pinned]] = {}
        self._taking = threading.Lock()

    def acquire(self, nbytes: int) -> Pinned:
        """Return a piece of at least ``nbytes`` bytes for the current GPU."""
        with self._taking:
            idle = self._idle.setdefault(current_gpu(), [])
            piece = next((p for p in idle if p.bytes.size >= nbytes and p.event.done), None)
            if piece:
                idle.remove(piece)
        return piece or Pinned(1 << max(0, nbytes - 1).bit_length())

    def release(self, piece: Pinned, gpu: int) -> None:
        """Put a piece back, to be used again when its event is done."""
        # Without a lock: a collection of garbage may come here in any thread, in the middle of whatever that one does.
        self._idle[gpu].append(piece)


pool = Pool()
