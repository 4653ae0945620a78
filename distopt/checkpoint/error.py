"""Errors that say what is wrong with a checkpoint, and where."""

import os

from distopt.formatting import printable

REMEDY = "use another copy of the file, or an older checkpoint"
DAMAGED = f"must have the checksum that was written with it, got another: it is damaged; {REMEDY}"


class CheckpointError(ValueError):
    """An error of a file that is no checkpoint, is damaged or has wrong contents, or of a tree that fits in no file."""

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
