"""Memory that all ranks of one machine can read and write.

An array is in an anonymous file of the kernel (memfd), which other processes open through /proc.  That needs no space
in /dev/shm, of which containers have little, leaves nothing behind when a job is killed, and works with every MPI
library.  If the kernel has no such files, or another process may not open them, memory is not shared; that is no error.
"""

import mmap
import os
import weakref
from typing import Any

import numpy as np

from distopt.comm.communicator import Communicator
from distopt.comm.control import ControlChannel
from distopt.device import HUGE_PAGE


class SharedMemory:
    """Shareable arrays of one process."""

    def __init__(self) -> None:
        self._handles: dict[int, str] = {}  # by address

    def alloc(self, n: int, dtype: Any) -> np.ndarray | None:
        """Allocate zeros, ``(n,)``, at a multiple of 2 MiB; return None if the kernel has no such memory."""
        nbytes = n * np.dtype(dtype).itemsize
        try:
            file = os.memfd_create("distopt")
        except (AttributeError, OSError):
            return None
        try:
            os.ftruncate(file, nbytes + HUGE_PAGE)  # room to align; pages that are never touched cost nothing
            pages = mmap.mmap(file, nbytes + HUGE_PAGE)
        except (OSError, ValueError):
            os.close(file)
            return None
        weakref.finalize(pages, os.close, file)
        memory = np.frombuffer(pages, np.uint8)
        address = memory.ctypes.data
        start, status = -address % HUGE_PAGE, os.fstat(file)
        self._handles[address + start] = f"{os.getpid()} {file} {status.st_dev} {status.st_ino} {start} {nbytes}"
        weakref.finalize(pages, self._handles.pop, address + start, None)
        array: np.ndarray = memory[start : start + nbytes].view(dtype)
        return array

    def handle(self, x: np.ndarray) -> str:
        """Return the text with which ``open_handle`` opens x in another process; '' unless ``alloc`` returned x."""
        return self._handles.get(x.ctypes.data, "")


def open_handle(handle: str, dtype: Any) -> np.ndarray | None:
    """Open an array of another process.

    Args:
        handle: what ``SharedMemory.handle`` returned there.
        dtype: dtype of the array.

    Returns:
        The array, flat, or None if this process cannot open it.
    """
    if not handle:
        return None
    pid, file, device, inode, start, nbytes = map(int, handle.split())
    path = f"/proc/{pid}/fd/{file}"
    try:
        status = os.stat(path)
        if (status.st_dev, status.st_ino) != (device, inode):  # in another container the id is another process's
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        pages = mmap.mmap(descriptor, status.st_size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    array: np.ndarray = np.frombuffer(pages, np.uint8, nbytes, start).view(dtype)
    return array


class SharingCommunicator(Communicator):
    """A base class of communicators whose ranks share memory where they are on one host.

    A subclass sets ``_shared``, and ``_place``: its reason, before it is known whether they do.

    Attributes:
        wire: what sums go through where they do not.
    """

    wire: str
    _shared: SharedMemory
    _place: str

    def alloc(self, n: int, dtype: Any) -> np.ndarray:
        """Allocate zeros, ``(n,)``, in memory that ``peers`` can share if all ranks are on one host."""
        shared = self._shared.alloc(n, dtype) if self.size > 1 and not self.spans_hosts else None
        return super().alloc(n, dtype) if shared is None else shared

    def peers(self, x: np.ndarray) -> list[np.ndarray] | None:
        """Return the arrays of all ranks, in rank order, or None unless all ranks can open all of them.  Collective."""
        if self.spans_hosts:
            return None
        arrays = peers_of(x, self._shared, self.control)
        outcome = "memory shared" if arrays else f"no memory shared: sums go through {self.wire}"
        self.reason = f"{self._place}, {outcome}"
        return arrays

    def explain(self, reason: str) -> None:
        """Put ``reason`` before the reasons that ``repr`` shows."""
        self._place = self.reason = f"{reason}; {self._place}"


def peers_of(x: np.ndarray, memory: SharedMemory, control: ControlChannel) -> list[np.ndarray] | None:
    """Return the arrays of all ranks, in rank order, or None unless all ranks can open all of them.  Collective.

    Args:
        x: this rank's array.
        memory: has made it.
        control: the votes of the ranks.
    """
    handles = control.gather(memory.handle(x))
    opened = [x if rank == control.rank else open_handle(handle, x.dtype) for rank, handle in enumerate(handles)]
    arrays = [a for a in opened if a is not None]
    return arrays if all(control.gather("all" * (len(arrays) == control.size))) else None
