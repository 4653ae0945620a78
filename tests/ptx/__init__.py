"""The kernels' PTX, as NVRTC makes it for a GPU's driver, or clang, as a library that runs it on the CPU."""

import functools
import importlib.util
import json
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from test_kernels import compiler

from benchmarks import gpu_sass
from benchmarks.gpu_sass import TEXTS, nvrtc
from distopt.kernels.signatures import CUDA_FLAGS, NATIVE
from ptx.translate import Entry, translate
from simt.build import HERE as SIMT
from simt.build import SANITIZE, kept, link

HERE = Path(__file__).parent
ARCHITECTURE = 80
NEWER = 100  # from here on NVRTC writes other PTX, as clang does: bits in registers without a type
MARKS = [
    pytest.mark.ptx,
    pytest.mark.skipif(nvrtc() is None, reason="NVRTC is missing: pip install 'distopt[nvrtc]'"),
]
# What the library's options for NVRTC are to clang, without CUDA's headers and library; division and roots are exact,
# and denormals kept, without an option.
CLANG_FLAGS = [
    *("-std=c++17", "-O2", "-ffp-contract=off", "-x", "cuda", "--cuda-device-only", "-nocudainc", "-nocudalib", "-S"),
    *("-mllvm", "-disable-licm-promotion"),  # which reads ahead what a thread may not need, and another writes
    *(f"--cuda-gpu-arch=sm_{ARCHITECTURE}", "-w", "-include", str(HERE / "clang.h")),
]


@functools.cache
def clang() -> list[str] | None:
    """The command of clang for GPUs, of Zig's wheel or of PATH; None without one."""
    if found := importlib.util.find_spec("ziglang"):
        return [str(Path(found.submodule_search_locations[0]) / "zig"), "clang"]
    return [found] if (found := shutil.which("clang")) else None


CLANG_MARKS = [
    pytest.mark.ptx,
    pytest.mark.full,  # it takes more than a minute to compile its texts once more
    pytest.mark.skipif(clang() is None, reason="clang is missing: pip install ziglang"),
]


def compiled(text: str, real: str, architecture: int) -> tuple[bytes, str, str]:
    """What ``gpu_sass.compiled`` returns, once for all tiers."""
    native = gpu_sass.NATIVE  # another one where a fault is planted
    sources = [path.read_bytes() for path in (native / text, *sorted(native.glob("*.h")))]

    def compile_source() -> bytes:
        binary, ptx, log = gpu_sass.compiled(text, real, architecture)
        return json.dumps([binary.hex(), ptx, log]).encode()

    binary, ptx, log = json.loads(kept(("NVRTC", text, real, architecture, CUDA_FLAGS, sources), compile_source))
    return bytes.fromhex(binary), ptx, log


everything = functools.partial(gpu_sass.everything, compile_text=compiled)


def by_nvrtc(text: str, real: str, architecture: int = ARCHITECTURE) -> str:
    """The PTX of a text, as NVRTC makes it by the library's options."""
    return compiled(text, real, architecture)[1]


by_nvrtc_for_newer = functools.partial(by_nvrtc, architecture=NEWER)


def by_clang(text: str, real: str) -> str:
    """The PTX of a text, as clang makes it."""
    command = [*clang(), *CLANG_FLAGS, f"-Dreal={real}", NATIVE / text, "-o", "-"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def entries(real: str, texts: Iterable[str | Path] | None = None, compile_text=by_nvrtc) -> list[Entry]:
    """The entries of texts, by default of all."""
    found = ((Path(text).stem, compile_text(str(text), real)) for text in texts or TEXTS)
    return [entry for name, ptx in found for entry in translate(ptx, f"{name}-{real}.ptx")]


def build(
    folder: Path,
    real: str,
    sanitize: bool = False,
    texts: Iterable[str | Path] | None = None,
    compile_text=by_nvrtc,
) -> Path:
    """A library with ``launch_<kernel>_<real>(dims, shared bytes, arguments)`` for every kernel, and ``simt_seed``."""
    return library(folder, f"ptx-{real}", entries(real, texts, compile_text), sanitize)


def library(
    folder: Path, name: str, found: Sequence[Entry], sanitize: bool = False, options: Sequence[str] = ()
) -> Path:
    """The same of these entries, with more options for the compiler."""
    source, made = folder / f"{name}.cpp", folder / f"{name}.so"
    lines = [f"#define PTX_SHARED {max(entry.shared_bytes for entry in found)}ul", '#include "ptx.h"']
    lines += [entry.code for entry in found]
    lines.append('extern "C" void simt_seed(unsigned long long seed) { simt::machine.seed = seed; }')
    source.write_text("\n".join(lines) + "\n")
    # -w: registers that NVRTC's code never reads are no mistake of ours
    flags = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv", "-w", *options]
    flags += SANITIZE if sanitize else ()
    return link([compiler(), *flags, f"-I{HERE}", f"-I{SIMT}"], source, made)
