"""Compiled kernels on disk, so that a job compiles each text once, and the next job none.

A file is named by what it was compiled from and by what it holds, ``SOURCE-CONTENT.cubin``, two SHA-256 in
hexadecimal, so that a damaged one is not taken.  It appears at once, by a rename; of the ranks of a host one compiles,
and the others wait for it.
"""

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import pathlib
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator

from distopt.io.pending import prepare

PATIENCE = 60.0  # seconds to wait for another rank, which may have been stopped, before compiling here too


def cached(source: str, compile_source: Callable[[], bytes], suffix: str = ".cubin") -> str:
    """Return the path of a compiled file, which is made if it is not there."""
    directory, key = folder(), hashlib.sha256(source.encode()).hexdigest()
    with _alone(directory / f"{key}.lock"):
        for path in directory.glob(f"{key}-*{suffix}"):
            if path.name == _name(key, path.read_bytes(), suffix):
                return str(path)
            path.unlink(missing_ok=True)
        binary = compile_source()
        path = directory / _name(key, binary, suffix)
        prepare(path, binary, durable=False).commit()
    return str(path)


@functools.cache
def folder() -> pathlib.Path:
    """Return the folder of compiled kernels: ``DISTOPT_CACHE``, else ``distopt`` in the user's cache."""
    chosen = os.environ.get("DISTOPT_CACHE")
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    directory = pathlib.Path(chosen) if chosen else base / "distopt"
    # Whoever may write to it decides what the GPU runs: a folder that others may write to is not used.
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{directory} must be the user's own, and writable by nobody else")
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError:
        if chosen:
            raise
    # Nothing can be written there: the kernels of this process alone, which end with it.
    temporary = tempfile.mkdtemp(prefix="distopt-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return pathlib.Path(temporary)


def _name(key: str, binary: bytes, suffix: str) -> str:
    return f"{key}-{hashlib.sha256(binary).hexdigest()}{suffix}"


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[None]:
    """Admit one process of a host at a time, as far as the file system has locks."""
    with open(path, "w") as lock:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # a file system without locks
                break
        # Closing the file ends the lock, and so does the end of the process.
        yield
