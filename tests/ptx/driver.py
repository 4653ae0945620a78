"""cupy's own driver module and NVRTC for a run of pytest on the doubles of GPUs: ``-p ptx.driver``.

The GPUs are newer than cupy's NVRTC, so that the library hands PTX to the driver, made for the newest GPU that NVRTC
knows: to that of ``libcuda.cpp``, through cupy.  It loads all kernels here, of both real types, and then launches what
tests ask for.  RawModule and RawKernel themselves stay doubles: they first ask cudart for a context, which is a part of
cupy and wants a driver to prove that it is NVIDIA's.
"""

import ctypes
import itertools
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from cupy.cuda import driver, function, nvrtc
from test_kernels import compiler
from test_nvrtc import kernels_of

import ptx
from benchmarks.gpu_sass import TEXTS
from distopt.kernels.dispatch import KERNELS
from doubles import gpu
from ptx.translate import translate

_folder = tempfile.TemporaryDirectory(prefix="distopt-driver-")
paths: list[str] = []  # of PTX that was loaded


def _libcuda():
    """cupy asks for a library of this name, and finds that the process has it."""
    made = Path(_folder.name, "libcuda.so.1")
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{made.name}"]
    subprocess.run([compiler(), *flags, ptx.HERE / "libcuda.cpp", "-o", made, "-ldl"], check=True)
    return ctypes.CDLL(str(made))


libcuda = _libcuda()


class RawModule:
    """cupy.RawModule around cupy's own Module and Functions."""

    def __init__(self, *, path):
        self.module = function.Module()
        self.module.ptr = driver.moduleLoad(path)
        paths.append(path)

    def get_function(self, name):
        return RawKernel(name, self.module.get_function(name))


class RawKernel(gpu.RawKernel):
    """The double's, which launches by cupy's driver module; the PTX says how many bytes an argument has."""

    def __init__(self, name, kernel):
        self.name, self.kernel = name, kernel
        self.sizes = list(parameter_sizes(kernel))

    def launch(self, dims, shared_mem, addresses):
        driver.launchKernel(self.kernel.ptr, *dims, shared_mem, 0, ctypes.addressof(addresses), 0)


def parameter_sizes(kernel):
    """The bytes of each parameter of a function."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    for index in itertools.count():
        found = ctypes.byref(offset), ctypes.byref(size)
        if libcuda.cuFuncGetParamInfo(ctypes.c_void_p(kernel.ptr), ctypes.c_size_t(index), *found):
            return
        yield size.value


def _load(real):
    """Let the library find every kernel for a real type on GPU 0, and launches find what is loaded."""
    dtype = np.dtype({"float": np.float32, "double": np.float64}[real])
    for text in TEXTS:
        for name in kernels_of(text):
            KERNELS[name]._function(dtype, 0)
    loaded = [path for path in map(Path, paths) if f"_{real}(" in path.read_text()]
    found = [entry for path in loaded for entry in translate(path.read_text(), path.name)]
    libcuda.libcuda_translated(str(ptx.library(Path(_folder.name), f"ptx-{real}", found)).encode())


gpu.RawModule, gpu.Nvrtc, gpu.Device.compute_capability = RawModule, lambda: nvrtc, "999"
gpu.occupancy = driver.occupancyMaxActiveBlocksPerMultiprocessor
with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
    gpu.install(patch.setattr)
    list(pool.map(_load, ("float", "double")))
