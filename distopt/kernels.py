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
from typing import Any, NamedTuple

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
CHUNK = int(re.findall(r"#define CHUNK (\d+)", (NATIVE / "portable.h").read_text())[0])


class Members:
    """The table that a multi-tensor kernel reads: one row per array, with its place in the bucket's flat arrays.

    ``names``, ``shapes`` and ``offsets`` (in elements) are fixed; the arrays may change from step to step.
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

    def points_to(self, arrays: Sequence[np.ndarray]) -> bool:
        """Are these the very objects of the last ``point_to``?  One that was resized in place since is not noticed."""
        return len(arrays) == len(self._arrays) and all(map(operator.is_, arrays, self._arrays))

    def point_to(self, arrays: Sequence[np.ndarray]) -> "Members":
        """Let row i be ``arrays[i]``: C-contiguous, of the table's dtype, and of the row's shape."""
        if self.points_to(arrays):
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


class Parameter(NamedTuple):
    """One parameter of a kernel, as the C text declares it."""

    kind: str
    is_array: bool
    name: str


class Kernel:
    """One kernel of native/, with the parameters behind those that stand for its size."""

    head: tuple[Any, ...]  # the C types in front of the parameters

    def __init__(self, name: str, parameters: Sequence[Parameter]):
        self.name, self.parameters = name, parameters
        self._functions: dict[str, Any] = {}

    def _run(
        self, real: np.dtype, head: Sequence[int], values: Sequence[Any], sizes: Callable[[str, int], bool]
    ) -> None:
        """Call the function for dtype ``real``; ``sizes(kind, n)`` says whether an array may have n elements."""
        if len(values) != len(self.parameters):
            raise TypeError(f"{self.name} takes {[p.name for p in self.parameters]}, got {len(values)} arguments")
        if real not in _REALS:
            raise TypeError(f"{self.name} works on float32 and float64, got {real}")
        arguments = []
        for value, p in zip(values, self.parameters, strict=True):
            if p.is_array:
                _check(f"{self.name}: {p.name}", value, real if p.kind == "real" else np.dtype(_ARRAYS[p.kind]))
                if not sizes(p.kind, value.size):
                    raise ValueError(f"{self.name}: {p.name} has {value.size} elements, which is not the others' size")
                value = value.ctypes.data
            arguments.append(value)
        self._function(_REALS[real])(*head, *arguments)

    def _function(self, real: str) -> Any:
        if real not in self._functions:
            function = getattr(library(), f"{self.name}_{real}")
            function.argtypes = [
                *self.head,
                *(ctypes.c_void_p if p.is_array else _SCALARS[p.kind] for p in self.parameters),
            ]
            function.restype = None
            self._functions[real] = function
        return self._functions[real]


class FlatKernel(Kernel):
    """``KERNEL(name)(long long n, ...)``: works on arrays of one size, which is n."""

    head = (ctypes.c_longlong,)

    def __call__(self, *values: Any) -> None:
        """Call it with the parameters behind ``n``."""
        pairs = list(zip(values, self.parameters, strict=False))
        n = next(v.size for v, p in pairs if p.is_array)
        real = next(v.dtype for v, p in pairs if p.is_array and p.kind == "real")
        self._run(real, (n,), values, lambda kind, size: size == n)


class TableKernel(Kernel):
    """``KERNEL(name)(const Member *rows, long long count, ...)``: works on all tensors of a bucket in one call."""

    head = (ctypes.c_void_p, ctypes.c_longlong)

    def __call__(self, members: Members, *values: Any) -> None:
        """Call it with a table, and the parameters behind ``count``: flat arrays hold the bucket, others a row each."""
        rows = len(members.names)
        self._run(
            members.dtype,
            (members.rows.ctypes.data, rows),
            values,
            lambda kind, size: size >= (members.extent if kind == "real" else rows),
        )


def _check(what: str, a: Any, dtype: np.dtype) -> None:
    if not isinstance(a, np.ndarray):
        raise TypeError(f"{what} must be a numpy array, got {type(a).__name__}")
    if a.dtype != dtype or not a.flags.c_contiguous:
        raise TypeError(
            f"{what} must be contiguous {dtype}, got {a.dtype}{', not contiguous' * (not a.flags.c_contiguous)}"
        )


def _read() -> dict[str, FlatKernel | TableKernel]:
    """All kernels of native/, by name."""
    found: dict[str, FlatKernel | TableKernel] = {}
    for text in texts():
        for name, declared in _KERNEL.findall(text.read_text()) if text.suffix == ".cu" else ():
            matches = [m for m in map(_PARAMETER.fullmatch, declared.split(",")) if m]
            parameters = [Parameter(m[1], bool(m[2]), m[3]) for m in matches]
            table = parameters[0].kind == "Member"
            found[name] = TableKernel(name, parameters[2:]) if table else FlatKernel(name, parameters[1:])
    return found


KERNELS = _read()


def __getattr__(name: str) -> Callable[..., None]:
    try:
        return KERNELS[name]
    except KeyError:
        raise AttributeError(f"no kernel {name!r} in native/; there are {', '.join(sorted(KERNELS))}") from None
