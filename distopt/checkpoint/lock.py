"""Locks of folders: one job at a time saves in a folder.

It holds a locked file there, which the kernel unlocks when its process ends.
"""

import contextlib
import fcntl
import os
import platform
import threading
import time
import weakref
from pathlib import Path

from distopt.formatting import printable

NAME = ".distopt.lock"
# for a job that is ending
LOCK_SECONDS = 3.0
# of the text that names the holder
MAX_HOLDER_BYTES = 200


class Held:
    """The lock of one folder, held as long as anything refers to this object."""

    def __init__(self, file: int):
        self.release = weakref.finalize(self, os.close, file)


def hold(folder: Path) -> Held | None:
    """Lock a folder for this process: one lock for all of its calls, or None where the file system has no locks."""
    file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        with _mutex:
            status = os.fstat(file)
            inode = status.st_dev, status.st_ino
            held = _held.get(inode)
            if held is None and _locked(file, folder):
                # Its holder's name.  On a full disk the lock holds all the same.
                with contextlib.suppress(OSError):
                    os.ftruncate(file, 0)
                    os.pwrite(file, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
                held = _held[inode] = Held(os.dup(file))
            return held
    finally:
        os.close(file)


def _locked(file: int, folder: Path) -> bool:
    """Lock the file, after a wait of ``LOCK_SECONDS`` seconds at most; False where the file system has no locks."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            owner = printable(os.pread(file, MAX_HOLDER_BYTES, 0).decode(errors="replace").strip())
            raise RuntimeError(
                f"another job saves checkpoints in {folder}: {owner or 'an unknown process'}; end it, or give each job "
                "a folder of its own"
            ) from None
        except OSError:
            return False
        return True


def _forget() -> None:
    """Release all locks in a forked child, which must not hold a folder after this process has ended."""
    global _mutex
    _mutex = threading.Lock()
    for held in list(_held.values()):
        held.release()
    _held.clear()


# by device and inode
_held: weakref.WeakValueDictionary[tuple[int, int], Held] = weakref.WeakValueDictionary()
_mutex = threading.Lock()
os.register_at_fork(after_in_child=_forget)
