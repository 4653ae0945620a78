"""Memory that all ranks of one machine read directly.

An array lies in an anonymous file of the kernel (memfd), which other processes open through /proc.  That needs no room
in /dev/shm, of which containers have little, leaves nothing behind when a job is killed, and is the same under every
MPI.  Where the kernel has no such files, or another process may not open them, there is no shared memory, and that is
no error.
"""

import mmap
import os
import weakref
from typing import Any

import numpy as np

from distopt.device import HUGE_PAGE


class SharedMemory:
    """The shareable arrays of one process."""

    def __init__(self) -> None:
        self._handles: dict[int, str] = {}  # by address

    def alloc(self, n: int, dtype: Any) -> np.ndarray | None:
        """Zeroed flat memory that starts at a multiple of 2 MiB; None if there can be none."""
        nbytes = n * np.dtype(dtype).itemsize
        try:
            file = os.memfd_create("distopt")
        except (AttributeError, OSError):
            return None
        try:
            os.ftruncate(file, nbytes + HUGE_PAGE)  # pages that are never touched cost nothing
            pages = mmap.mmap(file, nbytes + HUGE_PAGE)
        except (OSError, ValueError):
            os.close(file)
            return None
        weakref.finalize(pages, os.close, file)
        whole = np.frombuffer(pages, np.uint8)
        address = whole.ctypes.data
        start, opened = -address % HUGE_PAGE, os.fstat(file)
        self._handles[address + start] = f"{os.getpid()} {file} {opened.st_dev} {opened.st_ino} {start} {nbytes}"
        weakref.finalize(pages, self._handles.pop, address + start, None)
        found: np.ndarray = whole[start : start + nbytes].view(dtype)
        return found

    def handle(self, x: np.ndarray) -> str:
        """What another process needs to ``open`` an array that ``alloc`` returned; '' for others."""
        return self._handles.get(x.ctypes.data, "")


def open_handle(handle: str, dtype: Any) -> np.ndarray | None:
    """The array behind another process's handle, None if it cannot be opened from here."""
    if not handle:
        return None
    pid, file, device, inode, start, nbytes = map(int, handle.split())
    path = f"/proc/{pid}/fd/{file}"
    try:
        here = os.stat(path)
        if (here.st_dev, here.st_ino) != (device, inode):  # a number means another process in another container
            return None
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        pages = mmap.mmap(opened, here.st_size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(opened)
    found: np.ndarray = np.frombuffer(pages, np.uint8, nbytes, start).view(dtype)
    return found
