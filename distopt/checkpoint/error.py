"""Errors that say what is wrong with a checkpoint, and where."""

import os

from distopt.formatting import printable

REMEDY = "use another copy of the file, or an older checkpoint"
DAMAGED = f"must have the checksum that was written with it, got another: it is damaged; {REMEDY}"


class CheckpointError(ValueError):
    """An error of a file that is no checkpoint, is damaged or has wrong contents, or of a tree that fits in no file.

    Attributes:
        path: the file.
        field: the tensor, or the part of the header.
        reason: what is wrong with it.
        fits: the fraction of a tree that would not be too much; 0 if something else is wrong.

    Example:
        >>> from pathlib import Path
        >>> from distopt.checkpoint import CheckpointError, read
        >>> _ = Path("empty.ckpt").write_bytes(b"")
        >>> try:
        ...     read("empty.ckpt")
        ... except CheckpointError as error:
        ...     print(error)
        empty.ckpt: header: must begin with 8 bytes, got 0; use another copy of the file, or an older checkpoint
    """

    def __init__(self, path: str | os.PathLike[str], field: str, reason: str, fits: float = 0.0):
        super().__init__(path, field, reason)
        self.path, self.field, self.reason, self.fits = path, field, reason, fits

    def __str__(self) -> str:
        return f"{printable(os.fspath(self.path))}: {printable(self.field)}: {printable(self.reason)}"


class Misfit(Exception):
    """A fault of a checkpoint where the file's name is not known; whoever knows it raises ``CheckpointError``."""

    def __init__(self, field: str, reason: str, fits: float = 0.0):
        super().__init__(field, reason)
        self.field, self.reason, self.fits = field, reason, fits
