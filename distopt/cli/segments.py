"""The shared memory that MPICH's ranks leave behind when they do not come to MPI_Finalize: /dev/shm/mpich_shm_*."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from distopt import job

FOLDER, PREFIX = Path("/dev/shm"), "mpich_shm_"


class Left(NamedTuple):
    """A segment of this user that no process maps any more."""

    path: Path
    nbytes: int


def sweep(ranks: Iterable[job.Rank]) -> None:
    """Remove what the ranks of a failed job have mapped; they have all ended."""
    for name in {name for rank in ranks for name in rank.marks.get(job.SEGMENT, ())}:
        with contextlib.suppress(OSError):
            (FOLDER / name).unlink()


def left() -> list[Left]:
    """What jobs that failed have left here."""
    found = []
    mapped = _mapped()
    for path in FOLDER.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            about = path.stat()
            if about.st_uid == os.geteuid() and path.name not in mapped:
                found.append(Left(path, about.st_size))
    return sorted(found)


def _mapped() -> set[str]:
    """The names of all segments that a process maps, if its owner may look."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found.update(Path(line.split()[5]).name for line in maps.read_text().splitlines() if PREFIX in line)
    return found
