"""``floor.cpp``, compiled for this very CPU: what plain C does in one pass over memory."""

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np


@functools.cache
def library():
    """The compiled functions; needs the C++ compiler that distopt's own build needs."""
    source = Path(__file__).with_suffix(".cpp")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "floor.so"
        flags = ["-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC"]
        subprocess.run([os.environ.get("CXX", "g++"), *flags, "-o", path, source], check=True)
        return ctypes.CDLL(str(path))


def update(rule, p, g, m, v=None, scale=1.0, lr=0.01, decay=1e-4):
    """One pass of an update rule over flat float32 arrays."""
    arrays = [ctypes.c_void_p(a.ctypes.data if a is not None else None) for a in (p, g, m, v)]
    getattr(library(), rule)(ctypes.c_longlong(p.size), *arrays, *map(ctypes.c_float, (scale, lr, decay)))


def read_pass(x):
    """The sum of a float32 array, at the speed of memory."""
    function = library().read_pass
    function.argtypes, function.restype = [ctypes.c_longlong, ctypes.c_void_p], ctypes.c_float
    return function(x.size, x.ctypes.data)


def flat(arrays: list[np.ndarray], zeros):
    """A flat array for all of them, each at a multiple of 64 bytes, and its views."""
    room = np.array([-(-a.size // 16) * 16 for a in arrays])
    memory = zeros(int(room.sum()), np.float32)
    starts = (np.cumsum(room) - room).tolist()
    return memory, [memory[s : s + a.size].reshape(a.shape) for s, a in zip(starts, arrays, strict=True)]
