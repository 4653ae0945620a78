"""A log for programs."""

import os
from collections.abc import Mapping

from distopt import plain
from distopt.monitor.callback import checked


class JsonLines:
    """A callback that writes one JSON object per call and line, ``step`` among its numbers; what was there is gone.

    NaN and infinity are the strings "NaN", "Infinity" and "-Infinity".  Each line is in the file when the call
    returns.  Raises OSError at once if the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._file = open(path, "w", encoding="utf-8")

    def __call__(self, step: int, numbers: Mapping[str, float], /) -> None:
        """Write a line."""
        self._file.write(plain.dumps(checked(step, numbers)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
