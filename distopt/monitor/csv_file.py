"""A table for spreadsheets."""

import csv
import os
from collections.abc import Mapping

from distopt.monitor.callback import checked


class CsvFile:
    """A callback that writes one line per call; what the file held before is gone.

    The first call that has numbers names the columns, ``step`` before them, and none before it is written; a number
    that a later call lacks is an empty cell.  Each line is in the file when the call returns.  Raises OSError at once
    if the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._file = open(path, "w", newline="", encoding="utf-8")
        self._lines, self._columns = csv.writer(self._file, lineterminator="\n"), list[str]()

    def __call__(self, step: int, numbers: Mapping[str, float], /) -> None:
        """Write a line.  Raises ValueError that names the numbers which are no columns; nothing is written then."""
        cells = checked(step, numbers)
        if not numbers and not self._columns:
            return
        if not self._columns:
            self._columns = list(cells)
            self._lines.writerow(self._columns)
        unknown = sorted(cells.keys() - set(self._columns))
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: not among the first call's columns {', '.join(self._columns)}")
        self._lines.writerow([cells.get(column, "") for column in self._columns])
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
