"""Law 8 without a GPU: what the texts say for a device, run thread by thread on the CPU, gives the host's bits.

The device's loops (chunks found by bisection, grid strides, atomics) are compiled by the host's compiler; blocks and
threads run in shuffled order.  What this cannot show is the GPU's own arithmetic and timing.
"""

import ctypes
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest

import laws
from distopt import kernels, run_ranks
from distopt.compress import ErrorFeedback, Threshold, TopK
from distopt.kernels import KERNELS, NATIVE
from distopt.tables import Numbers
from test_kernels import SIZES, compiler, members

SIMT = Path(__file__).parent / "simt"
HOST = kernels.library()


@pytest.fixture(scope="session")
def device_library(tmp_path_factory):
    """All texts, compiled as for a device."""
    folder = tmp_path_factory.mktemp("simt")
    flags = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", f"-I{NATIVE}", f"-I{SIMT}"]
    units = [folder / "who.o"]
    subprocess.run([compiler(), *flags, "-c", SIMT / "who.cpp", "-o", units[0]], check=True)
    for text in sorted(NATIVE.glob("*.cu")):
        for real in ("float", "double"):
            units.append(folder / f"{text.stem}-{real}.o")
            here = ["-x", "c++", "-include", SIMT / "serial.h", f"-Dreal={real}", "-c", text, "-o", units[-1]]
            subprocess.run([compiler(), *flags, *here], check=True)
    subprocess.run([compiler(), "-shared", "-o", folder / "device.so", *units], check=True)
    return ctypes.CDLL(str(folder / "device.so"))


class Device:
    """A stand-in for the host library: a call runs a kernel once for every thread of a small grid."""

    def __init__(self, library, blocks, threads, seed=0):
        self.locate = HOST.locate  # no kernel
        self.library, self.blocks, self.threads = library, blocks, threads
        self.order = [(t, b) for b in range(blocks) for t in range(threads)]
        random.Random(seed).shuffle(self.order)

    def __getattr__(self, name):
        return Launch(self, getattr(self.library, name))


class Launch:
    argtypes = restype = None

    def __init__(self, device, function):
        self.device, self.function = device, function

    def __call__(self, *args):
        given = [
            a if isinstance(a, ctypes.Structure | ctypes.Array) else kind(a)
            for kind, a in zip(self.argtypes, args, strict=True)
        ]
        for thread, block in self.device.order:
            self.device.library.become(thread, block, self.device.threads, self.device.blocks)
            self.function(*given)


@pytest.fixture(params=[(1, 1), (3, 4), (1, 7), (5, 2)], ids=lambda p: f"{p[0]} blocks of {p[1]}")
def on_device(request, device_library, monkeypatch):
    """A function that switches all kernels to the device's text."""

    def switch():
        monkeypatch.setattr(kernels, "library", lambda: Device(device_library, *request.param))
        for kernel in KERNELS.values():
            monkeypatch.setattr(kernel, "_functions", {})

    return switch


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
        now = Numbers("Update")
        now.write(scale=1.0, limit=2.0, lr=0.1, decay=0.01)
        kernels.sgd(table, flat, now, None)
        kernels.unpack(table, flat, 2.0)
        other, wrong = np.ones_like(flat), np.zeros(3 * len(arrays), np.int64)
        for share in range(3):
            kernels.add_parts(table.share(share, 3), [flat, other], other, wrong)
        results.append((flat.tobytes(), other.tobytes(), bad.tolist(), wrong.tolist(), [a.tobytes() for a in arrays]))
    assert results[0] == results[1]


def test_selection(on_device):
    x, residual = np.random.default_rng(0).standard_normal((2, 20_000)).astype(np.float32).round(1)  # many ties
    results = []
    for side in ("host", "device"):
        if side == "device":
            on_device()
        for compressor in (TopK(0.01), Threshold(3.0), Threshold(0)):
            kept = {"residual": residual.copy()}
            sent = ErrorFeedback(compressor).compress(x, kept, laws.At())
            results.append((sent.tobytes(), kept["residual"].tobytes()))
    assert results[:3] == results[3:]
