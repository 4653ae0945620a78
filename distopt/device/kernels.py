"""CUDA C++ kernels: compilation for the current GPU, and launches."""

import ctypes
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from distopt.device.gpus import cupy, current_gpu, multiprocessors
from distopt.device.streams import current_stream

_thread = threading.local()


def compile_text(name: str, text: str, headers: Mapping[str, str], options: Sequence[str]) -> Any:
    """Compile CUDA C++ for the current GPU, and load it.

    cupy's own RawModule would add --ftz=true, with which a GPU rounds differently than a host.  For a GPU that is newer
    than this NVRTC the driver translates PTX.

    Args:
        name: the program's name, for the compiler's log.
        text: the source.
        headers: the texts of headers, by the names under which they are included.
        options: options of NVRTC.

    Returns:
        cupy's Module.

    Raises:
        RuntimeError: NVRTC does not support the GPU, or the text does not compile; then it has the compiler's log.
    """
    cuda = cupy().cuda
    nvrtc, capability = cuda.nvrtc, int(cuda.Device().compute_capability)
    supported = [a for a in nvrtc.getSupportedArchs() if a <= capability]
    if not supported:
        raise RuntimeError(
            f"NVRTC {nvrtc.getVersion()} does not compile for this GPU's compute capability {capability}"
        )
    architecture = f"sm_{capability}" if capability in supported else f"compute_{max(supported)}"
    names, bodies = zip(*((h.encode(), body.encode()) for h, body in headers.items()), strict=True)
    program = nvrtc.createProgram(text, name, bodies, names)
    try:
        nvrtc.compileProgram(program, (*options, f"--gpu-architecture={architecture}"))
        binary = nvrtc.getCUBIN(program) if capability in supported else nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{name} does not compile for {architecture}:\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    module = cuda.function.Module()
    module.load(binary)
    return module


def launch(function: Any, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
    """Enqueue a kernel in the current stream.

    Args:
        function: a function of a module from ``compile_text``.
        blocks: the number of thread blocks, in one dimension.
        threads: the number of threads in a block.
        arguments: ctypes objects, which may be structures passed by value.
    """
    _need_context()
    values = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    stream, shape = current_stream().ptr, (blocks, 1, 1, threads, 1, 1)
    cupy().cuda.driver.launchKernel(function.ptr, *shape, 0, stream, ctypes.addressof(values), 0)


@functools.cache
def resident_blocks(function: Any, threads: int) -> int:
    """Return how many blocks of a kernel the current GPU runs at once; the driver is asked once for each kernel.

    Args:
        function: a function of a module from ``compile_text``.
        threads: the number of threads in a block.
    """
    _need_context()
    blocks = cupy().cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(function.ptr, threads, 0)
    return int(blocks) * multiprocessors(current_gpu())


def _need_context() -> None:
    """Make a context of the driver current in this thread, which it, unlike the runtime, does not do by itself."""
    if not hasattr(_thread, "has_context"):
        cupy().cuda.Device().use()
        _thread.has_context = True
