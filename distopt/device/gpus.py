"""Which GPUs this process has, and the package that reaches them."""

import functools
import importlib.util
import sys
from types import ModuleType

MULTIPROCESSORS = 16  # cudaDevAttrMultiProcessorCount
# By the error that the runtime answers when it is asked for GPUs: what it means, and what to do.
REMEDIES = {
    35: "no CUDA driver, or one too old for this cupy: it takes a machine with an NVIDIA GPU and a driver of that CUDA",
    100: "the CUDA driver sees no GPU: check CUDA_VISIBLE_DEVICES, and that nvidia-smi lists one here",
    802: "the GPUs are not ready: start nvidia-fabricmanager, of the driver's version, and look again",
    803: "driver and kernel module are of different versions: restart the machine, or load the module anew",
    804: "this GPU cannot run a newer CUDA than its driver's: install cupy for the driver's CUDA",
    999: "the CUDA driver fails: nvidia-smi and dmesg say why; often nvidia-uvm is not loaded, or the GPU was reset",
}
OTHERWISE = "CUDA does not start: it takes a machine with an NVIDIA GPU and its driver; nvidia-smi says more"
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
        status, name = int(getattr(error, "status", 0)), str(error).partition(":")[0]
        cause, _, remedy = REMEDIES.get(status, OTHERWISE).partition(": ")
        return f"{cause} ({name}): {remedy}"
    return "ok" if count else REMEDIES[100]


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


def uuid(number: int) -> str:
    """What tells a GPU, or a MIG partition of one, apart from all others."""
    return bytes(cupy().cuda.runtime.getDeviceProperties(number)["uuid"]).hex()


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
