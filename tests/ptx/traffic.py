"""What every kernel moves, without a GPU: python tests/ptx/traffic.py [--save] [CASE ...]

The cases of benchmarks/gpu_kernels.py run as the library launches them, NVRTC's PTX on the CPU, on 4 of an H100's 132
multiprocessors, with as large a part of 25.6 million elements and of its L2.  Bytes, wavefronts and instructions are
those of an element; "least" is what the equations must move.
What the threads of a warp access at the k-th execution of one instruction is one request; requests of all warps take
turns.  Memory is read in sectors of 32 bytes that L2 does not hold, and each of its sectors that was written goes back
once; L2 forgets what was not used longest.  A launch begins with an empty L2.

What this does not say: what the driver makes of the PTX, occupancy, clocks, how L1 serves a request, and lanes of a
warp that are not at the same turn of a loop are taken together although they are apart.
"""

import argparse
import ctypes
import importlib.metadata
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import launch

launch.extend_path()

import ptx  # noqa: E402
from benchmarks import gpu_kernels, gpu_sass  # noqa: E402
from benchmarks.measure import RESULTS  # noqa: E402
from distopt import device  # noqa: E402
from doubles import gpu as doubled  # noqa: E402
from doubles import shim  # noqa: E402

H100 = {"multiprocessors": 132, "l2": 50 << 20, "architecture": 90}
MULTIPROCESSORS = 4
ELEMENTS = 25_600_000 * MULTIPROCESSORS // H100["multiprocessors"] // 64 * 64
SECTOR = 32  # bytes
L2 = H100["l2"] * MULTIPROCESSORS // H100["multiprocessors"] // SECTOR  # sectors
WARP, BANKS = 32, 32
READ, WRITE, SHARED, BRANCH = 0, 1, 4, 8  # as in count.h

RECORD = np.dtype(
    {
        "names": ["address", "block", "line", "thread", "bytes", "kind"],
        "formats": ["u8", "u4", "u4", "u2", "u1", "u1"],
        "itemsize": 24,
    },
    align=True,
)


class Traffic(NamedTuple):
    """What one launch did.

    Attributes:
        read, written: bytes of memory.
        sectors, least_sectors: of all requests, and if each request's bytes lay side by side.
        wavefronts, least_wavefronts: of all requests of shared memory, and without bank conflicts.
        branches, divergent: of warps.
        instructions: of threads.
    """

    read: int
    written: int
    sectors: int
    least_sectors: int
    wavefronts: int
    least_wavefronts: int
    branches: int
    divergent: int
    instructions: int


def turns(*keys: np.ndarray) -> np.ndarray:
    """How many before it have the same keys, for each of them."""
    order = np.lexsort(keys[::-1])
    new = np.ones(order.size, bool)
    new[1:] = np.logical_or.reduce([np.diff(key[order]) != 0 for key in keys])
    starts = np.flatnonzero(new)
    found = np.empty(order.size, np.int64)
    found[order] = np.arange(order.size) - np.repeat(starts, np.diff(np.append(starts, order.size)))
    return found


def traffic(records: np.ndarray, instructions: int) -> Traffic:
    """Read a launch's records."""
    thread = records["block"].astype(np.int64) * 1024 + records["thread"]
    line = records["line"].astype(np.int64)
    warp = thread // WARP
    request = np.unique((warp << 48) | (line << 32) | turns(thread, line), return_inverse=True)[1]
    time = np.full(request.max(initial=-1) + 1, np.iinfo(np.int64).max)
    np.minimum.at(time, request, turns(thread))

    branch = records["kind"] == BRANCH
    taken, passed = (np.unique(request[branch & (records["bytes"] == yes)]) for yes in (1, 0))
    is_shared = (records["kind"] & SHARED) > 0
    beyond = ~branch & ~is_shared
    return Traffic(
        *moved(records[beyond], request[beyond], time, warp[beyond]),
        *coalesced(records[beyond], request[beyond]),
        *conflicts(records[is_shared], request[is_shared]),
        np.union1d(taken, passed).size,
        np.intersect1d(taken, passed).size,
        instructions,
    )


def moved(records: np.ndarray, request: np.ndarray, time: np.ndarray, warp: np.ndarray) -> tuple[int, int]:
    """(bytes read, bytes written) between L2 and the memory."""
    order = np.lexsort((warp, time[request]))
    sector, kind, request = (records["address"] // SECTOR)[order], records["kind"][order], request[order]
    _, first = np.unique(np.stack([request, sector.astype(np.int64)]), axis=1, return_index=True)
    first.sort()
    sector, kind = sector[first], kind[first]

    def fetched(where: np.ndarray) -> np.ndarray:
        """Which of these accesses L2 does not hold from one of them before."""
        by_sector = np.lexsort((where, sector[where]))
        at, same = where[by_sector], np.zeros(where.size, bool)
        same[1:] = np.diff(sector[at]) == 0
        gap = np.diff(at, prepend=-1)
        found = np.empty(where.size, bool)
        found[by_sector] = ~same | (gap >= L2)
        return found

    everything, writes = np.arange(kind.size), np.flatnonzero(kind != READ)
    read = fetched(everything) & (kind != WRITE)
    return SECTOR * int(read.sum()), SECTOR * int(fetched(writes).sum())


def coalesced(records: np.ndarray, request: np.ndarray) -> tuple[int, int]:
    """(sectors, sectors if each request's bytes lay side by side)."""
    sectors = np.unique(np.stack([request, (records["address"] // SECTOR).astype(np.int64)]), axis=1)
    places, first = np.unique(np.stack([request, records["address"].astype(np.int64)]), axis=1, return_index=True)
    asked = np.bincount(places[0], records["bytes"][first])
    return sectors.shape[1], int(np.ceil(asked[asked > 0] / SECTOR).sum())


def conflicts(records: np.ndarray, request: np.ndarray) -> tuple[int, int]:
    """(wavefronts, wavefronts without bank conflicts) of shared memory; 8 and 16 bytes go by half and quarter warps."""
    words = np.maximum(records["bytes"] // 4, 1).astype(np.int64)
    group = request * 4 + records["thread"] % WARP * words // WARP
    group, word = np.repeat(group, words), np.repeat(records["address"].astype(np.int64) // 4, words)
    word += np.arange(word.size) - np.repeat(np.cumsum(words) - words, words)
    # lanes that read one word share it; so do those that add 1 to it, which the driver makes ATOMS.POPC.INC of
    apart = np.unique(np.stack([group, word]), axis=1)
    at_bank, count = np.unique(apart[0] * BANKS + apart[1] % BANKS, return_counts=True)
    most = np.zeros(group.max(initial=-1) + 1, np.int64)
    np.maximum.at(most, at_bank // BANKS, count)
    return int(most.sum()), int((most > 0).sum())


class Library:
    """The doubles' library of kernels, which can tell what each launch did."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library
        self._done: list[tuple[str, Traffic]] | None = None  # of a case that is counted
        library.ptx_records.restype = ctypes.c_void_p

    def count(self, case: Callable[[], object]) -> list[tuple[str, Traffic]]:
        """Run a case, and return the name of each kernel that it has launched, and what that did."""
        self._done = done = list[tuple[str, Traffic]]()
        case()
        self._done = None
        return done

    def __getattr__(self, name: str) -> Callable[..., None]:
        launched = getattr(self.library, name)

        def run(*arguments: Any) -> None:
            self.library.ptx_forget()
            launched(*arguments)
            if self._done is None:
                return
            count, instructions = ctypes.c_uint64(), ctypes.c_uint64()
            start = self.library.ptx_records(ctypes.byref(count), ctypes.byref(instructions))
            raw = (ctypes.c_char * (count.value * RECORD.itemsize)).from_address(start or 0) if count.value else b""
            found = traffic(np.frombuffer(raw, RECORD), instructions.value)
            self._done.append((name.removeprefix("launch_").removesuffix("_float"), found))

        return run


def occupancies() -> dict[str, int]:
    """Blocks of each kernel that fit on a multiprocessor, by what the compiler says of registers."""
    found = {}
    for text in gpu_sass.TEXTS:
        binary, _, log = gpu_sass.compiled(text, "float", H100["architecture"])
        for name, code in gpu_sass.kernel_codes(binary, log).items():
            found[name] = gpu_sass.resident_blocks(code.registers, code.shared, H100["architecture"])
    return found


def install(folder: Path) -> Library:
    """A GPU whose kernels are counted, in this process."""
    made = ptx.library(folder, "counted", ptx.entries("float"), options=["-DPTX_COUNT"])
    library, blocks = Library(ctypes.CDLL(str(made))), occupancies()
    doubled.install()
    shim.library = lambda real: library
    device.resident_blocks = lambda function, threads: blocks[function.name] * MULTIPROCESSORS
    return library


def cases(n: int) -> dict[str, tuple[float, Callable[[], object]]]:
    """(bytes that the equations must move, case) by name."""
    return {**gpu_kernels.elementwise(n), **gpu_kernels.selection(n), **gpu_kernels.summation(n)}


def row(title: str, traffic: Traffic, n: int) -> str:
    """A line of the table."""
    t = traffic
    sectors = t.sectors / max(t.least_sectors, 1)
    banks = f"{t.wavefronts / n:.3f} {t.wavefronts / t.least_wavefronts:6.2f}" if t.least_wavefronts else "-"
    diverged = 100 * t.divergent / max(t.branches, 1)
    numbers = (
        f"{t.read / n:8.2f} {t.written / n:8.2f} {sectors:8.2f} {banks:>13} {diverged:7.1f} {t.instructions / n:8.2f}"
    )
    return f"  {title:34}{numbers}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="whose names begin so; all by default")
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--save", action="store_true", help="keep the table in benchmarks/results")
    args = parser.parse_args()
    n = args.elements
    head = f"{'':36}{'read':>8}{'written':>9}{'sectors':>9}{'wavefronts':>14}{'diverge %':>10}{'instructions':>13}"
    lines = [
        f"python tests/ptx/traffic.py {' '.join(sys.argv[1:])}".strip(),
        f"NVRTC {importlib.metadata.version('nvidia-cuda-nvrtc')}, {n:,} float32 on {MULTIPROCESSORS} of"
        f" {H100['multiprocessors']} multiprocessors; bytes, wavefronts and instructions are those of an element",
        "",
        head,
    ]
    with tempfile.TemporaryDirectory() as folder:
        library = install(Path(folder))
        for name, (least, case) in cases(n).items():
            if args.cases and not name.startswith(tuple(args.cases)):
                continue
            case()  # states are made, and bounds guessed
            launched = library.count(case)
            total = sum(t.read + t.written for _, t in launched)
            lines.append(f"{name}: {total / n:.2f} of {least / n:.2f} bytes, {total / least:.3f}")
            lines += [row(kernel, done, n) for kernel, done in launched]
            print("\n".join(lines[-1 - len(launched) :]), flush=True)
    if args.save:
        (RESULTS / "gpu_traffic.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
