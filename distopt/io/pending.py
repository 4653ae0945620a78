"""Files that are written under a temporary name and get their own when they are whole.

The temporary name is ``<name>.tmp.<pid>``, and the file is locked.  The kernel unlocks it when the process has ended,
however that ended and whatever other process has its number by then.
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

# What a file system says that cannot flush a folder (CIFS, drives of WSL, some of FUSE), or may not be read.
NO_SYNC = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES}
TEMPORARY = re.compile(r".*\.tmp\.\d+", re.DOTALL)


class Pending:
    """A file under a temporary name: ``write``, ``finish``, then ``commit`` gives it its own; or ``discard``."""

    # Raises FileExistsError if something has the temporary name that no ended process left.

    def __init__(self, path: str | os.PathLike[str], mode: int = 0o600, durable: bool = True):
        # mode: its permissions; by default only the owner may read it
        # durable: whether `finish` and `commit` wait for the disk, so that the file outlives a crash of the machine
        self.path, self._durable = Path(path), durable
        # nbytes: its size, after `finish`
        # digest: the text that was given to `finish`
        self.nbytes, self.digest = 0, ""
        self._temporary = self.path.with_name(f"{self.path.name}.tmp.{os.getpid()}")
        _remove_if_abandoned(self._temporary)  # by a process with the same number, as in containers
        self._file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with contextlib.suppress(OSError):  # a file system without locks: nobody sweeps there
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, data: bytes | memoryview, at: int) -> None:
        """Write bytes at an offset."""
        rest = memoryview(data)
        with self._named():
            while rest:
                count = os.pwrite(self._file, rest, at)
                rest, at = rest[count:], at + count

    def finish(self, digest: str = "") -> None:
        """Complete the contents, and wait until they are on the disk; ``digest`` stands for them."""
        if self._durable:
            with self._named():
                os.fsync(self._file)
        self.nbytes, self.digest = os.fstat(self._file).st_size, digest

    def commit(self) -> None:
        """Give the file its own name, in one stroke, in the place of whatever had it before."""
        # An OSError means that this is not possible, and that the file has been discarded.
        try:
            os.replace(self._temporary, self.path)
        except OSError:
            self.discard()
            raise
        self._settle(self.path.parent)

    def commit_as(self, kind: str, read: Callable[[str | os.PathLike[str]], Any]) -> None:
        """Give the file its own name, unless something that is no ``kind`` has come there (``check_replaceable``)."""
        # Raises FileExistsError if something else has the name.  That stays; this file gets a free name beside it,
        # which the error says.
        # read: raises ValueError for a file that is no `kind`.
        try:
            while True:
                check_replaceable(self.path, kind, read)
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
        """Remove the file, unless it was committed."""
        if self._file >= 0:
            self._temporary.unlink(missing_ok=True)
            self._close()

    def _take(self, path: Path) -> bool:
        """Give the file a name that nothing has; False if something has it."""
        try:
            os.link(self._temporary, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            if os.path.lexists(path):
                return False
            os.replace(self._temporary, path)
        else:
            self._temporary.unlink()
        self._settle(path.parent)
        return True

    def _take_beside(self) -> Path:
        """Give the file the first free name that is like its own, and return it."""
        names = (self.path.with_stem(f"{self.path.stem}-{k}") for k in itertools.count(1))
        try:
            return next(filter(self._take, names))
        except OSError:
            self.discard()
            raise

    def _settle(self, folder: Path) -> None:
        """Close the file, which has its name now, and wait until the folder is on the disk."""
        self._close()
        if self._durable:
            sync(folder)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """A context in which errors of the descriptor name the file."""
        try:
            yield
        except OSError as error:
            error.filename = str(self.path)
            raise

    def _close(self) -> None:
        file, self._file = self._file, -1
        os.close(file)


def prepare(path: str | os.PathLike[str], data: bytes, mode: int = 0o600, durable: bool = True) -> Pending:
    """Write a small file under a temporary name; ``durable``: wait for the disk."""
    pending = Pending(path, mode, durable)
    try:
        pending.write(data, 0)
        pending.finish()
    except BaseException:
        pending.discard()
        raise
    return pending


def check_replaceable(path: str | os.PathLike[str], kind: str, read: Callable[[str | os.PathLike[str]], Any]) -> None:
    """Check that nothing is at a path, or a file of the same kind that may be replaced; else OSError."""
    # read: raises ValueError for a file that is no `kind`.
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a folder, and a {kind} is a file")
    if not os.path.lexists(path):
        return
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise FileExistsError(f"{path} is no regular file: a {kind} would take its place")
    try:
        read(path)
    except ValueError:
        raise FileExistsError(f"{path} is there and is no {kind}: it is not replaced") from None


def sync(folder: Path) -> None:
    """Flush a folder to the disk, so that files created in it outlive a crash of the machine."""
    # Where the file system cannot do that, the files have their names all the same.
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise OSError(error.errno, error.strerror, str(folder)) from None


def sweep(folder: str | os.PathLike[str], name: str = "*") -> list[Path]:
    """Remove temporary files of processes that have ended, in a folder but not below; return their paths."""
    # name: a pattern of the files' own names.
    candidates = [path for path in sorted(Path(folder).glob(f"{name}.tmp.*")) if TEMPORARY.fullmatch(path.name)]
    return [path for path in candidates if _remove_if_abandoned(path)]


def _remove_if_abandoned(path: Path) -> bool:
    """Remove a file that no process has locked; tell if it was removed."""
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
