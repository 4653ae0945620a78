"""The kernels' device text as libraries of this machine, built once for this process and those that it starts."""

import ctypes
import functools
import os
import tempfile
import threading
from pathlib import Path

from simt.build import build

FOLDER = "DISTOPT_SHIM"
_one_builds = threading.Lock()


def library(real):
    """``launch_<kernel>_<real>`` for every kernel."""
    with _one_builds:
        return _library(real)


@functools.cache
def _library(real):
    kept = Path(os.environ.get(FOLDER) or _folder().name) / f"device-{real}.so"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=kept.parent) as draft:
            os.replace(build(Path(draft), real), kept)
    return ctypes.CDLL(str(kept))


@functools.cache
def _folder():
    """Where the libraries are until this process ends."""
    made = tempfile.TemporaryDirectory()
    os.environ[FOLDER] = made.name
    return made
