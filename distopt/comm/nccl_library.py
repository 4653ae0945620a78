"""NCCL's library and its version, and the choice of a GPU for each rank."""

import functools
import json
import os
import pathlib
import platform
import warnings
from collections.abc import Sequence
from types import ModuleType

from distopt import device
from distopt.comm.control import agreed

MINIMUM = 21801  # first version with all functions that cupy 14's binding needs (ncclCommSplit)
SHARES_A_GPU = 23000  # first version with NCCL_MULTI_RANK_GPU_ENABLE
TAKES_PARTITIONS = 23000  # first version that identifies GPUs by UUID, which differs between MIG partitions of one GPU
BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def binding() -> ModuleType:
    """Return cupy's module of NCCL's functions, ``cupy.cuda.nccl``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nccl_state reports a missing NCCL, in more detail
        from cupy.cuda import nccl
    module: ModuleType = nccl
    return module


def nccl_version() -> int:
    """Return NCCL's version, such as 22809 for 2.28.9."""
    return int(binding().get_version())


def library_path() -> str:
    """Return the path of the NCCL library that is loaded, or 'at an unknown place'."""
    maps = pathlib.Path("/proc/self/maps").read_text()
    return next((line.split()[-1] for line in maps.splitlines() if "libnccl" in line), "at an unknown place")


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
    """Choose a GPU, make it this thread's current one, and return its number.

    Args:
        gpu: number of the GPU; None for ``local_rank`` modulo the number of GPUs that this process sees.
        local_rank: this rank's number among the ranks of its host.

    Raises:
        RuntimeError: there is no usable GPU or NCCL.
        ValueError: this process does not see a GPU of that number.
    """
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
    """Return a JSON text ``[key, name]`` of a rank's GPU.

    The key is how NCCL identifies a GPU: the host's id with the bus id or the UUID.  The name is for error texts.
    """
    host = platform.node()
    host_id = os.environ.get("NCCL_HOSTID") or host + (BOOT_ID.read_text().strip() if BOOT_ID.exists() else "")
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and nccl_version() >= SHARES_A_GPU:
        host_id += f" rank {rank}"
    bus = device.bus_id(gpu)
    gpu_id = device.uuid(gpu) if nccl_version() >= TAKES_PARTITIONS else bus
    return json.dumps([[host_id, gpu_id], f"GPU {gpu} ({bus}) of host {host}"])


def check_one_gpu_each(identities: Sequence[str], rank: int) -> None:
    """Check that no two ranks share a GPU, which NCCL would refuse later, or hang.

    Args:
        identities: the text of ``gpu_identity`` of each rank, ``(size,)``.
        rank: this rank.

    Raises:
        ValueError: on every rank alike, if two ranks share a GPU.
    """
    first: dict[tuple[str, ...], int] = {}
    for peer, (key, name) in enumerate(map(json.loads, identities)):
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
