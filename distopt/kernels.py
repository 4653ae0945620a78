"""Call the kernels of ``native/`` on arrays.

The C text is the only signature: ``KERNEL(unpack)(Table table, const real *flat, double scale)`` becomes
``unpack(members, flat, scale)``, dispatched on the dtype of its arrays (``real`` is float or double) and on where they
live.  Numpy arrays go to the shared library that the package's build made from these texts, and ctypes releases the
GIL during a call; cupy arrays go to the same text, compiled for their GPU when a kernel of it is first called, and the
call is enqueued in the current stream.

A ``long long`` in front of arrays is their length, and is not given.  A multi-tensor kernel starts with ``Table
table``, which is a :class:`Members`: one call serves a whole bucket, or one rank's share of its chunks.  A small array
that both sides need may be given as a ``device.Mirror``, and so may the addresses of a list of arrays.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from distopt import device
from distopt.device import Mirror
from distopt.tables import CHUNK, Members, Table
from distopt.texts import CUDA_FLAGS, NATIVE, Declared, Parameter, declared, library, struct

THREADS = 256  # of a block
BLOCKS = 8  # on a multiprocessor: as many as fit with 256 threads each

SCALARS: dict[str, Any] = {
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
    "single_t": np.float32,
    "byte_t": np.uint8,
}
_REALS = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}


class _Lent(ctypes.c_void_p):
    """The address of a mirror that is kept until the launch: its memory would be the next list's otherwise."""

    def __init__(self, mirror: Mirror, gpu: int | None):
        super().__init__(mirror.address(gpu))
        self._mirror = mirror


class Kernel:
    """One kernel of native/: its C text has the parameters ``declared``, of which a caller gives ``parameters``."""

    def __init__(self, name: str, text: Declared, parameters: Sequence[Parameter]):
        self.name, self.text, self.declared, self.parameters = name, text, text.parameters, parameters
        self._kinds = [ctypes.c_void_p if p.is_array else SCALARS[p.kind] for p in self.declared]
        self._functions: dict[tuple[np.dtype, int | None], Any] = {}

    def _complete(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments; a refusal at their end may be left out."""
        if len(values) == len(self.parameters) - 1 and self.parameters[-1].kind == "Unless":
            return (*values, None)
        if len(values) != len(self.parameters):
            raise TypeError(f"{self.name} takes {[p.name for p in self.parameters]}, got {len(values)} arguments")
        return values

    def _place(self, values: Sequence[Any]) -> int | None:
        """The GPU on which the first array lives, None for the host."""
        return next((device.place(v) for v in values if device.is_array(v)), None)

    def _address(self, p: Parameter, a: Any, real: np.dtype, gpu: int | None, fits: Callable[[int], bool]) -> int:
        """The address of an array argument, checked against the text; ``fits`` says whether its size will do."""
        x = a.host if isinstance(a, Mirror) else a
        if not device.is_array(x):
            raise TypeError(f"{self.name}: {p.name} must be an array, got {device.describe(x)}")
        dtype = real if p.kind == "real" else np.dtype(_ARRAYS[p.kind]) if p.kind in _ARRAYS else struct(p.kind)
        if x.dtype != dtype or not x.flags.c_contiguous:
            flaw = ", not contiguous" * (not x.flags.c_contiguous)
            raise TypeError(f"{self.name}: {p.name} must be contiguous {dtype}, got {x.dtype}{flaw}")
        if p.kind not in _ARRAYS and p.kind != "real":
            fits = (1).__eq__
        if not fits(x.size):
            raise ValueError(f"{self.name}: {p.name} has {x.size} elements, which is not the others' size")
        if isinstance(a, Mirror):
            return a.address(gpu)
        if device.place(a) != gpu:
            there = "the host" if gpu is None else f"GPU {gpu}"
            raise TypeError(f"{self.name}: {p.name} must be on {there} as the others, got {device.describe(a)}")
        return device.address(a)

    def _list(self, p: Parameter, arrays: Any, real: np.dtype, gpu: int | None, fits: Callable[[int], bool]) -> Any:
        """The addresses of a list of arrays, where the kernel reads them; or those of a ``Mirror`` that has them."""
        if isinstance(arrays, Mirror):
            return arrays.address(gpu)
        addresses = [self._address(p, a, real, gpu, fits) for a in arrays]
        if gpu is None:
            return (ctypes.c_void_p * len(addresses))(*addresses)
        return _Lent(Mirror(np.array(addresses, np.uintp)), gpu)

    def _scalar(self, p: Parameter, value: Any) -> Any:
        """A number as it is, and of a refusal the address."""
        return device.address(value) if p.kind == "Unless" and value is not None else value

    def _call(self, real: np.dtype, gpu: int | None, arguments: Sequence[Any], work: int) -> None:
        """Do it on the host, or enqueue it with a block for each chunk of work, as long as there is room for them."""
        if (real, gpu) not in self._functions:
            self._functions[real, gpu] = self._function(real, gpu)
        function = self._functions[real, gpu]
        if gpu is None:
            function(*arguments)
            return
        blocks = max(1, min(work, BLOCKS * device.multiprocessors(gpu)))
        given = [a if isinstance(a, kind) else kind(a) for kind, a in zip(self._kinds, arguments, strict=True)]
        device.launch(function, blocks, THREADS, given)

    def _function(self, real: np.dtype, gpu: int | None) -> Any:
        """The function for float32 or float64."""
        if real not in _REALS:
            raise TypeError(f"{self.name} works on float32 and float64, got {real}")
        if gpu is not None:
            return _module(self.text.text, _REALS[real], gpu).get_function(f"{self.name}_{_REALS[real]}")
        function = getattr(library(), f"{self.name}_{_REALS[real]}")
        function.argtypes, function.restype = self._kinds, None
        return function


class FlatKernel(Kernel):
    """``KERNEL(name)(long long n, real *x, ...)``: a ``long long`` in front of arrays is their length.

    In front of a list of arrays, it is the list's; arrays in the list may have any.
    """

    def __init__(self, name: str, text: Declared):
        declared = text.parameters
        follows = [*declared[1:], None]
        lengths = [
            p.kind == "long long" and not p.is_array and f is not None and f.is_array
            for p, f in zip(declared, follows, strict=True)
        ]
        super().__init__(name, text, [p for p, is_length in zip(declared, lengths, strict=True) if not is_length])
        self._lengths = lengths

    def __call__(self, *values: Any) -> None:
        """Call it with all parameters but the lengths."""
        values = self._complete(values)
        named = zip(values, self.parameters, strict=True)
        real = next((v.dtype for v, p in named if p.kind == "real" and not p.is_list), np.dtype(np.float32))
        given, gpu, n, work = iter(values), self._place(values), -1, 0
        arguments: list[Any] = []
        for p, is_length in zip(self.declared, self._lengths, strict=True):
            if is_length:
                n = -1
                arguments.append(n)
                continue
            value = next(given)
            if p.is_array and n < 0:
                n = arguments[-1] = len(value) if isinstance(value, list) else int(getattr(value, "size", 0))
                work = max(work, -(-n // CHUNK))
            if p.is_list:
                arguments.append(self._list(p, value, real, gpu, (0).__le__))
            else:
                arguments.append(self._address(p, value, real, gpu, n.__eq__) if p.is_array else self._scalar(p, value))
            if p.name == self.text.blocks:
                work = value
        self._call(real, gpu, arguments, work)


class TableKernel(Kernel):
    """``KERNEL(name)(Table table, ...)``: works on all tensors of a bucket in one call."""

    def __init__(self, name: str, text: Declared):
        declared = text.parameters
        follows = [*declared[1:], None]
        is_length = [f is not None and f.is_list for f in follows]
        given = [p for p, skip in zip(declared, is_length, strict=True) if not skip and p.kind != "Table"]
        super().__init__(name, text, given)

    def __call__(self, members: Members, *values: Any) -> None:
        """Call it with a table and what follows it.

        Arrays of ``real`` and of 16 bits hold the bucket, bytes at least a bit for each of its elements, others a
        number or more per row.
        For a list of arrays give the list, whose length is passed in front of it.
        """
        values = self._complete(values)
        rows, real, gpu = len(members.names), members.dtype, self._place(values)
        least = {kind: members.extent for kind in ("real", "half_t", "bfloat16_t")} | {
            "byte_t": -(-members.extent // 8)
        }
        arguments: list[Any] = [members.table(gpu)]
        for v, p in zip(values, self.parameters, strict=True):
            fits = least.get(p.kind, rows).__le__
            if p.is_list:
                count = v.size if isinstance(v, Mirror) else len(v)
                arguments += [count, self._list(p, v, real, gpu, fits)]
            else:
                arguments.append(self._address(p, v, real, gpu, fits) if p.is_array else self._scalar(p, v))
        chunks = members.span[1] - members.span[0]
        self._call(real, gpu, arguments, rows if self.text.blocks == "rows" else chunks)


@functools.cache
def _module(text: str, real: str, gpu: int) -> Any:
    """A text, compiled for a GPU."""
    headers = {h.name: h.read_text() for h in sorted(NATIVE.glob("*.h"))}
    return device.compile_text(text, (NATIVE / text).read_text(), headers, (*CUDA_FLAGS, f"-Dreal={real}"))


KERNELS: dict[str, FlatKernel | TableKernel] = {
    name: (TableKernel if text.parameters[0].kind == "Table" else FlatKernel)(name, text)
    for name, text in declared().items()
}


def __getattr__(name: str) -> Callable[..., None]:
    try:
        return KERNELS[name]
    except KeyError:
        raise AttributeError(f"no kernel {name!r} in native/; there are {', '.join(sorted(KERNELS))}") from None
