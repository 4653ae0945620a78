"""What NVRTC makes of every kernel, without a GPU: python -m benchmarks.gpu_sass [--save]

Registers of a thread; bytes that it spills and bytes of its stack, of which there should be none; bytes of static
shared memory of a block, and how many blocks of 256 threads fit on a multiprocessor; how many loads of 128 bits a
thread has under way at once; and the loads and stores of global memory in the machine code, by width in bits.  The
disassembler is that of nvidia-cuda-nvdisasm, in the extra 'bench', or of a CUDA toolkit.
"""

import argparse
import collections
import ctypes
import functools
import importlib.metadata
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import report
from distopt.kernels.dispatch import THREADS
from distopt.kernels.signatures import CUDA_FLAGS, NATIVE

TEXTS = sorted(p.name for p in NATIVE.glob("*.cu"))
REALS = ("float", "double")
SHARED = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}  # bytes of a multiprocessor, by compute capability
REGISTERS, WARPS, BLOCKS = 1 << 16, 64, 32  # of a multiprocessor of any of these
WIDTHS = (8, 16, 32, 64, 128)

_START = re.compile(r"^\.text\.(\w+):")
_ACCESS = re.compile(r"\b(LDG?|STG?)\.E([.\w]*)")
_WAITS = re.compile(r"^\.L|\b(BRA|CALL|BAR|ST[GS]?)\b")  # what parts loads that are under way at once
_USED = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers([^\n]*)",
    re.S,
)


class Accesses:
    """The accesses of one kernel to global memory.

    Attributes:
        counts: how many there are of (LDG or STG, bits); LD and ST do not know that it is global memory.
        loads_at_once: the most loads of 128 bits that no store, barrier or branch parts.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[tuple[str, int]] = collections.Counter()
        self.loads_at_once = self._under_way = 0

    def add(self, line: str) -> None:
        """Add a line of the machine code."""
        if access := _ACCESS.search(line):
            width = re.search(r"\.[US]?(8|16|64|128)\b", access[2])
            self.counts[access[1], int(width[1]) if width else 32] += 1
            self._under_way += access[1] == "LDG" and bool(width) and width[1] == "128"
        if _WAITS.search(line):
            self._under_way = 0
        self.loads_at_once = max(self.loads_at_once, self._under_way)


class KernelCode(NamedTuple):
    """What the compiler made of one kernel: per thread, but for ``shared``, the bytes of a block."""

    registers: int
    stack: int
    spilled: int
    shared: int
    accesses: Accesses


def _in_wheels(pattern: str) -> Iterator[Path]:
    """Files of NVIDIA's wheels."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        yield from sorted(Path(folder).rglob(pattern))


@functools.cache
def nvrtc() -> Any:
    """NVRTC's library, None if no wheel has it."""
    for builtins in _in_wheels("libnvrtc-builtins.so.*"):  # which it does not find beside itself under a sanitizer
        ctypes.CDLL(str(builtins))
    return next((ctypes.CDLL(str(path)) for path in _in_wheels("libnvrtc.so.*")), None)


@functools.cache
def disassembler() -> str | None:
    """The path of nvdisasm, None if it is not installed."""
    return next((str(path) for path in _in_wheels("bin/nvdisasm")), shutil.which("nvdisasm"))


def compiled(text: str, real: str, architecture: int) -> tuple[bytes, str, str]:
    """(machine code, PTX, the compiler's log) of a text, by the library's options; RuntimeError if there is none."""
    lib, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    headers = sorted(NATIVE.glob("*.h"))
    names = (ctypes.c_char_p * len(headers))(*(h.name.encode() for h in headers))
    bodies = (ctypes.c_char_p * len(headers))(*(h.read_bytes() for h in headers))
    source = (NATIVE / text).read_bytes()
    lib.nvrtcCreateProgram(ctypes.byref(program), source, text.encode(), len(headers), bodies, names)
    flags = [*CUDA_FLAGS, f"-Dreal={real}", f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v"]
    code = lib.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*(f.encode() for f in flags)))

    def result(name: str) -> bytes:
        getattr(lib, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(lib, f"nvrtcGet{name}")(program, buffer)
        return buffer.raw

    try:
        log = result("ProgramLog").rstrip(b"\0").decode()
        if code:
            raise RuntimeError(f"{text} does not compile for sm_{architecture}:\n{log}")
        return result("CUBIN"), result("PTX").rstrip(b"\0").decode(), log
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def accesses(binary: bytes) -> dict[str, Accesses]:
    """The accesses of every kernel of some machine code to global memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        listing = subprocess.run([str(disassembler()), "-c", file.name], capture_output=True, text=True, check=True)
    found: dict[str, Accesses] = collections.defaultdict(Accesses)
    name = ""
    for line in listing.stdout.splitlines():
        if start := _START.match(line):
            name = start[1]
        found[name].add(line)
    return found


def kernel_codes(binary: bytes, log: str) -> dict[str, KernelCode]:
    """What became of the kernels of a text, by name, from its machine code and the compiler's log."""
    by_name, codes = accesses(binary), {}
    for name, stack, *spilled, registers, rest in _USED.findall(log):
        shared = re.search(r"(\d+) bytes smem", rest)
        codes[name] = KernelCode(
            int(registers), int(stack), sum(map(int, spilled)), int(shared[1]) if shared else 0, by_name[name]
        )
    return codes


def resident_blocks(registers: int, shared: int, architecture: int, threads: int = THREADS) -> int:
    """How many blocks fit on a multiprocessor.

    Args:
        registers: of a thread; a warp gets them in units of 256.
        shared: bytes of a block; the system has 1 KiB of each block, and units have 128.
        architecture: the compute capability, as 90.
        threads: of a block.
    """
    warps = -(-threads // 32)
    by_registers = REGISTERS // (-(-32 * registers // 256) * 256) // warps
    by_shared = SHARED[architecture] // (-(-shared // 128) * 128 + 1024)
    return min(by_registers, by_shared, WARPS // warps, BLOCKS)


@functools.cache
def everything(architecture: int, compile_text: Any = compiled) -> dict[tuple[str, str], Any]:
    """All texts, compiled by as many threads as there are cores: a future for (text, real)."""
    pool = ThreadPoolExecutor(os.cpu_count())
    return {case: pool.submit(compile_text, *case, architecture) for case in itertools.product(TEXTS, REALS)}


def table(real: str, architecture: int) -> str:
    """One line per kernel."""
    head = f"{'':20} {'registers':>9} {'spilled':>7} {'stack':>5} {'shared':>6} {'blocks':>6} {'at once':>7}"
    lines = [f"sm_{architecture}, {real}", f"  {head}  loads; stores, by width"]
    for text in TEXTS:
        binary, _, log = everything(architecture)[text, real].result()
        for name, code in sorted(kernel_codes(binary, log).items()):
            resident = resident_blocks(code.registers, code.shared, architecture)
            counts = code.accesses.counts
            widths = [
                "  ".join(f"{n} x {b}" for b in WIDTHS if (n := counts[kind, b] + counts[f"{kind}G", b])) or "none"
                for kind in ("LD", "ST")
            ]
            lines.append(
                f"  {name.removesuffix(f'_{real}'):20} {code.registers:9} {code.spilled:7} {code.stack:5} "
                f"{code.shared:6} {resident:6} {code.accesses.loads_at_once:7}  {'; '.join(widths)}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="keep the tables in benchmarks/results")
    args = parser.parse_args()
    if nvrtc() is None or disassembler() is None:
        sys.exit("NVRTC and nvdisasm must be installed: pip install nvidia-cuda-nvrtc nvidia-cuda-nvdisasm")
    versions = [f"{p} {importlib.metadata.version(p)}" for p in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvdisasm")]
    tables = [table(real, architecture) for architecture, real in itertools.product(SHARED, REALS)]
    report("gpu_sass", "\n\n".join([", ".join(versions), *tables]), args.save)


if __name__ == "__main__":
    main()
