"""Call the kernels of ``native/`` on arrays.

The C text is the only signature.  It is read, not repeated: ``KERNEL(unpack)(const Member *rows, long long count,
const real *flat, double scale)`` becomes ``unpack(members, flat, scale)``, dispatched on the dtype of its arrays
(``real`` is float or double).  Numpy arrays go to the shared library that the package's build made from these texts;
ctypes releases the GIL during a call.

A flat kernel starts with ``long long n``, which is the size of its arrays; a multi-tensor kernel starts with
``const Member *rows, long long count``, which is one :class:`Members` table: one call serves a whole bucket.
"""

import ctypes
import functools
import hashlib
import operator
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

NATIVE = next(
    p for p in (pathlib.Path(__file__).parent / "native", pathlib.Path(__file__).parent.parent / "native") if p.is_dir()
)
# NVRTC's options for these texts: with them, and g++'s -ffp-contract=off, host and device round alike.
CUDA_FLAGS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")

_KERNEL = re.compile(r"^KERNEL\((\w+)\)\s*\(([^)]*)\)", re.M)
_PARAMETER = re.compile(r"\s*(?:const\s+)?(long long|\w+)\s*(\*?)\s*(\w+)\s*")
_STRUCT = re.compile(r"^struct Member \{(.*?)\}", re.M | re.S)
_SCALARS = {"long long": ctypes.c_longlong, "double": ctypes.c_double}
_ARRAYS = {"long long": np.int64, "half_t": np.float16, "bfloat16_t": ml_dtypes.bfloat16}
_REALS = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
_BYTES = {"real *": np.uintp, "long long": np.int64, "double": np.float64}


def texts() -> list[pathlib.Path]:
    """The files of native/, in the order in which the build hashes them."""
    return sorted(p for p in NATIVE.iterdir() if p.is_file())


def source_hash() -> str:
    """The hash of native/ as it is now; ``library().source_hash()`` is that of the build."""
    hashes = "".join(hashlib.sha256(text.read_bytes()).hexdigest() + "\n" for text in texts())
    return hashlib.sha256(hashes.encode()).hexdigest()


@functools.cache
def library() -> ctypes.CDLL:
    """The host library, found beside this package.

    Raises ImportError if the package was never built.
    """
    import distopt

    for folder in distopt.__path__:
        path = pathlib.Path(folder) / "libdistopt.so"
        if path.exists():
            host = ctypes.CDLL(str(path))
            host.source_hash.restype = host.simd_level.restype = ctypes.c_char_p
            return host
    raise ImportError("libdistopt.so is not built: pip install -e . in the project's folder (needs a C++ compiler)")


def _member_dtype() -> np.dtype:
    """``struct Member`` of portable.h as a numpy dtype."""
    match = _STRUCT.search((NATIVE / "portable.h").read_text())
    assert match, "portable.h lost its struct Member"
    fields: list[tuple[str, Any]] = []
    for line in filter(None, map(str.strip, match[1].split(";"))):
        kind = next(k for k in _BYTES if line.startswith(k))
        fields += [(name.strip(), _BYTES[kind]) for name in line.removeprefix(kind).split(",")]
    return np.dtype(fields)


MEMBER = _member_dtype()
CHUNK = 4096


class Members:
    """The table that a multi-tensor kernel reads: one row per array, with its place in the bucket's flat arrays.

    ``names``, ``shapes`` and ``offsets`` (in elements) are fixed; the arrays change from step to step, and
    ``point_to`` looks at one again only if it is another object than last time.
    """

    def __init__(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], offsets: Sequence[int], dtype: Any):
        self.names, self.shapes, self.dtype = tuple(names), tuple(shapes), np.dtype(dtype)
        self.rows = np.zeros(len(self.names), MEMBER)
        self.rows["offset"], self.rows["size"] = offsets, [int(np.prod(s)) for s in shapes]
        self.rows["lr"] = self.rows["decay"] = 1.0
        chunks = -(-self.rows["size"] // CHUNK)
        self.rows["first"] = np.cumsum(chunks) - chunks
        self.extent = int((self.rows["offset"] + self.rows["size"]).max(initial=0))
        self._arrays: Sequence[np.ndarray] = ()

    def point_to(self, arrays: Sequence[np.ndarray]) -> "Members":
        """Let row i be ``arrays[i]``: C-contiguous, of the table's dtype, and of its size.

        An array that was ``resize``\\ d in place since the last call is not noticed.
        """
        if len(arrays) == len(self._arrays) and all(map(operator.is_, arrays, self._arrays)):
            return self
        for name, shape, a in zip(self.names, self.shapes, arrays, strict=True):
            if a.dtype != self.dtype or a.shape != shape or not a.flags.c_contiguous:
                raise TypeError(f"{name}: wants a contiguous array {shape} {self.dtype}, got {a.shape} {a.dtype}")
        self.rows["data"] = [a.ctypes.data for a in arrays]
        self._arrays = tuple(arrays)
        return self

    def view(self, flat: np.ndarray, row: int) -> np.ndarray:
        """The part of ``flat`` that belongs to a row, in the row's shape."""
        offset = int(self.rows["offset"][row])
        return flat[offset : offset + int(self.rows["size"][row])].reshape(self.shapes[row])


class Kernel:
    """One kernel of native/; call it as ``kernel(members or nothing, *the remaining parameters of the C text)``."""

    def __init__(self, name: str, parameters: str):
        matches = [_PARAMETER.fullmatch(p) for p in parameters.split(",")]
        triples = [(m[1], bool(m[2]), m[3]) for m in matches if m]
        self.name, self.tabled = name, triples[0][0] == "Member"
        self.parameters = triples[2:] if self.tabled else triples[1:]

    def __call__(self, *args: Any) -> None:
        members, values = (args[0], args[1:]) if self.tabled else (None, args)
        if len(values) != len(self.parameters):
            raise TypeError(f"{self.name} takes {[p[2] for p in self.parameters]}, got {len(values)} arguments")
        real = self._real(members, values)
        if members is None:
            n = next(v.size for v, (_, is_array, _) in zip(values, self.parameters, strict=True) if is_array)
            head, least, most = (n,), n, n
        else:
            n = len(members.names)
            head, least, most = (members.rows.ctypes.data, n), members.extent, None
        tail = [
            self._array(v, kind, name, real, n if kind == "long long" else least, most) if is_array else v
            for v, (kind, is_array, name) in zip(values, self.parameters, strict=True)
        ]
        self._function(_REALS[real])(*head, *tail)

    def _real(self, members: Members | None, values: Sequence[Any]) -> np.dtype:
        """float32 or float64: the dtype of the table, or of the first array that the text calls ``real``."""
        real: np.dtype = members.dtype if members is not None else next(
            v.dtype for v, (kind, is_array, _) in zip(values, self.parameters, strict=True) if is_array and kind == "real"
        )
        if real not in _REALS:
            raise TypeError(f"{self.name} works on float32 and float64, got {real}")
        return real

    def _array(self, a: Any, kind: str, name: str, real: np.dtype, least: int, most: int | None) -> int:
        """The address of an array argument, checked against the text."""
        if not isinstance(a, np.ndarray):
            raise TypeError(f"{self.name}: {name} must be a numpy array, got {type(a).__name__}")
        dtype = real if kind == "real" else np.dtype(_ARRAYS[kind])
        if a.dtype != dtype or not a.flags.c_contiguous:
            raise TypeError(f"{self.name}: {name} must be contiguous {dtype}, got {a.dtype}")
        if a.size < least or (most is not None and a.size > most):
            raise ValueError(f"{self.name}: {name} has {a.size} elements, wants {least}")
        return a.ctypes.data

    @functools.cache  # noqa: B019  kernels live as long as the module
    def _function(self, real: str) -> Callable[..., None]:
        function = getattr(library(), f"{self.name}_{real}")
        pointers = [ctypes.c_void_p, ctypes.c_longlong] if self.tabled else [ctypes.c_longlong]
        function.argtypes = pointers + [
            ctypes.c_void_p if is_array else _SCALARS[kind] for kind, is_array, _ in self.parameters
        ]
        function.restype = None
        return function  # type: ignore[no-any-return]


def _read() -> dict[str, Kernel]:
    found = [m.groups() for text in texts() if text.suffix == ".cu" for m in _KERNEL.finditer(text.read_text())]
    return {name: Kernel(name, parameters) for name, parameters in found}


KERNELS = _read()


def __getattr__(name: str) -> Kernel:
    try:
        return KERNELS[name]
    except KeyError:
        raise AttributeError(f"no kernel {name!r} in native/; there are {', '.join(sorted(KERNELS))}") from None
