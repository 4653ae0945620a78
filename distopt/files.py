"""Files that anybody may have put there: opened without waiting, read up to a limit."""

import contextlib
import os
import stat
from collections.abc import Iterator

Path = str | os.PathLike[str]


class NotRegularError(ValueError):
    """A pipe, device, socket or folder where a file must be."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """The descriptor of a regular file, for reading.

    Raises OSError if it cannot be opened, NotRegularError for anything else, which might let the reader wait.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise NotRegularError(f"{os.fspath(path)} is not a regular file")
        yield file
    finally:
        os.close(file)


def read(path: Path, limit: int) -> bytes:
    """A file's bytes.  Raises as ``opened``, and ValueError for more than ``limit`` of them."""
    with opened(path) as file:
        size = os.fstat(file).st_size
        if size > limit:
            raise ValueError(f"{os.fspath(path)} has more than {limit} bytes")
        with open(file, "rb", closefd=False) as stream:
            return stream.read(size)
