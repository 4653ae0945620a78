"""Call the kernels of ``native/`` on arrays.

The C text is the only signature.  It is read, not repeated: ``KERNEL(unpack)(Table table, const real *flat, double
scale)`` becomes ``unpack(members, flat, scale)``, dispatched on the dtype of its arrays
(``real`` is float or double).  Numpy arrays go to the shared library that the package's build made from these texts;
ctypes releases the GIL during a call.

A ``long long`` in front of arrays is their length, and is not given.  A multi-tensor kernel starts with ``Table
table``, which is a :class:`Members`: one call serves a whole bucket, or one rank's share of its chunks.
"""

import copy
import ctypes
import functools
import hashlib
import operator
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

NATIVE = next(
    p for p in (pathlib.Path(__file__).parent / "native", pathlib.Path(__file__).parent.parent / "native") if p.is_dir()
)
# NVRTC's options for these texts: with them, and g++'s -ffp-contract=off, host and device round alike.  The last one
# says what a lambda is, which NVRTC 12 asks for.
CUDA_FLAGS = (
    *("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"),
    "--device-as-default-execution-space",
)


class Table(ctypes.Structure):
    """``struct Table`` of portable.h."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("count", ctypes.c_longlong),
        ("begin", ctypes.c_longlong),
        ("end", ctypes.c_longlong),
    )


_KERNEL = re.compile(r"^KERNEL\((\w+)\)\s*\(([^)]*)\)", re.M)
_PARAMETER = re.compile(r"\s*(?:const\s+)?(long long|\w+)\s*(\*?)((?:const\s*\*)?)\s*(\w+)\s*")
_STRUCT = re.compile(r"^struct Member \{(.*?)\}", re.M | re.S)
_SCALARS: dict[str, Any] = {
    "int": ctypes.c_int,
    "long long": ctypes.c_longlong,
    "double": ctypes.c_double,
    "Table": Table,
    "Unless": ctypes.c_void_p,
}
_ARRAYS = {
    "double": np.float64,
    "long long": np.int64,
    "int": np.int32,
    "half_t": np.float16,
    "bfloat16_t": ml_dtypes.bfloat16,
}
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
            number, pointer = ctypes.c_longlong, ctypes.c_void_p
            host.locate.argtypes = [number, pointer, number, *[pointer] * 5]
            host.locate.restype = number
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
        self.span = 0, int(chunks.sum())  # the chunks that kernels see
        self.key = object()  # the same for all shares
        self._shares: dict[tuple[int, int], Members] = {}
        self._arrays: Sequence[np.ndarray] = ()

    def share(self, number: int, of: int) -> "Members":
        """The same members, of whose chunks kernels see only one of ``of`` equal parts."""
        if of == 1:
            return self
        if (number, of) not in self._shares:
            chunks, part = self.span[1], copy.copy(self)
            part._shares, part.span = {}, (chunks * number // of, chunks * (number + 1) // of)
            self._shares[number, of] = part
        return self._shares[number, of]

    @property
    def table(self) -> Table:
        """What a kernel gets."""
        return Table(self.rows.ctypes.data, len(self.names), *self.span)

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


class Layout:
    """What a list of arrays looks like, to find where they keep their elements: some nanoseconds for each.

    An array is taken as it is if it is exactly a numpy array, contiguous, and of the dtype and shape given here.
    """

    def __init__(self, arrays: Sequence[np.ndarray]):
        self._dtypes = [a.dtype for a in arrays]  # holds the objects whose ids are compared
        self._ids = np.array([id(d) for d in self._dtypes], np.uintp)
        self._dimensions = np.array([a.ndim for a in arrays], np.int64)
        self._shapes = np.array([n for a in arrays for n in a.shape], np.int64)

    def addresses(self, arrays: Sequence[Any]) -> np.ndarray | None:
        """Where each array's elements are; None if one of them is not as expected."""
        count = len(self._dtypes)
        if len(arrays) != count or sys.implementation.name != "cpython":  # where an id is an address
            return None
        objects, found = np.fromiter(map(id, arrays), np.uintp, count), np.empty(count, np.uintp)
        expected = (self._ids.ctypes.data, self._dimensions.ctypes.data, self._shapes.ctypes.data)
        fitting = library().locate(
            count, objects.ctypes.data, object.__basicsize__, id(np.ndarray), *expected, found.ctypes.data
        )
        return found if fitting == count else None


class Parameter(NamedTuple):
    """One parameter of a kernel, as the C text declares it."""

    kind: str
    is_array: bool
    is_list: bool  # of arrays
    name: str


class Kernel:
    """One kernel of native/: ``declared`` is what its C text declares, ``parameters`` what a caller gives."""

    def __init__(self, name: str, declared: Sequence[Parameter], parameters: Sequence[Parameter]):
        self.name, self.declared, self.parameters = name, declared, parameters
        self._functions: dict[np.dtype, Any] = {}

    def _complete(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """All values: what may be refused is not, unless the last of them, an array of one number, says so."""
        if self.parameters[-1].kind == "Unless":
            if len(values) == len(self.parameters) - 1:
                values = *values, None
            values = *values[:-1], values[-1].ctypes.data if isinstance(values[-1], np.ndarray) else None
        if len(values) != len(self.parameters):
            raise TypeError(f"{self.name} takes {[p.name for p in self.parameters]}, got {len(values)} arguments")
        return values

    def _address(self, p: Parameter, a: Any, real: np.dtype, fits: Callable[[int], bool]) -> int:
        """The address of an array argument, checked against the text; ``fits`` says whether its size will do."""
        dtype = real if p.kind == "real" else np.dtype(_ARRAYS[p.kind])
        if not isinstance(a, np.ndarray):
            raise TypeError(f"{self.name}: {p.name} must be a numpy array, got {type(a).__name__}")
        if a.dtype != dtype or not a.flags.c_contiguous:
            flaw = ", not contiguous" * (not a.flags.c_contiguous)
            raise TypeError(f"{self.name}: {p.name} must be contiguous {dtype}, got {a.dtype}{flaw}")
        if not fits(a.size):
            raise ValueError(f"{self.name}: {p.name} has {a.size} elements, which is not the others' size")
        return a.ctypes.data

    def _function(self, real: np.dtype) -> Any:
        """The host function for float32 or float64."""
        if real not in _REALS:
            raise TypeError(f"{self.name} works on float32 and float64, got {real}")
        if real not in self._functions:
            function = getattr(library(), f"{self.name}_{_REALS[real]}")
            function.argtypes = [ctypes.c_void_p if p.is_array else _SCALARS[p.kind] for p in self.declared]
            function.restype = None
            self._functions[real] = function
        return self._functions[real]


class FlatKernel(Kernel):
    """``KERNEL(name)(long long n, real *x, ...)``: a ``long long`` in front of arrays is their length."""

    def __init__(self, name: str, declared: Sequence[Parameter]):
        follows = [*declared[1:], None]
        lengths = [
            p.kind == "long long" and not p.is_array and f and f.is_array
            for p, f in zip(declared, follows, strict=True)
        ]
        super().__init__(name, declared, [p for p, is_length in zip(declared, lengths, strict=True) if not is_length])
        self._lengths = lengths

    def __call__(self, *values: Any) -> None:
        """Call it with all parameters but the lengths."""
        values = self._complete(values)
        real = next(v.dtype for v, p in zip(values, self.parameters, strict=True) if p.kind == "real" and not p.is_list)
        function, given, n = self._function(real), iter(values), -1
        arguments: list[Any] = []
        for p, is_length in zip(self.declared, self._lengths, strict=True):
            if is_length:
                n = -1
                arguments.append(n)
                continue
            value = next(given)
            if p.is_array and n < 0:
                n = arguments[-1] = len(value) if p.is_list else int(getattr(value, "size", 0))
            if p.is_list:
                addresses = [self._address(p, a, real, (0).__le__) for a in value]
                arguments.append((ctypes.c_void_p * n)(*addresses))
            else:
                arguments.append(self._address(p, value, real, n.__eq__) if p.is_array else value)
        function(*arguments)


class TableKernel(Kernel):
    """``KERNEL(name)(Table table, ...)``: works on all tensors of a bucket in one call."""

    def __init__(self, name: str, declared: Sequence[Parameter]):
        follows = [*declared[1:], None]
        is_length = [f is not None and f.is_list for f in follows]
        super().__init__(
            name, declared, [p for p, skip in zip(declared, is_length, strict=True) if not skip and p.kind != "Table"]
        )

    def __call__(self, members: Members, *values: Any) -> None:
        """Call it with a table and what follows it: ``real`` arrays hold the bucket, others a number or more per row.

        For a list of arrays give the list, whose length is passed in front of it.
        """
        values = self._complete(values)
        rows, real = len(members.names), members.dtype
        arguments: list[Any] = [members.table]
        for v, p in zip(values, self.parameters, strict=True):
            fits = members.extent.__le__ if p.kind == "real" else rows.__le__
            if p.is_list:
                addresses = [self._address(p, a, real, fits) for a in v]
                arguments += [len(v), (ctypes.c_void_p * len(v))(*addresses)]
            else:
                arguments.append(self._address(p, v, real, fits) if p.is_array else v)
        self._function(real)(*arguments)


def _read() -> dict[str, FlatKernel | TableKernel]:
    """All kernels of native/, by name."""
    found: dict[str, FlatKernel | TableKernel] = {}
    for text in texts():
        for name, declared in _KERNEL.findall(text.read_text()) if text.suffix == ".cu" else ():
            matches = [m for m in map(_PARAMETER.fullmatch, declared.split(",")) if m]
            parameters = [Parameter(m[1], bool(m[2]), bool(m[3]), m[4]) for m in matches]
            found[name] = (TableKernel if parameters[0].kind == "Table" else FlatKernel)(name, parameters)
    return found


KERNELS = _read()


def __getattr__(name: str) -> Callable[..., None]:
    try:
        return KERNELS[name]
    except KeyError:
        raise AttributeError(f"no kernel {name!r} in native/; there are {', '.join(sorted(KERNELS))}") from None
