"""The kernels' device text as libraries of this machine, built once for this process and those that it starts."""

import ctypes
import functools
import os
import tempfile
import threading
from pathlib import Path

from distopt.kernels.signatures import source_hash
from simt.build import build, folder

_one_builds = threading.Lock()


def library(real):
    """``launch_<kernel>_<real>`` for every kernel."""
    with _one_builds:
        return _library(real)


@functools.cache
def _library(real):
    kept = folder() / f"device-{real}-{source_hash()[:16]}.so"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=kept.parent) as draft:
            os.replace(build(Path(draft), real), kept)
    return ctypes.CDLL(str(kept))
