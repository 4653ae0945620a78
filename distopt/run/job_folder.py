"""The folder in which a job's ranks leave marks: removed at its end, or by a later job if its launcher is killed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from distopt.resilience import job
from distopt.run import segments

PREFIX = "distopt-job-"


@contextlib.contextmanager
def job_folder() -> Iterator[Path]:
    """Return a context with a new folder for marks, which removes what launchers that were killed have left."""
    sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: nobody sweeps there
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(folder)
            _forget(Path(name))


def sweep(parent: Path) -> None:
    """Remove the folders of this user's jobs that have ended without their launcher, and the memory of their ranks."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            _sweep(folder)


def _forget(folder: Path) -> None:
    """Remove what the ranks of a job have kept in memory."""
    memory = job.memory(folder)
    if memory and not memory.is_symlink():
        shutil.rmtree(memory, ignore_errors=True)


def _sweep(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ranks = job.entered(folder)  # none: it may be about to be locked
        if os.fstat(handle).st_uid == os.geteuid() and ranks and all(job.state(rank.pid) in "ZX" for rank in ranks):
            segments.sweep(ranks)
            _forget(folder)
            with contextlib.suppress(FileNotFoundError):
                for path in (folder / job.REQUESTS).iterdir():
                    path.unlink()
                (folder / job.REQUESTS).rmdir()
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
    finally:
        os.close(handle)
