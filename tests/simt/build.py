"""Compile kernel texts as for a device, into a library that runs them on the CPU (simt.h).

What takes seconds is made once for this process and those that it starts, in a folder that the environment names;
``.ci/run`` names one for all tiers.
"""

import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from test_kernels import compiler

from distopt.kernels.signatures import NATIVE

HERE = Path(__file__).parent
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O0")  # -O1 takes thrice as long
FOLDER = "DISTOPT_SHIM"
# A function at file scope in the preprocessed text: what KERNEL became.
_KERNEL = r'extern "C"\s+void\s+(\w+_{real})\s*\('


@functools.cache
def folder() -> Path:
    """Where all is kept: what the environment names, else one that is there until this process ends."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = _own().name
    return Path(os.environ[FOLDER])


@functools.cache
def _own() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def kept(key: object, make: Callable[[], bytes]) -> bytes:
    """What ``make`` returns; ``key``: all that it hangs on, by its representation."""
    path = folder() / hashlib.sha256(repr(key).encode()).hexdigest()
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as draft:
            whole = Path(draft, path.name)
            whole.write_bytes(make())
            os.replace(whole, path)
    return path.read_bytes()


def link(command: Sequence[str | Path], source: Path, made: Path) -> Path:
    """Compile a library, unless it is kept: then the file is a copy, which a process loads beside others."""
    at = {"cwd": source.parent, "check": True}  # no name of a folder in what the preprocessor writes
    plain = subprocess.run([*command, "-E", source.name], stdout=subprocess.PIPE, **at).stdout

    def compile_source() -> bytes:
        subprocess.run([*command, "-shared", source.name, "-o", made], **at)
        return made.read_bytes()

    made.write_bytes(kept((list(map(str, command)), plain), compile_source))
    return made


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
    return link([compiler(), *flags, *sanitizers, *here], source, library)


@functools.cache
def sanitized() -> dict[str, str] | None:
    """The environment of a Python that loads a library built with ``sanitize``; None if the compiler has no libasan."""
    asked = subprocess.run([compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    path = asked.stdout.strip()
    options = {"LD_PRELOAD": path, "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}
    return dict(os.environ) | options if os.path.isabs(path) else None
