"""The kernels' device text as libraries of this machine."""

import ctypes
import functools
import tempfile
from pathlib import Path

from simt.build import build


@functools.cache
def library(real):
    """``launch_<kernel>_<real>`` for every kernel."""
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(build(Path(folder), real)))
