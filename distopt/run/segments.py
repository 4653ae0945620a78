"""Shared memory that ranks of MPI leave behind if they do not come to MPI_Finalize."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from distopt.resilience import job

FOLDER = Path("/dev/shm")


class Left(NamedTuple):
    """A segment of this user that no process maps any more."""

    path: Path
    nbytes: int


def sweep(ranks: Iterable[job.Rank]) -> None:
    """Remove the segments that the ranks of a failed job have mapped; all of them must have ended."""
    for name in {name for rank in ranks for name in rank.marks.get(job.SEGMENT, ())}:
        with contextlib.suppress(OSError):
            (FOLDER / name).unlink()


def left() -> list[Left]:
    """Return the segments that failed jobs have left on this machine."""
    segments = []
    # Those that a process maps, as far as this user may look.
    mapped = {name for maps in Path("/proc").glob("[0-9]*/maps") for name in job.segments(maps)}
    for path in (path for path in FOLDER.iterdir() if path.name.startswith(job.SEGMENTS)):
        with contextlib.suppress(OSError):
            about = path.stat()
            if about.st_uid == os.geteuid() and path.name not in mapped:
                segments.append(Left(path, about.st_size))
    return sorted(segments)
