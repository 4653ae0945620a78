"""Which GPUs this process has, and the package that reaches them."""

import functools
import importlib.util
import sys
from types import ModuleType

MULTIPROCESSORS = 16  # cudaDevAttrMultiProcessorCount
NO_CUPY = "cupy is not installed: pip install 'distopt[cuda13]' (or [cuda12])"


@functools.cache
def cupy() -> ModuleType:
    """The package, imported when it is first asked for."""
    import cupy

    module: ModuleType = cupy
    return module


def has_cupy() -> bool:
    """Is it installed?  Does not import it."""
    return "cupy" in sys.modules or importlib.util.find_spec("cupy") is not None


def gpu_state() -> str:
    """'ok', or in one line why this process cannot use a GPU and what would help; imports cupy if it is installed."""
    if not has_cupy():
        return NO_CUPY
    try:
        count = gpu_count()
    except ImportError as error:
        return f"cupy is broken: {error}"
    except Exception as error:  # cupy's own CUDARuntimeError; its class lives in the module that may have failed
        name = str(error).partition(":")[0]
        return f"no CUDA driver ({name}): it takes a machine with an NVIDIA GPU and its driver"
    return "ok" if count else "the CUDA driver sees no device: check CUDA_VISIBLE_DEVICES"


def gpu_count() -> int:
    """GPUs that this process sees."""
    return int(cupy().cuda.runtime.getDeviceCount())


def current_gpu() -> int:
    """The GPU of this thread."""
    return int(cupy().cuda.runtime.getDevice())


def use_gpu(number: int) -> None:
    """Let this thread's arrays and kernels live on a GPU."""
    cupy().cuda.Device(number).use()


def gpu_name(number: int) -> str:
    """What a GPU is called."""
    return str(cupy().cuda.runtime.getDeviceProperties(number)["name"].decode())


def bus_id(number: int) -> str:
    """What tells a GPU apart from all others of this host."""
    return str(cupy().cuda.runtime.deviceGetPCIBusId(number))


@functools.cache
def multiprocessors(number: int) -> int:
    """How many of them a GPU has."""
    return int(cupy().cuda.runtime.deviceGetAttribute(MULTIPROCESSORS, number))


def driver_version() -> int:
    """The newest CUDA that the driver knows, as 13000 for 13.0; 0 without a driver."""
    return int(cupy().cuda.runtime.driverGetVersion())


def nvrtc_version() -> tuple[int, int]:
    """The version of the compiler for GPUs.  Raises what cupy raises if there is none."""
    major, minor = cupy().cuda.nvrtc.getVersion()
    return int(major), int(minor)
