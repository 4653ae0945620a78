"""What ``distopt doctor`` has each GPU do, in a process of its own: ``python -m distopt.run.doctor_trial``."""

import json
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from distopt import device, kernels
from distopt.comm import NcclCommunicator, nccl_unique_id

ELEMENTS = 100_003  # several blocks, the last one not whole


class Work(NamedTuple):
    """One piece of work."""

    # run: does it on a GPU, given its number; returns what came of it, which must be `x + x`
    run: Callable[[int, np.ndarray], np.ndarray]
    remedy: str


def add(gpu: int, x: np.ndarray) -> np.ndarray:
    """Compile a kernel of distopt, and add two arrays with it."""
    terms = [_there(x), _there(x)]
    kernels.accumulate(*terms)
    return device.host_copy(terms[1])


def sum_over_nccl(gpu: int, x: np.ndarray) -> np.ndarray:
    """Sum an array over one rank."""
    comm = NcclCommunicator.from_id(nccl_unique_id(), 0, 1, gpu)
    there = _there(x + x)
    comm.all_reduce(there)
    comm.wait()
    found = device.host_copy(there)
    comm.close()
    return found


WORK = {
    "a kernel": Work(
        add, "the driver must be for NVRTC's CUDA, and the GPU be free: nvidia-smi; dmesg tells errors of the GPU (Xid)"
    ),
    "a sum over NCCL": Work(
        sum_over_nccl,
        "NCCL_DEBUG=INFO python -m distopt.run.doctor_trial says more; NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 leave "
        "out the network",
    ),
}


def _there(x: np.ndarray) -> np.ndarray:
    """Return a copy on the current GPU."""
    y: np.ndarray = device.array_module().empty(x.shape, x.dtype)
    device.copy(y, x)
    return y


def main() -> None:
    """Write a line ``[gpu, work, error]`` for each GPU and each piece of work, '' for no error."""
    x = np.arange(ELEMENTS, dtype=np.float32)
    for gpu in range(device.gpu_count()):
        for name, work in WORK.items():
            try:
                device.use_gpu(gpu)
                wrong = int(np.count_nonzero(work.run(gpu, x) != x + x))
                error = f"{wrong} of {ELEMENTS} numbers are wrong" if wrong else ""
            except Exception as problem:
                error = " ".join(f"{type(problem).__name__}: {problem}".split())
            print(json.dumps([gpu, name, error]), flush=True)


if __name__ == "__main__":
    main()
