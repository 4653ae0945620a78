"""A file that is not there before it is whole.

It is written under a name of its own, ``<name>.tmp.<pid>``, and locked.  The kernel unlocks it when the process has
ended, however that ended and whatever other process has its number by then.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TEMPORARY = re.compile(r".*\.tmp\.\d+", re.DOTALL)


class Pending:
    """A file beside its final name: ``write``, ``finish``, then ``commit`` gives it the name; or ``discard``.

    It is its owner's alone, but for a ``mode`` that lets others read.  Raises OSError, FileExistsError if something
    that no ended process left has the temporary name.
    """

    def __init__(self, path: str | os.PathLike[str], mode: int = 0o600):
        self.path = Path(path)
        self.nbytes, self.digest = 0, ""  # when it is finished
        self._temporary = self.path.with_name(f"{self.path.name}.tmp.{os.getpid()}")
        _remove_if_abandoned(self._temporary)  # by a process that had our number, as they have in containers
        self._file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with contextlib.suppress(OSError):  # a file system without locks: nobody sweeps there
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, data: bytes | memoryview, at: int) -> None:
        """Put bytes at a place."""
        rest = memoryview(data)
        with self._named():
            while rest:
                count = os.pwrite(self._file, rest, at)
                rest, at = rest[count:], at + count

    def finish(self, digest: str = "") -> None:
        """Wait until all of it is on the disk; ``digest`` stands for what is in it."""
        with self._named():
            os.fsync(self._file)
        self.nbytes, self.digest = os.fstat(self._file).st_size, digest

    def commit(self) -> None:
        """Give it its name, at once and for good, whatever had that before; if that cannot be, it is discarded."""
        try:
            os.replace(self._temporary, self.path)
        except OSError:
            self.discard()
            raise
        self._close()
        sync(self.path.parent)

    def commit_as(self, kind: str, read: Callable[[str | os.PathLike[str]], Any]) -> None:
        """Give it its name, unless something has come there meanwhile that is no ``kind`` (``check_place``).

        Raises FileExistsError then: that stays, and this file has a free name beside it, which the error says.
        """
        try:
            while True:
                check_place(self.path, kind, read)
                if os.path.lexists(self.path):
                    self.commit()
                    return
                if self._take(self.path):
                    return
        except OSError as error:
            if self._file < 0:
                raise
            raise FileExistsError(f"{error}; the {kind} is in {self._take_beside()}") from None

    def discard(self) -> None:
        """Leave no trace of it, unless it was committed."""
        if self._file >= 0:
            self._temporary.unlink(missing_ok=True)
            self._close()

    def _take(self, place: Path) -> bool:
        """Give it a name that nothing has; False if something has it."""
        try:
            os.link(self._temporary, place)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            if os.path.lexists(place):
                return False
            os.replace(self._temporary, place)
        else:
            self._temporary.unlink()
        self._close()
        sync(place.parent)
        return True

    def _take_beside(self) -> Path:
        """Give it the first free name that is like its own."""
        names = (self.path.with_stem(f"{self.path.stem}-{k}") for k in itertools.count(1))
        try:
            return next(filter(self._take, names))
        except OSError:
            self.discard()
            raise

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of a descriptor say which file it is."""
        try:
            yield
        except OSError as error:
            error.filename = str(self.path)
            raise

    def _close(self) -> None:
        file, self._file = self._file, -1
        os.close(file)


def prepare(path: str | os.PathLike[str], data: bytes, mode: int = 0o600) -> Pending:
    """A small file, on the disk, that waits for its name.  Raises OSError."""
    pending = Pending(path, mode)
    try:
        pending.write(data, 0)
        pending.finish()
    except BaseException:
        pending.discard()
        raise
    return pending


def check_place(path: str | os.PathLike[str], what: str, read: Callable[[str | os.PathLike[str]], Any]) -> None:
    """Raise OSError if there is no such folder, or what is written would take the place of anything but its like.

    ``read`` raises ValueError for a file that is no ``what``.
    """
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a folder, and a {what} is a file")
    if not os.path.lexists(path):
        return
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise FileExistsError(f"{path} is no regular file: a {what} would take its place")
    try:
        read(path)
    except ValueError:
        raise FileExistsError(f"{path} is there and is no {what}: it is not replaced") from None


def sync(folder: Path) -> None:
    """Let what was made in a folder outlive a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(folder: str | os.PathLike[str]) -> list[Path]:
    """Remove what processes that have ended left behind half-written; returns what it was."""
    found = [path for path in sorted(Path(folder).iterdir()) if TEMPORARY.fullmatch(path.name)]
    return [path for path in found if _remove_if_abandoned(path)]


def _remove_if_abandoned(path: Path) -> bool:
    """Is it a file, locked by nobody?  Then it is removed."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError:
        return False
    finally:
        os.close(file)
    return True
