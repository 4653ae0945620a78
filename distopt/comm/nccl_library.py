"""What stands between a rank and NCCL: the library, its version, and a GPU that no other rank has."""

import functools
import json
import os
import pathlib
import platform
import warnings
from collections.abc import Sequence
from types import ModuleType

from distopt import device
from distopt.guard import agreed

MINIMUM = 21801  # the first that has all that cupy 14's binding looks for (ncclCommSplit)
SHARES_A_GPU = 23000  # the first that knows NCCL_MULTI_RANK_GPU_ENABLE
TAKES_PARTITIONS = 23000  # the first that tells GPUs apart by their UUID, which MIG partitions of one do not share
BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def binding() -> ModuleType:
    """cupy's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that NCCL is missing is said by nccl_state, in more words
        from cupy.cuda import nccl
    module: ModuleType = nccl
    return module


def nccl_version() -> int:
    """NCCL's version, as 22809 for 2.28.9."""
    return int(binding().get_version())


def library_path() -> str:
    """The file of the NCCL that is loaded."""
    maps = pathlib.Path("/proc/self/maps").read_text()
    return next((line.split()[-1] for line in maps.splitlines() if "libnccl" in line), "at an unknown place")


def version_text(version: int) -> str:
    """22809 as '2.28.9'."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def nccl_state() -> str:
    """'ok', or in one line why this process, which has cupy, cannot use NCCL and what would help."""
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
    """What the ranks of one new communicator must share: 128 bytes, to be handed to processes and to nobody else.

    NCCL's ranks find each other through the process that calls this, which must live until they have.

    Raises RuntimeError without cupy or NCCL.
    """
    state = "ok" if device.has_cupy() else device.NO_CUPY
    state = nccl_state() if state == "ok" else state
    if state != "ok":
        raise RuntimeError(state)
    try:
        return bytes(binding().get_unique_id())
    except Exception as error:
        raise RuntimeError(f"NCCL cannot make an id: {error}; NCCL_DEBUG=INFO says more") from error


def take_gpu(gpu: int | None, local_rank: int) -> int:
    """The number of the GPU to work on, which is this thread's from here on; RuntimeError if there is none."""
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


def seat(gpu: int, rank: int) -> str:
    """What NCCL tells GPUs apart by, the host's id and the bus's or the GPU's, and how to name it."""
    host = platform.node()
    known_as = os.environ.get("NCCL_HOSTID") or host + (BOOT_ID.read_text().strip() if BOOT_ID.exists() else "")
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and nccl_version() >= SHARES_A_GPU:
        known_as += f" rank {rank}"
    bus = device.bus_id(gpu)
    own = device.uuid(gpu) if nccl_version() >= TAKES_PARTITIONS else bus
    return json.dumps([[known_as, own], f"GPU {gpu} ({bus}) of host {host}"])


def one_gpu_each(seats: Sequence[str], rank: int) -> None:
    """ValueError, on every rank, if two ranks share a GPU: NCCL would refuse it later, or hang."""
    first: dict[tuple[str, ...], int] = {}
    for other, (key, name) in enumerate(map(json.loads, seats)):
        if (one := first.setdefault(tuple(key), other)) != other:
            raise agreed(
                ValueError(
                    f"ranks {one} and {other} are both on {name}, but NCCL wants a GPU for each rank: start fewer "
                    "ranks per host, show each rank another GPU (CUDA_VISIBLE_DEVICES), or use device='cpu'. For "
                    "tests, ranks can share a GPU if each has an NCCL_HOSTID of its own, or with "
                    "NCCL_MULTI_RANK_GPU_ENABLE=1 from NCCL 2.30 on"
                ),
                speaks=rank == 0,
            )
