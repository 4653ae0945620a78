"""What is wrong with a checkpoint, and where."""

import os


class CheckpointError(ValueError):
    """A file that is no checkpoint, is damaged, or says what it must not; or a tree that no file may say.

    ``path`` is the file, ``field`` the tensor or the part of the header, ``reason`` what is wrong with it; ``fits`` is
    the fraction of a tree that would not be too much, 0 if something else is wrong.
    """

    def __init__(self, path: str | os.PathLike[str], field: str, reason: str, fits: float = 0.0):
        super().__init__(path, field, reason)
        self.path, self.field, self.reason, self.fits = path, field, reason, fits

    def __str__(self) -> str:
        return f"{printable(os.fspath(self.path))}: {printable(self.field)}: {printable(self.reason)}"


class Misfit(Exception):
    """The same where the file's name is not known."""

    def __init__(self, field: str, reason: str, fits: float = 0.0):
        super().__init__(field, reason)
        self.field, self.reason, self.fits = field, reason, fits


def printable(text: str) -> str:
    """A text in one line that does nothing to a terminal, whoever wrote it."""
    return text if text.isprintable() else ascii(text)[1:-1]
