"""Compile kernel texts as for a device, into a library that runs them on the CPU (simt.h)."""

import functools
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from test_kernels import compiler

from distopt.kernels.signatures import NATIVE

HERE = Path(__file__).parent
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O0")  # -O1 takes thrice as long
# A function at file scope in the preprocessed text: what KERNEL became.
_KERNEL = r'extern "C"\s+void\s+(\w+_{real})\s*\('


def build(
    folder: Path, real: str, options: Sequence[str] = (), sanitize: bool = False, texts: Iterable[Path] | None = None
) -> Path:
    """A library with ``launch_<kernel>_<real>(dims, shared bytes, arguments)`` for every kernel, and ``simt_seed``."""
    texts = sorted(NATIVE.glob("*.cu")) if texts is None else texts
    source, unit, library = (folder / f"device-{real}{suffix}" for suffix in (".cpp", ".ii", ".so"))
    lines = ['#include "simt.h"', *(f'#include "{text}"' for text in texts)]
    lines.append('extern "C" void simt_seed(unsigned long long seed) { simt::machine.seed = seed; }')
    source.write_text("\n".join(lines) + "\n")
    flags = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", *options]
    here = [f"-Dreal={real}", f"-I{HERE}", f"-I{NATIVE}"]
    subprocess.run([compiler(), *flags, *here, "-E", source, "-o", unit], check=True)
    plain = unit.read_text()
    kernels = re.findall(_KERNEL.format(real=real), plain)
    exports = "\n".join(f"SIMT_EXPORT({name})" for name in kernels)
    source.write_text("\n".join([*lines, exports]) + "\n")
    sanitizers = SANITIZE if sanitize else ()
    subprocess.run([compiler(), *flags, *sanitizers, *here, "-shared", source, "-o", library], check=True)
    return library


@functools.cache
def sanitized() -> dict[str, str] | None:
    """The environment of a Python that loads a library built with ``sanitize``; None if the compiler has no libasan."""
    asked = subprocess.run([compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    path = asked.stdout.strip()
    options = {"LD_PRELOAD": path, "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}
    return dict(os.environ) | options if os.path.isabs(path) else None
