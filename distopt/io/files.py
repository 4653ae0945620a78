"""Files that need not be trusted: opened without waiting, read up to a limit."""

import contextlib
import os
import stat
from collections.abc import Iterator

Path = str | os.PathLike[str]
NOT_REGULAR = "must be a regular file, got a folder, pipe, socket or device"


class NotRegularError(ValueError):
    """An error of a pipe, device, socket or folder where a file must be."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a regular file for reading; the context's value is its descriptor."""
    # Raises NotRegularError: it is no regular file, such as a pipe, for which a reader might wait.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise NotRegularError(f"{os.fspath(path)} {NOT_REGULAR}")
        yield file
    finally:
        os.close(file)


def read(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file; ValueError if it is none, or has more than ``limit`` bytes."""
    with opened(path) as file:
        size = os.fstat(file).st_size
        if size > limit:
            raise ValueError(f"{os.fspath(path)} must be at most {limit} bytes, got {size}")
        with open(file, "rb", closefd=False) as stream:
            return stream.read(size)
