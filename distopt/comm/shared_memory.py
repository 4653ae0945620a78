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

# of arrays of this process that others can open, but for their bytes; by address
_handles: dict[int, str] = {}


def allocate(n: int, dtype: Any) -> np.ndarray | None:
    """Allocate zeros that other processes can open, ``(n,)``, at a multiple of 2 MiB; None where that is impossible."""
    nbytes = n * np.dtype(dtype).itemsize
    try:
        file = os.memfd_create("distopt")
    except (AttributeError, OSError):
        return None
    try:
        # room to align; pages that are never touched cost nothing
        os.ftruncate(file, nbytes + HUGE_PAGE)
        pages = mmap.mmap(file, nbytes + HUGE_PAGE)
    except (OSError, ValueError):
        os.close(file)
        return None
    address = np.frombuffer(pages, np.uint8).ctypes.data
    array: np.ndarray = _offered(pages, file, -address % HUGE_PAGE, nbytes).view(dtype)
    return array


def handle_of(x: np.ndarray) -> str:
    """Return the text with which ``open_handle`` opens x in another process; '' if no other one can."""
    # x may be a part of what others can open, from its start.
    known = _handles.get(x.ctypes.data)
    return f"{known} {x.nbytes}" if known else ""


def open_handle(handle: str, dtype: Any) -> np.ndarray | None:
    """Open an array of another process, by what ``handle_of`` returned there; None if that fails."""
    opened = _opened(handle)
    if opened is None:
        return None
    pages, file, start, nbytes = opened
    os.close(file)
    array: np.ndarray = np.frombuffer(pages, np.uint8, nbytes, start).view(dtype)
    return array


def open_to_pass_on(handle: str, dtype: Any) -> np.ndarray | None:
    """As ``open_handle``, so that others can open this array too: it takes a descriptor."""
    opened = _opened(handle)
    array: np.ndarray | None = None if opened is None else _offered(*opened).view(dtype)
    return array


def _opened(handle: str) -> tuple[mmap.mmap, int, int, int] | None:
    """Return the pages of a handle, their file, the place of the array there, and its bytes; None if that fails."""
    if not handle:
        return None
    pid, file, device, inode, start, nbytes = map(int, handle.split())
    path = f"/proc/{pid}/fd/{file}"
    try:
        status = os.stat(path)
        # in another container the id is another process's
        if (status.st_dev, status.st_ino) != (device, inode):
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return mmap.mmap(descriptor, status.st_size), descriptor, start, nbytes
    except (OSError, ValueError):
        os.close(descriptor)
        return None


def _offered(pages: mmap.mmap, file: int, start: int, nbytes: int) -> np.ndarray:
    """Return the array at this place of a file's pages; other processes can open it for as long as it lives here."""
    array: np.ndarray = np.frombuffer(pages, np.uint8, nbytes, start)
    address, status = array.ctypes.data, os.fstat(file)
    _handles[address] = f"{os.getpid()} {file} {status.st_dev} {status.st_ino} {start}"
    weakref.finalize(pages, os.close, file)
    weakref.finalize(pages, _handles.pop, address, None)
    return array


class SharingCommunicator(Communicator):
    """A base class of communicators whose ranks share memory where they are on one host."""

    # A subclass sets `_place`: its reason, before it is known whether they do.

    wire: str  # what sums go through where they do not
    _place: str

    def alloc(self, n: int, dtype: Any) -> np.ndarray:
        """Allocate zeros, ``(n,)``, in memory that ``peers`` can share if all ranks are on one host."""
        shared = allocate(n, dtype) if self.size > 1 and not self.spans_hosts else None
        return super().alloc(n, dtype) if shared is None else shared

    def peers(self, x: np.ndarray) -> list[np.ndarray] | None:
        """Return the arrays of all ranks, in rank order, or None unless all ranks can open all of them.  Collective."""
        if self.spans_hosts:
            return None
        arrays = peers_of(x, self.control)
        outcome = "memory shared" if arrays else f"no memory shared: sums go through {self.wire}"
        self.reason = f"{self._place}, {outcome}"
        return arrays

    def first_of_peers(self, x: np.ndarray) -> np.ndarray | None:
        """Return the first rank's array, or None unless all ranks can open it.  Collective."""
        if self.spans_hosts:
            return None
        handle = self.control.gather(handle_of(x))[0]
        first = x if self.rank == 0 else open_to_pass_on(handle, x.dtype)
        return first if all(self.control.gather("opened" * (first is not None))) else None

    def explain(self, reason: str) -> None:
        """Put ``reason`` before the reasons that ``repr`` shows."""
        self._place = self.reason = f"{reason}; {self._place}"


def peers_of(x: np.ndarray, control: ControlChannel) -> list[np.ndarray] | None:
    """Return the arrays of all ranks, in rank order, or None unless all ranks can open all of them.  Collective."""
    handles = control.gather(handle_of(x))
    opened = [x if rank == control.rank else open_handle(handle, x.dtype) for rank, handle in enumerate(handles)]
    arrays = [a for a in opened if a is not None]
    return arrays if all(control.gather("all" * (len(arrays) == control.size))) else None
