"""Kernels: CUDA C++, compiled for the GPU at hand, and launched."""

import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from distopt.device.gpus import cupy
from distopt.device.streams import current_stream

_thread = threading.local()


def compile_text(name: str, text: str, headers: Mapping[str, str], options: Sequence[str]) -> Any:
    """Compile CUDA C++ for the current GPU and load it; cupy's Module.

    cupy's own RawModule would add --ftz=true, with which a GPU rounds otherwise than a host.  For a GPU that is newer
    than this NVRTC the driver translates PTX.  Raises RuntimeError with the compiler's log.
    """
    cuda = cupy().cuda
    nvrtc, own = cuda.nvrtc, int(cuda.Device().compute_capability)
    known = [a for a in nvrtc.getSupportedArchs() if a <= own]
    if not known:
        raise RuntimeError(f"NVRTC {nvrtc.getVersion()} does not compile for this GPU's compute capability {own}")
    architecture = f"sm_{own}" if own in known else f"compute_{max(known)}"
    names, bodies = zip(*((h.encode(), body.encode()) for h, body in headers.items()), strict=True)
    program = nvrtc.createProgram(text, name, bodies, names)
    try:
        nvrtc.compileProgram(program, (*options, f"--gpu-architecture={architecture}"))
        binary = nvrtc.getCUBIN(program) if own in known else nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{name} does not compile for {architecture}:\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    module = cuda.function.Module()
    module.load(binary)
    return module


def launch(function: Any, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
    """Enqueue a kernel of a module; the arguments are ctypes objects, structures by value among them."""
    if not hasattr(_thread, "has_context"):
        cupy().cuda.Device().use()  # the driver, unlike the runtime, does not make one current by itself
        _thread.has_context = True
    values = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    stream, shape = current_stream().ptr, (blocks, 1, 1, threads, 1, 1)
    cupy().cuda.driver.launchKernel(function.ptr, *shape, 0, stream, ctypes.addressof(values), 0)
