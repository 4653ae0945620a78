"""The texts of ``native/``: their place, their declarations, and the library that the build made of them.

The C text is the only signature.  It is parsed, not repeated: kernels by their ``KERNEL(name)(parameters)``, and the
structs that they share with Python by their fields.
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import re
import sys
import warnings
from typing import Any, NamedTuple

import numpy as np

_PACKAGE = pathlib.Path(__file__).parent.parent
NATIVE = next(p for p in (_PACKAGE / "native", _PACKAGE.parent / "native") if p.is_dir())
# NVRTC's options for these texts: with them, and g++'s -ffp-contract=off, host and device round alike.  The last one
# says what a lambda is, which NVRTC 12 asks for.
CUDA_FLAGS = (
    *("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"),
    "--device-as-default-execution-space",
)

# Of the x86-64 instruction set, and those of them that are built.
LEVELS = ("v1", "v2", "v3", "v4")
SIMD_NAMES = {"v1": "x86-64 (SSE2)", "v3": "x86-64-v3 (AVX2)", "v4": "x86-64-v4 (AVX-512)"}

KERNEL = re.compile(r"^KERNEL\((\w+)\)\s*\(([^)]*)\)(?:\s*BLOCKS\((\w+)\))?", re.M)
_PARAMETER = re.compile(r"\s*(?:const\s+)?(long long|\w+)\s*(\*?)((?:const\s*\*)?)\s*(\w+)\s*")
_STRUCT = re.compile(r"^struct (\w+)(?: : (\w+))? {(.*?)}", re.M | re.S)
_POINTERS = ("void *", "real *", "const real *", "const int *")
_BYTES = {**dict.fromkeys(_POINTERS, np.uintp), "long long": np.int64, "double": np.float64}


class KernelParameter(NamedTuple):
    """One parameter of a kernel, as the C text declares it."""

    kind: str  # its C type, as "long long", "double" or "real"
    is_array: bool  # a pointer
    is_list: bool  # a pointer to pointers: a list of arrays
    name: str


def texts() -> list[pathlib.Path]:
    """Return the files of native/, in the order in which the build hashes them."""
    return sorted(p for p in NATIVE.iterdir() if p.is_file())


def source_hash() -> str:
    """Return the hash of native/ as it is now; ``library().source_hash()`` is that of the build."""
    hashes = "".join(hashlib.sha256(text.read_bytes()).hexdigest() + "\n" for text in texts())
    return hashlib.sha256(hashes.encode()).hexdigest()


class Signature(NamedTuple):
    """One kernel, as the C text declares it."""

    source: str  # the name of the file
    parameters: list[KernelParameter]
    # The parameter that says how many blocks of a GPU do the work; "members": those of a table; "": the usual grid.
    blocks: str


def kernel_signatures() -> dict[str, Signature]:
    """Return all kernels by name."""
    kernels = {}
    for text in texts():
        for name, listed, blocks in KERNEL.findall(text.read_text()) if text.suffix == ".cu" else ():
            matches = [m for m in map(_PARAMETER.fullmatch, listed.split(",")) if m]
            parameters = [KernelParameter(m[1], bool(m[2]), bool(m[3]), m[4]) for m in matches]
            kernels[name] = Signature(text.name, parameters, blocks)
    return kernels


@functools.cache
def struct(name: str) -> np.dtype:
    """Return a struct of the texts as a numpy dtype."""
    base, members = _structs()[name]
    fields: list[Any] = list(struct(base).descr) if base else []
    for line in filter(None, map(str.strip, members.split(";"))):
        kind = next(k for k in _BYTES if line.startswith(k))
        fields += [(field.strip(), _BYTES[kind]) for field in line.removeprefix(kind).split(",")]
    return np.dtype(fields)


@functools.cache
def _structs() -> dict[str, list[str]]:
    """Return what stands in the texts of each struct by name: the struct it begins with, or "", and its fields."""
    return {name: parts for text in texts() for name, *parts in _STRUCT.findall(text.read_text())}


def simd_limit() -> str:
    """Return the highest SIMD level that the host library may use: DISTOPT_SIMD, or the highest that there is."""
    limit = os.environ.get("DISTOPT_SIMD", LEVELS[-1])
    if limit not in LEVELS:
        raise ValueError(f"DISTOPT_SIMD must be one of {', '.join(LEVELS)}, or not set, got {limit!r}")
    return limit


def library_path(suffix: str = "") -> pathlib.Path | None:
    """Return the path of one of the build's libraries, None if there is none."""
    import distopt

    paths = (pathlib.Path(folder) / f"libdistopt{suffix}.so" for folder in distopt.__path__)
    return next((path for path in paths if path.exists()), None)


def warn_if_shadowing() -> None:
    """Warn if this is a source folder that was never built and hides a distopt that is installed."""
    if library_path() is None and _hidden():
        warnings.warn(_not_built(), RuntimeWarning, stacklevel=3)


def _hidden() -> str | None:
    """Return the folder of an installed distopt that Python would find after this one."""
    return next((folder for folder in sys.path if (pathlib.Path(folder) / "distopt" / "libdistopt.so").exists()), None)


def _not_built() -> str:
    """Return the cause and the remedies of a missing library."""
    source, hidden = NATIVE.parent, _hidden()
    text = f"the sources in {source} are not built: pip install -e {source} (needs a C++ compiler)"
    if hidden is None:
        return text
    return (
        f"{text}; they hide the distopt that is installed in {hidden}: to use that one, start Python in another folder "
        "or set PYTHONSAFEPATH=1"
    )


@functools.cache
def library() -> ctypes.CDLL:
    """Return the host library of the highest SIMD level that this CPU has and ``simd_limit`` allows."""
    limit, host = simd_limit(), _opened("")
    if host is None:
        raise ImportError(_not_built())
    best = min(host.cpu_level().decode(), limit)
    libraries = (_opened(f"-{level}") for level in reversed(LEVELS) if level <= best)
    return next((better for better in libraries if better is not None), host)


def simd_level() -> str:
    """Return the name of the SIMD level at which the host's kernels run."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return "the compiler's default"
    return SIMD_NAMES[library().simd_level().decode()]


def _opened(suffix: str) -> ctypes.CDLL | None:
    """Load one of the libraries beside this package; None if it was not built."""
    path = library_path(suffix)
    if path is None:
        return None
    host = ctypes.CDLL(str(path))
    host.source_hash.restype = host.simd_level.restype = host.cpu_level.restype = ctypes.c_char_p
    number, pointer = ctypes.c_longlong, ctypes.c_void_p
    host.array_addresses.argtypes = [number, pointer, number, pointer, ctypes.c_int, *[pointer] * 4]
    host.repeated.argtypes = [number, pointer, pointer, ctypes.c_int, pointer]
    host.second_items.argtypes = [number, pointer, pointer, number, number, pointer, pointer]
    host.begin_round.argtypes, host.begin_round.restype = [pointer, number], None
    host.first_late.argtypes, host.first_late.restype = [number, pointer, number, number], number
    host.array_addresses.restype = host.repeated.restype = host.second_items.restype = number
    return host
