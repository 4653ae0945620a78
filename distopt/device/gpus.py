"""The GPUs of this process, and cupy, the package by which they are reached."""

import functools
import importlib.util
import sys
from types import ModuleType

# cudaDevAttrMultiProcessorCount
MULTIPROCESSORS = 16
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
    """Return 'ok' if this process can use a GPU, else one line with the cause and a remedy; import cupy if it can."""
    if not has_cupy():
        return NO_CUPY
    try:
        count = gpu_count()
    except ImportError as error:
        return f"cupy is broken: {error}"
    except Exception as error:
        # cupy's own CUDARuntimeError, whose class is in the module that may have failed
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


def wait_for_gpu(number: int) -> None:
    """Wait, on the host, for all work enqueued on a GPU, in any stream."""
    before = current_gpu()
    use_gpu(number)
    try:
        cupy().cuda.runtime.deviceSynchronize()
    finally:
        use_gpu(before)


def gpu_name(number: int) -> str:
    """Return the product name of a GPU."""
    return str(cupy().cuda.runtime.getDeviceProperties(number)["name"].decode())


def bus_id(number: int) -> str:
    """Return the PCI bus ID of a GPU, as 0000:0f:00.0; MIG partitions of one GPU have the same."""
    # From the GPU's properties: cupy's `deviceGetPCIBusId` has no room for a domain of five digits.
    properties = cupy().cuda.runtime.getDeviceProperties(number)
    domain, bus, place = (properties[name] for name in ("pciDomainID", "pciBusID", "pciDeviceID"))
    return f"{domain:04x}:{bus:02x}:{place:02x}.0"


def uuid(number: int) -> str:
    """Return the UUID of a GPU or of a MIG partition, 32 hex digits that no other one has."""
    # cupy reads it as a C string: it ends at a zero byte, and without one continues after the 16 bytes.
    return bytes(cupy().cuda.runtime.getDeviceProperties(number)["uuid"])[:16].ljust(16, b"\0").hex()


def compute_mode(number: int) -> int:
    """Return who may use a GPU: 0 everybody, 2 nobody, 1 or 3 one process at a time."""
    return int(cupy().cuda.runtime.getDeviceProperties(number)["computeMode"])


def capability(number: int) -> int:
    """Return the compute capability of a GPU, such as 90 for 9.0."""
    return int(cupy().cuda.Device(number).compute_capability)


def reaches(number: int, other: int) -> bool:
    """Tell if a GPU can read and write the memory of another one (P2P)."""
    return bool(cupy().cuda.runtime.deviceCanAccessPeer(number, other))


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


def nvrtc_architectures() -> list[int]:
    """Return the compute capabilities for which NVRTC compiles; raises cupy's error if there is none."""
    return [int(a) for a in cupy().cuda.nvrtc.getSupportedArchs()]
