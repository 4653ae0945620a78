"""CUDA C++ kernels: compilation for the current GPU, and launches."""

import ctypes
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from distopt.device.gpus import cupy, current_gpu, multiprocessors

Cached = Callable[[str, Callable[[], bytes], str], str]


def compile_text(name: str, text: str, headers: Mapping[str, str], options: Sequence[str], cached: Cached) -> Any:
    """Compile CUDA C++ for the current GPU, unless that was done before, and load it as a ``cupy.RawModule``."""
    # headers: texts, by the names under which they are included.
    # cached: `cached(source, compile, suffix)` returns the path of a file with what `compile()` makes of it.
    #
    # The compilation is not left to cupy, whose RawModule adds -ftz=true after all options of a text: a GPU would round
    # differently than a host.  For a GPU that is newer than this NVRTC the driver translates PTX.
    cuda = cupy().cuda
    nvrtc, capability = cuda.nvrtc, int(cuda.Device().compute_capability)
    supported = [a for a in nvrtc.getSupportedArchs() if a <= capability]
    if not supported:
        raise RuntimeError(
            f"NVRTC {nvrtc.getVersion()} does not compile for this GPU's compute capability {capability}"
        )
    native = capability in supported
    architecture = f"sm_{capability}" if native else f"compute_{max(supported)}"
    arguments = (*options, f"--gpu-architecture={architecture}")

    def compile_here() -> bytes:
        names, bodies = zip(*((h.encode(), body.encode()) for h, body in headers.items()), strict=True)
        program = nvrtc.createProgram(text, name, bodies, names)
        try:
            nvrtc.compileProgram(program, arguments)
            binary: bytes = nvrtc.getCUBIN(program) if native else nvrtc.getPTX(program)
            return binary
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise RuntimeError(f"{name} does not compile for {architecture}:\n{log}") from error
        finally:
            nvrtc.destroyProgram(program)

    source = json.dumps([name, text, dict(headers), arguments, list(nvrtc.getVersion())])
    return cupy().RawModule(path=cached(source, compile_here, ".cubin" if native else ".ptx"))


def launch(kernel: Any, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
    """Enqueue a kernel in the current stream."""
    # cupy passes an array of one element by value: the bytes of a number, or of a whole structure.
    values = [np.frombuffer(a, _bytes_dtype(ctypes.sizeof(a))) for a in arguments]
    kernel((blocks,), (threads,), values)


@functools.cache
def _bytes_dtype(nbytes: int) -> np.dtype:
    """Return the dtype of an element of so many bytes, whose making takes longer than the rest of an argument."""
    return np.dtype((np.void, nbytes))


@functools.cache
def resident_blocks(kernel: Any, threads: int) -> int:
    """Return how many blocks of a kernel the current GPU runs at once; the driver is asked once for each kernel."""
    # The driver, unlike the runtime, does not make a context current by itself.
    cupy().cuda.Device().use()
    blocks = cupy().cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(kernel.kernel.ptr, threads, 0)
    return int(blocks) * multiprocessors(current_gpu())
