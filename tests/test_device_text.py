"""Law 8 without a GPU: what the texts say for a device, run by the CPU thread for thread, gives the host's bits.

The device's loops (16-byte accesses, chunks found by bisection, grid strides, atomics, look-back) are compiled by the
host's compiler; blocks, warps and lanes run in shuffled order.  What this cannot show is the GPU's own arithmetic, how
it orders memory, and its timing.
"""

import ctypes

import numpy as np
import pytest

import laws
from distopt import kernels, run_ranks
from simt.build import build
from simt.device import Device, use
from test_kernels import SIZES, members

GRIDS = [(1, 256, 0), (3, 64, 1), (7, 128, 2), (2, 256, 3)]  # blocks, threads, seed


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """All texts, compiled as for a device."""
    folder = tmp_path_factory.mktemp("simt")
    return {real: ctypes.CDLL(str(build(folder, real))) for real in ("float", "double")}


@pytest.fixture(params=GRIDS, ids=lambda g: "{} blocks of {}, order {}".format(*g))
def on_device(request, libraries, monkeypatch):
    """A function that switches all kernels to the device's text."""
    return lambda: use(monkeypatch, Device(libraries, *request.param))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_mode_and_optimizer_gives_the_same_bits(on_device, dtype):
    def main(comm):
        found = [laws.digest(laws.train(comm, mode=mode, dtype=dtype)[0]) for mode in laws.MODES]
        return found + [laws.digest(laws.train(comm, make=make, dtype=dtype)[0]) for make in laws.OPTIMIZERS.values()]

    host = run_ranks(2, main)
    on_device()
    assert run_ranks(2, main) == host


def test_chunks_of_tensors_of_every_size(on_device):
    """Empty tensors between others, exact multiples of a chunk, and one element more or less."""
    results = []
    for side in ("host", "device"):
        if side == "device":
            on_device()
        table, arrays = members([0, *SIZES, 0, 0, 3, 0], seed=4)
        arrays[5][3] = np.nan
        flat, bad = np.zeros(table.extent, np.float32), np.zeros(len(arrays), np.int64)
        kernels.pack(table, flat, 0.3, bad)
        kernels.sgd(table, flat, 1.0, 2.0, 0.1, 0.01)
        kernels.unpack(table, flat, 2.0)
        other, wrong = np.ones_like(flat), np.zeros(3 * len(arrays), np.int64)
        for share in range(3):
            kernels.add_parts(table.share(share, 3), [flat, other], other, wrong)
        results.append((flat.tobytes(), other.tobytes(), bad.tolist(), wrong.tolist(), [a.tobytes() for a in arrays]))
    assert results[0] == results[1]
