"""One job at a time saves in a folder: it holds a locked file there, which the kernel unlocks when its process ends."""

import contextlib
import fcntl
import os
import platform
import threading
import time
import weakref
from pathlib import Path

from distopt.checkpoint.error import printable

NAME = ".distopt.lock"
PATIENCE = 3.0  # seconds for a job that is ending
LONGEST = 200  # characters that say who holds it


class Held:
    """The lock of one folder, for as long as anything refers to this object."""

    def __init__(self, file: int):
        self.release = weakref.finalize(self, os.close, file)


def hold(folder: Path) -> Held | None:
    """The lock of a folder, the same object for all of this process; None where the file system has no locks.

    Raises OSError, and RuntimeError that names the process which has it, if another one does.
    """
    file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        with _mutex:
            found = os.fstat(file)
            place = found.st_dev, found.st_ino
            held = _held.get(place)
            if held is None and _locked(file, folder):
                _sign(file)
                held = _held[place] = Held(os.dup(file))
            return held
    finally:
        os.close(file)


def _locked(file: int, folder: Path) -> bool:
    """Lock it; False where that cannot be."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            who = printable(os.pread(file, LONGEST, 0).decode(errors="replace").strip())
            raise RuntimeError(
                f"another job saves checkpoints in {folder}: {who or 'an unknown process'}; end it, or give each job a "
                "folder of its own"
            ) from None
        except OSError:
            return False
        return True


def _sign(file: int) -> None:
    """Say who has it."""
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)


def _forget() -> None:
    """In a child, which must not hold a folder when this process has ended."""
    global _mutex
    _mutex = threading.Lock()
    for held in list(_held.values()):
        held.release()
    _held.clear()


_held: weakref.WeakValueDictionary[tuple[int, int], Held] = weakref.WeakValueDictionary()  # by device and inode
_mutex = threading.Lock()
os.register_at_fork(after_in_child=_forget)
