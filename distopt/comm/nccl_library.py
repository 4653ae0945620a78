"""NCCL's library and its version, and the choice of a GPU for each rank."""

import ctypes
import functools
import json
import os
import pathlib
import platform
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from distopt import device
from distopt.comm.control import agreed

MINIMUM = 21801  # first version with all functions that cupy 14's binding needs (ncclCommSplit)
SHARES_A_GPU = 23000  # first version with NCCL_MULTI_RANK_GPU_ENABLE
# first version that identifies GPUs by UUID, which differs between MIG partitions of one GPU
TAKES_PARTITIONS = 23000
WINDOWS = 22703  # first version with ncclCommWindowRegister
# NCCL_WIN_COLL_SYMMETRIC: in a collective each rank gives the same place of its window
SYMMETRIC = 1
REGISTER = "DISTOPT_NCCL_REGISTER"
# Two communicators of one GPU, of which a user or another library may make the second, deadlock without it: NCCL then
# starts their kernels in the order in which the host calls it (from 2.26 on).
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def binding() -> ModuleType:
    """Return cupy's module of NCCL's functions, ``cupy.cuda.nccl``."""
    # NCCL reads its variables at its first call, so LAUNCH_ORDER is set here, unless the user has set it.
    os.environ.setdefault(LAUNCH_ORDER, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nccl_state reports a missing NCCL, in more detail
        from cupy.cuda import nccl
    module: ModuleType = nccl
    return module


def nccl_version() -> int:
    """Return NCCL's version, such as 22809 for 2.28.9."""
    return int(binding().get_version())


def library_paths() -> list[str]:
    """Return the paths of the NCCL libraries that this process has loaded."""
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return list(dict.fromkeys(line.split(maxsplit=5)[-1] for line in maps if "/libnccl" in line))


@functools.cache
def library() -> Any:
    """Return the NCCL library that cupy's binding is linked to, for the functions that the binding lacks."""
    # and what that depends on
    linked = ctypes.CDLL(sys.modules[binding().NcclCommunicator.__module__].__file__)
    version = ctypes.c_int()
    if linked.ncclGetVersion(ctypes.byref(version)) or version.value != nccl_version():
        raise RuntimeError(
            f"{REGISTER}=1 needs one NCCL library in a process, got {version_text(version.value)} beside "
            f"{version_text(nccl_version())}: import cupy before what brings the other one, or do not set it"
        )
    return linked


def memory_alloc(nbytes: int) -> int:
    """Allocate memory of the current GPU that NCCL can register, and return its address."""
    address = ctypes.c_void_p()
    if status := library().ncclMemAlloc(ctypes.byref(address), ctypes.c_size_t(nbytes)):
        raise MemoryError(
            f"NCCL cannot allocate {nbytes} bytes of GPU memory for buckets: {binding().NcclError(status)}"
        )
    return address.value or 0


def memory_free(address: int) -> None:
    """Free memory of ``memory_alloc``, which must not be registered any more."""
    _check(library().ncclMemFree(ctypes.c_void_p(address)))


class Registration:
    """Memory of ``memory_alloc`` that a communicator reads and writes without a copy.  Making one is collective."""

    # It is a window from NCCL 2.27 on, which ranks on NVLink reach in each other's memory.

    def __init__(self, comm: Any, address: int, nbytes: int):
        # nbytes: its size, the same on every rank
        self._comm, self._window, self._handle = comm, ctypes.c_void_p(), ctypes.c_void_p()
        whole = ctypes.c_void_p(comm.comm), ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
        if nccl_version() >= WINDOWS:
            _check(library().ncclCommWindowRegister(*whole, ctypes.byref(self._window), SYMMETRIC))
        # no window is made for ranks that cannot reach each other's memory
        if not self._window.value:
            _check(library().ncclCommRegister(*whole, ctypes.byref(self._handle)))

    def end(self) -> None:
        """Deregister the memory, while the communicator is there and none of its collectives uses it."""
        comm = ctypes.c_void_p(self._comm.comm)
        if self._window.value:
            _check(library().ncclCommWindowDeregister(comm, self._window))
        else:
            _check(library().ncclCommDeregister(comm, self._handle))


def _check(status: int) -> None:
    if status:
        raise binding().NcclError(status)


def registers() -> bool:
    """Tell if buckets are registered with NCCL: DISTOPT_NCCL_REGISTER is 1; by default they are not."""
    value = os.environ.get(REGISTER, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{REGISTER} must be 0 or 1, or not set, got {value!r}")
    return value == "1"


def version_text(version: int) -> str:
    """Return a version number as text.

    Example:
        >>> version_text(22809)
        '2.28.9'
    """
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def nccl_state() -> str:
    """Return 'ok', or one line on why this process cannot use NCCL and what would help.  It must have cupy."""
    install = "pip install 'distopt[cuda13]' (or [cuda12])"
    if not getattr(binding(), "available", False):
        return f"NCCL is not installed, or cannot be loaded: {install} brings it"
    try:
        version = nccl_version()
    except Exception as error:  # NcclError, whose class may be missing with the library
        return f"NCCL does not say its version: {error}"
    if version < MINIMUM:
        return (
            f"NCCL {version_text(version)} is too old, {version_text(MINIMUM)} is wanted: {install} brings a newer one"
        )
    return "ok"


def nccl_unique_id() -> bytes:
    """Return a new NCCL id, 128 bytes, which all ranks of one communicator must have.

    It is a secret: hand it to the processes of the job only.  NCCL's ranks find each other through the process that
    calls this function, which must live until they have done so.

    Raises:
        RuntimeError: there is no cupy or NCCL, or NCCL fails.

    Example:
        Skipped where examples run as tests: it needs cupy and NCCL.

        >>> from distopt.comm import nccl_unique_id
        >>> len(nccl_unique_id())  # doctest: +SKIP
        128
    """
    state = "ok" if device.has_cupy() else device.NO_CUPY
    state = nccl_state() if state == "ok" else state
    if state != "ok":
        raise RuntimeError(state)
    try:
        return bytes(binding().get_unique_id())
    except Exception as error:
        raise RuntimeError(f"NCCL cannot make an id: {error}; NCCL_DEBUG=INFO says more") from error


def select_gpu(gpu: int | None, local_rank: int) -> int:
    """Choose a GPU, make it this thread's current one, and return its number."""
    # gpu: number of the GPU; None for `local_rank` modulo the number of GPUs that this process sees.
    state = device.gpu_state()
    state = nccl_state() if state == "ok" else state
    if state != "ok":
        raise RuntimeError(f"no GPU for NCCL: {state}; or use device='cpu'")
    count = device.gpu_count()
    number = local_rank % count if gpu is None else gpu
    if not 0 <= number < count:
        raise ValueError(f"gpu must be a number from 0 to {count - 1}, the GPUs that this process sees, got {number}")
    device.use_gpu(number)
    return number


def gpu_identity(gpu: int, rank: int) -> str:
    """Return a JSON text ``[key, name, place, alone]`` of a rank's GPU."""
    # The key is how NCCL identifies a GPU: the host's id with the bus id or the UUID.  The name is for error texts.
    # The place is the host with the bus id; `alone` is None if this process sees other GPUs, else CUDA_VISIBLE_DEVICES.
    host = platform.node()
    host_id = os.environ.get("NCCL_HOSTID") or host + (BOOT_ID.read_text().strip() if BOOT_ID.exists() else "")
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and nccl_version() >= SHARES_A_GPU:
        host_id += f" rank {rank}"
    bus = device.bus_id(gpu)
    gpu_id = device.uuid(gpu) if nccl_version() >= TAKES_PARTITIONS else bus
    alone = os.environ.get("CUDA_VISIBLE_DEVICES", "") if device.gpu_count() == 1 else None
    return json.dumps([[host_id, gpu_id], f"GPU {gpu} ({bus}) of host {host}", [host, bus], alone])


def isolated(identities: Sequence[str]) -> str:
    """Return advice if a host's ranks see a GPU each that the others cannot see; '' for none."""
    # Where CUDA_VISIBLE_DEVICES alone gives each rank another GPU, it differs, and NCCL still reaches all of them.
    places: dict[tuple[str, str], set[str]] = {}
    for _, _, (host, bus), alone in map(json.loads, identities):
        if alone is not None:
            places.setdefault((host, alone), set()).add(bus)
    hosts = [host for (host, _), buses in places.items() if len(buses) > 1]
    if not hosts:
        return ""
    return (
        f"ranks of host {hosts[0]} see one GPU each and not those of the others: NCCL then moves their data through "
        "the host's memory in place of NVLink; show each rank all GPUs (Slurm: --gpus-per-node=N --gpu-bind=none in "
        "place of --gpus-per-task=1; containers: --gpus all)"
    )


def check_one_gpu_each(identities: Sequence[str], rank: int) -> None:
    """Check that no two ranks share a GPU, which NCCL would refuse later, or hang; ValueError on every rank."""
    first: dict[tuple[str, ...], int] = {}
    for peer, (key, name, *_) in enumerate(map(json.loads, identities)):
        if (first_rank := first.setdefault(tuple(key), peer)) != peer:
            raise agreed(
                ValueError(
                    f"each rank must be on a GPU of its own for NCCL, got ranks {first_rank} and {peer} on {name}; "
                    "start fewer ranks per host, show each rank another GPU (CUDA_VISIBLE_DEVICES), or use "
                    "device='cpu'. For tests, ranks can share a GPU if each has an NCCL_HOSTID of its own, or with "
                    "NCCL_MULTI_RANK_GPU_ENABLE=1 from NCCL 2.30 on"
                ),
                speaks=rank == 0,
            )
