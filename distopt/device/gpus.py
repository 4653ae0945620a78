"""The GPUs of this process, and cupy, the package by which they are reached."""

import functools
import importlib.util
import sys
from types import ModuleType

MULTIPROCESSORS = 16  # cudaDevAttrMultiProcessorCount
# Cause and remedy, by the error that the CUDA runtime returns when it is asked for GPUs.
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
    """Return the module cupy, which is imported at the first call."""
    import cupy

    module: ModuleType = cupy
    return module


def has_cupy() -> bool:
    """Tell if cupy is installed, without importing it."""
    return "cupy" in sys.modules or importlib.util.find_spec("cupy") is not None


def gpu_state() -> str:
    """Return 'ok' if this process can use a GPU, else one line with the cause and a remedy.

    cupy is imported if it is installed.
    """
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
    """Return the number of GPUs that this process sees."""
    return int(cupy().cuda.runtime.getDeviceCount())


def current_gpu() -> int:
    """Return the number of this thread's current GPU."""
    return int(cupy().cuda.runtime.getDevice())


def use_gpu(number: int) -> None:
    """Make a GPU the current one of this thread, for its arrays and kernels."""
    cupy().cuda.Device(number).use()


def gpu_name(number: int) -> str:
    """Return the product name of a GPU."""
    return str(cupy().cuda.runtime.getDeviceProperties(number)["name"].decode())


def bus_id(number: int) -> str:
    """Return the PCI bus ID of a GPU, which is unique on this host."""
    return str(cupy().cuda.runtime.deviceGetPCIBusId(number))


def uuid(number: int) -> str:
    """Return the UUID of a GPU or of a MIG partition, 32 hex digits that no other one has."""
    return bytes(cupy().cuda.runtime.getDeviceProperties(number)["uuid"]).hex()


@functools.cache
def multiprocessors(number: int) -> int:
    """Return the number of multiprocessors of a GPU."""
    return int(cupy().cuda.runtime.deviceGetAttribute(MULTIPROCESSORS, number))


def driver_version() -> int:
    """Return the newest CUDA version that the driver supports, as 13000 for 13.0; 0 without a driver."""
    return int(cupy().cuda.runtime.driverGetVersion())


def nvrtc_version() -> tuple[int, int]:
    """Return the major and minor version of NVRTC, the compiler for GPUs; raises cupy's error if there is none."""
    major, minor = cupy().cuda.nvrtc.getVersion()
    return int(major), int(minor)
