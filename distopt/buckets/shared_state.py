"""What outlives a step, in memory from which another process of this machine goes on where one was killed."""

import logging
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np

LOG = logging.getLogger("distopt")
# Of each of two slots, whether there is such a state in it; the transaction in which the second one is what there was
# before; elements and dtype.
HEADER = np.dtype([("present", "i8", 2), ("kept", "i8"), ("size", "i8"), ("dtype", "S8")])


class StateFolder:
    """The folder of a job, in the memory of this machine, with a file for each state of each bucket of each rank.

    Args:
        path: the folder, of this user alone.
        transaction: returns the number of the present transaction (``comm.Elastic``), the same on all processes.
        number: of the training, among those of the job, on all processes alike.
    """

    def __init__(self, path: Path, transaction: Callable[[], int], number: int):
        self.path, self.transaction, self.number = path, transaction, number
        # Whether a state has found no room, and is lost with its process.
        self.full = False

    @classmethod
    def made(cls, path: Path, transaction: Callable[[], int], number: int) -> "StateFolder | None":
        """Make the folder, unless another process has; None if it cannot be this user's alone."""
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            about = path.lstat()
        except OSError:
            return None
        own = (about.st_uid, about.st_mode & 0o777) == (os.geteuid(), 0o700)
        return cls(path, transaction, number) if own and path.is_dir() and not path.is_symlink() else None

    def create(self, name: str, x: np.ndarray, kept: int) -> "Slots | None":
        """Create the file of a state with this content; None, with one warning, if memory has no room for it."""
        # kept: the transaction before which there was none.
        new = self.path / f".{os.getpid()}"
        try:
            file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(file, 0, Slots.bytes_of(x.nbytes))
            except OSError:
                new.unlink()
                raise
            finally:
                os.close(file)
        except OSError as error:
            if not self.full:
                LOG.warning("distopt: residuals are lost with a process that is killed: %s: %s", self.path, error)
            self.full = True
            return None
        slots = Slots(new, x.size, x.dtype)
        slots.arrays[0][:] = x
        slots.header["kept"], slots.header["present"] = kept, (1, 0)
        new.rename(self.path / name)
        return slots

    def found(self, owner: str) -> "Iterator[tuple[str, Slots]]":
        """Yield the states of an owner that are there, by name, as they were when the last transaction ended."""
        for path in sorted(self.path.glob(f"{owner}.*")):
            slots = Slots(path)
            if slots.header["kept"] == self.transaction():
                slots.arrays[0][:] = slots.arrays[1]
                slots.header["present"][0] = slots.header["present"][1]
            yield unquote(path.name.removeprefix(f"{owner}.")), slots


class Slots:
    """A file with two arrays: the present content of a state, and that before the present transaction.

    Args:
        path: the file.
        size: elements, and their dtype, of a new file.
    """

    def __init__(self, path: Path, size: int = -1, dtype: np.dtype | None = None):
        with path.open("r+b") as file:
            pages = mmap.mmap(file.fileno(), 0)
        self.header = np.frombuffer(pages, HEADER, 1)[0]
        if dtype is not None:
            self.header["size"], self.header["dtype"] = size, dtype.str.encode()
        n, kind = int(self.header["size"]), np.dtype(self.header["dtype"].decode())
        starts = mmap.PAGESIZE, mmap.PAGESIZE + _pages(n * kind.itemsize)
        self.arrays = [np.frombuffer(pages, kind, n, start) for start in starts]

    @staticmethod
    def bytes_of(nbytes: int) -> int:
        """Return the bytes of a file with arrays of so many."""
        return mmap.PAGESIZE + 2 * _pages(nbytes)


def _pages(nbytes: int) -> int:
    """Return the bytes of as many pages as hold these."""
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE


class SharedState(dict[str, np.ndarray]):
    """The states of a bucket of one rank; what is assigned is copied to a file, if there is room.

    It is what the rank's last process has left, if another one had it before.

    Args:
        folder: of the files.
        owner: the rank, the plan and the bucket, as a part of the files' names.
    """

    def __init__(self, folder: StateFolder, owner: str):
        super().__init__()
        owner = f"{folder.number}.{owner}"
        self._folder, self._owner, self._slots = folder, owner, dict(folder.found(owner))
        self._kept = 0  # the last transaction that was to change them
        for name, slots in self._slots.items():
            if slots.header["present"][0]:
                super().__setitem__(name, slots.arrays[0])

    def __setitem__(self, name: str, x: np.ndarray) -> None:
        slots = self._slots.get(name)
        if slots is None:
            slots = self._folder.create(f"{self._owner}.{quote(name, safe='')}", x, self._kept)
            if slots is None:
                super().__setitem__(name, x)
                return
            self._slots[name] = slots
        elif x is not slots.arrays[0]:
            slots.arrays[0][:] = x
        super().__setitem__(name, slots.arrays[0])
        slots.header["present"][0] = 1

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        if name in self._slots:
            self._slots[name].header["present"][0] = 0

    def clear(self) -> None:
        for name in list(self):
            del self[name]

    def slots(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return each array, and that of its content before the present transaction."""
        return [(slots.arrays[0], slots.arrays[1]) for slots in self._slots.values()]

    def keep(self) -> None:
        """Note that the second slots have what there is, which the present transaction is about to change."""
        self._kept = self._folder.transaction()
        for slots in self._slots.values():
            slots.header["present"][1] = slots.header["present"][0]
            slots.header["kept"] = self._kept
