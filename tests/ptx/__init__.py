"""The kernels' PTX, as NVRTC makes it for a GPU's driver, as a library that runs it on the CPU."""

import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from test_kernels import compiler

from benchmarks.gpu_sass import TEXTS, compiled, nvrtc
from ptx.translate import Entry, translate
from simt.build import HERE as SIMT
from simt.build import SANITIZE

HERE = Path(__file__).parent
ARCHITECTURE = 80
MARKS = [
    pytest.mark.ptx,
    pytest.mark.skipif(nvrtc() is None, reason="NVRTC is missing: pip install 'distopt[nvrtc]'"),
]


def entries(real: str, texts: Iterable[str | Path] | None = None) -> list[Entry]:
    """The entries of texts, by default of all, as NVRTC makes them by the library's options."""
    found = ((Path(text).stem, compiled(str(text), real, ARCHITECTURE)[1]) for text in texts or TEXTS)
    return [entry for name, ptx in found for entry in translate(ptx, f"{name}-{real}.ptx")]


def build(folder: Path, real: str, sanitize: bool = False, texts: Iterable[str | Path] | None = None) -> Path:
    """A library with ``launch_<kernel>_<real>(dims, shared bytes, arguments)`` for every kernel, and ``simt_seed``."""
    return library(folder, f"ptx-{real}", entries(real, texts), sanitize)


def library(folder: Path, name: str, found: Sequence[Entry], sanitize: bool = False) -> Path:
    """The same of these entries."""
    source, made = folder / f"{name}.cpp", folder / f"{name}.so"
    lines = [f"#define PTX_SHARED {max(entry.shared_bytes for entry in found)}ul", '#include "ptx.h"']
    lines += [entry.code for entry in found]
    lines.append('extern "C" void simt_seed(unsigned long long seed) { simt::machine.seed = seed; }')
    source.write_text("\n".join(lines) + "\n")
    # -w: registers that NVRTC's code never reads are no mistake of ours
    flags = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv", "-w"]
    flags += SANITIZE if sanitize else ()
    subprocess.run([compiler(), *flags, f"-I{HERE}", f"-I{SIMT}", "-shared", source, "-o", made], check=True)
    return made
