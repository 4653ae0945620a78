"""Memory that is registered with NCCL, so that GPUs and network cards reach it without a copy."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from distopt import device
from distopt.comm.nccl_library import Registration, memory_alloc, memory_free


class Block:
    """One piece of memory, which arrays use."""

    def __init__(self, nbytes: int):
        self.gpu, self.address, self.nbytes = device.current_gpu(), memory_alloc(nbytes), nbytes
        self.registration: Registration | None = None  # none before and after

    def deregister(self) -> None:
        """Deregister it from the communicator."""
        if self.registration is not None:
            self.registration.end()
        self.registration = None

    def free(self) -> None:
        """Free the memory, once the GPU has done what is enqueued."""
        device.wait_for_gpu(self.gpu)
        memory_free(self.address)


class Lease:
    """A token that all arrays of a block hold: when it goes, the block is unused."""


class RegisteredMemory:
    """The blocks that one communicator has registered."""

    # A block whose arrays are gone may still be in use by the GPU.  So it is freed at the next `register`, where the
    # host waits anyway; after `deregister` it is freed at once, and after `abandon` never.

    def __init__(self, comm: Any):
        self._comm = comm  # cupy's communicator
        self._used: dict[int, Block] = {}  # by address
        self._unused: list[Block] = []
        # what becomes of a block without arrays
        self._end: Callable[[Block], object] = self._unused.append

    def zeros(self, n: int, dtype: Any) -> Any:
        """Return zeros, ``(n,)``, on the current GPU, in a block of their own; MemoryError if there is no room."""
        block, lease = Block(max(1, n * np.dtype(dtype).itemsize)), Lease()
        self._used[block.address] = block
        weakref.finalize(lease, self._leave, block.address).atexit = False
        array = device.gpu_array_at(block.address, (n,), dtype, lease)
        device.clear(array)
        return array

    def _leave(self, address: int) -> None:
        self._end(self._used.pop(address))

    def register(self, x: np.ndarray) -> None:
        """Register the block of an array of ``zeros``, and free the blocks that are unused.  Collective."""
        # The GPU must be done with the arrays that are gone.
        while self._unused:
            block = self._unused.pop()
            block.deregister()
            block.free()
        block = self._used[device.address(x)]
        if block.registration is None:
            block.registration = Registration(self._comm, block.address, block.nbytes)

    def deregister(self) -> None:
        """Deregister all blocks, before the communicator is destroyed; none of its collectives is under way."""
        # a copy: a collection may take a block away
        for block in [*list(self._used.values()), *self._unused]:
            block.deregister()
        self._end = Block.free
        while self._unused:
            self._unused.pop().free()

    def abandon(self) -> None:
        """Keep all blocks for ever: the communicator is aborted, and its kernels may still end."""
        self._end = _keep


def _keep(block: Block) -> None:
    """Do nothing: finalizer of a block that stays."""
