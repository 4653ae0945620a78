"""What cupy's binding lacks of NCCL's library, on the doubles: memory, and its registration."""

import collections
import ctypes
import itertools
import time

import numpy as np

from distopt.comm import nccl_library
from doubles import gpu

OUT_OF_MEMORY, REMOTE_ERROR = 1, 6
PAGE = 4096


class Library:
    """libnccl, as ctypes sees it.

    Attributes:
        log: the names of its calls, in their order, and "destroy" or "abort" where a communicator ends.
        registered: what is registered now, as (communicator, address), by the number of its window or handle.
    """

    def __init__(self):
        self.log: list[str] = []
        self.registered: dict[int, tuple] = {}
        self.has_windows = True  # which it has not where GPUs cannot reach each other's memory
        self._memory: dict[int, tuple] = {}  # the array and its owner's number by address
        self._freed: list[np.ndarray] = []
        self._numbers = itertools.count(1)
        self._windows = collections.Counter()  # by communicator

    def ncclMemAlloc(self, pointer, nbytes):
        n = nbytes.value
        gpu.machine().host.append("allocate")
        if n > gpu.machine().memory:
            return OUT_OF_MEMORY
        raw, owner = np.full(n + PAGE, gpu.POISON, np.uint8), next(gpu.owners)
        address = raw.ctypes.data + -raw.ctypes.data % PAGE
        gpu.allocations[owner], self._memory[address] = (address, n), (raw, owner)
        pointer._obj.value = address
        self.log.append("alloc")
        return 0

    def ncclMemFree(self, address):
        raw, owner = self._memory.pop(address.value)
        assert all(at != address.value for _, at in self.registered.values()), "freed while it is registered"
        del gpu.allocations[owner]
        raw.fill(gpu.POISON)
        self._freed.append(raw)
        self.log.append("free")
        return 0

    def ncclCommWindowRegister(self, comm, address, nbytes, window, flags):
        """All ranks must call it."""
        assert flags == nccl_library.SYMMETRIC
        communicator = alive(comm)
        self._windows[communicator] += 1
        key = f"window {self._windows[communicator]} of"
        communicator.board.post(f"{key} {communicator.rank_id()}", b"")
        started = time.monotonic()
        while not all(communicator.board.see(f"{key} {r}") is not None for r in range(communicator.size())):
            if time.monotonic() - started > 5:
                return REMOTE_ERROR
            time.sleep(1e-3)
        return self._register(communicator, address, nbytes, window, "window") if self.has_windows else 0

    def ncclCommRegister(self, comm, address, nbytes, handle):
        return self._register(alive(comm), address, nbytes, handle, "register")

    def _register(self, communicator, address, nbytes, number, name):
        assert gpu.allocated(address.value, nbytes.value), "registered where no memory is"
        assert (communicator, address.value) not in self.registered.values(), "registered twice"
        number._obj.value = next(self._numbers)
        self.registered[number._obj.value] = communicator, address.value
        self.log.append(name)
        return 0

    def ncclCommWindowDeregister(self, comm, window):
        return self._deregister(alive(comm), window, "window")

    def ncclCommDeregister(self, comm, handle):
        return self._deregister(alive(comm), handle, "register")

    def _deregister(self, communicator, number, name):
        assert self.registered.pop(number.value)[0] is communicator, "of another communicator"
        self.log.append(f"de{name}")
        return 0

    def knows(self, communicator, pointer):
        """Is the memory at this address registered?"""
        blocks = [at for c, at in self.registered.values() if c is communicator]
        return any(at <= pointer < at + gpu.allocations[self._memory[at][1]][1] for at in blocks)


def alive(comm):
    """The double of a communicator, from what ctypes is given."""
    communicator = ctypes.cast(comm, ctypes.py_object).value
    assert not communicator.destroyed, "the communicator is destroyed"
    assert not communicator.aborted, "the communicator is aborted"
    return communicator


library = Library()


def install(patch=setattr):
    """Let distopt find this library."""
    library.__init__()
    patch(nccl_library, "library", lambda: library)
