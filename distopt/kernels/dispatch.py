"""Calls of the kernels of ``native/`` on arrays.

The C text is the only signature: ``KERNEL(unpack)(Table table, const real *flat, double scale)`` becomes
``unpack(members, flat, scale)``, dispatched on the dtype of its arrays (``real`` is float or double) and on where they
live.  Numpy arrays go to the shared library that the package's build made from these texts, and ctypes releases the
GIL during a call; cupy arrays go to the same text, compiled for their GPU when a kernel of it is first called, and the
call is enqueued in the current stream.

A ``long long`` in front of arrays is their length, which a caller leaves out.  A multi-tensor kernel starts with
``Table table``, for which a caller gives a :class:`BucketLayout`: one call serves a bucket, or a shard of its chunks.
A small array that both sides need may be given as a ``device.DeviceMirror``, and so may the addresses of a list
of arrays.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from distopt import device
from distopt.device import DeviceMirror
from distopt.device.arrays import DATA, pointer
from distopt.kernels import cubins
from distopt.kernels.layout import CHUNK, BucketLayout, KernelStruct, Table
from distopt.kernels.signatures import (
    CUDA_FLAGS,
    NATIVE,
    KernelParameter,
    Signature,
    kernel_signatures,
    library,
    struct,
)

THREADS = 256  # threads of a block

SCALARS: dict[str, Any] = {
    "int": ctypes.c_int,
    "long long": ctypes.c_longlong,
    "double": ctypes.c_double,
    "Table": Table,
    "SkipIf": ctypes.c_void_p,
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
# What an array has a number for: each member of a bucket, each element of it, each eight elements, or each CHUNK.
MEMBERS, ELEMENTS, BITS, CHUNKS = range(4)
COUNTS = {"real": ELEMENTS, "half_t": ELEMENTS, "bfloat16_t": ELEMENTS, "byte_t": BITS, "single_t": CHUNKS}
_REALS = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}


class HostArrays(list[np.ndarray]):
    """Arrays on the host that many kernels are given: they are checked, and their addresses found, once."""

    addresses: Any = None


class _MirrorAddress(ctypes.c_void_p):
    """The address of a mirror, which is kept until the launch: its memory would otherwise go to the next list."""

    def __init__(self, mirror: DeviceMirror, gpu: int | None):
        super().__init__(mirror.address(gpu))
        self._mirror = mirror


class Kernel:
    """One kernel of native/."""

    def __init__(self, name: str, signature: Signature, parameters: Sequence[KernelParameter]):
        self.name, self.signature, self.parameters = name, signature, parameters
        self.declared = signature.parameters
        arrays = [p for p in parameters if p.is_array]
        self._structs = {p.name: struct(p.kind) for p in arrays if p.kind not in _ARRAYS and p.kind != "real"}
        others = [p for p in arrays if p.name not in self._structs]  # each call decides what is real
        self._dtypes = {p.name: None if p.kind == "real" else np.dtype(_ARRAYS[p.kind]) for p in others}
        self._kinds = [ctypes.c_void_p if p.is_array else SCALARS[p.kind] for p in self.declared]
        self._functions: dict[tuple[np.dtype, int | None], Any] = {}

    def _complete(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return all arguments; a ``SkipIf`` at their end may be left out."""
        if len(values) == len(self.parameters) - 1 and self.parameters[-1].kind == "SkipIf":
            return (*values, None)
        if len(values) != len(self.parameters):
            raise TypeError(f"{self.name}: arguments must be {[p.name for p in self.parameters]}, got {len(values)}")
        return values

    def _gpu_of_first(self, values: Sequence[Any]) -> int | None:
        """Return the GPU of the first array, None for the host."""
        return device.gpu_of(next((v for v in values if type(v) is np.ndarray or device.is_array(v)), None))

    def _address(self, p: KernelParameter, a: Any, real: np.dtype, gpu: int | None, fits: Callable[[int], bool]) -> int:
        """Return the address of an array argument, after checking it against the C text; ``fits`` checks its size."""
        x = a.host if isinstance(a, DeviceMirror) else a
        if type(x) is not np.ndarray and not device.is_array(x):
            raise TypeError(f"{self.name}: {p.name} must be an array, got {device.describe(x)}")
        dtype = self._structs.get(p.name) or self._dtypes[p.name] or real
        if x.dtype != dtype or not x.flags.c_contiguous:
            flaw = ", not contiguous" * (not x.flags.c_contiguous)
            raise TypeError(f"{self.name}: {p.name} must be contiguous {dtype}, got {x.dtype}{flaw}")
        if p.name in self._structs:
            fits = (1).__eq__
        if not fits(x.size):
            raise ValueError(f"{self.name}: {p.name} must be of the others' size, got {x.size} elements")
        if isinstance(a, DeviceMirror):
            return a.address(gpu)
        if (gpu is not None or type(a) is not np.ndarray) and device.gpu_of(a) != gpu:
            where = "the host" if gpu is None else f"GPU {gpu}"
            raise TypeError(f"{self.name}: {p.name} must be on {where} as the others, got {device.describe(a)}")
        return device.address(a)

    def _list(
        self, p: KernelParameter, arrays: Any, real: np.dtype, gpu: int | None, fits: Callable[[int], bool]
    ) -> Any:
        """Return the addresses of a list of arrays, or of a mirror that has them, where the kernel reads them."""
        if isinstance(arrays, DeviceMirror):
            return arrays.address(gpu)
        if isinstance(arrays, HostArrays) and arrays.addresses is not None:
            return arrays.addresses
        addresses = [self._address(p, a, real, gpu, fits) for a in arrays]
        if gpu is None:
            on_host = (ctypes.c_void_p * len(addresses))(*addresses)
            if isinstance(arrays, HostArrays):
                arrays.addresses = on_host
            return on_host
        return _MirrorAddress(DeviceMirror(np.array(addresses, np.uintp)), gpu)

    def _enqueue(self, function: Any, arguments: Sequence[Any], work: int) -> None:
        """Enqueue a function on a GPU: a block per chunk of work, as many as fit."""
        blocks = max(1, min(work, device.resident_blocks(function, THREADS)))
        converted = [a if isinstance(a, kind) else kind(a) for kind, a in zip(self._kinds, arguments, strict=True)]
        device.launch(function, blocks, THREADS, converted)

    def _function(self, real: np.dtype, gpu: int | None) -> Any:
        """Find, at its first call, the function for float32 or float64; TypeError for another dtype."""
        if real not in _REALS:
            raise TypeError(f"{self.name}: arrays must be of float32 or float64, got {real}")
        if gpu is not None:
            function = _module(self.signature.source, _REALS[real], gpu).get_function(f"{self.name}_{_REALS[real]}")
        else:
            function = getattr(library(), f"{self.name}_{_REALS[real]}")
            function.argtypes, function.restype = self._kinds, None
        self._functions[real, gpu] = function
        return function


class FlatKernel(Kernel):
    """A kernel ``KERNEL(name)(long long n, real *x, ...)``: a ``long long`` in front of arrays is their length."""

    def __init__(self, name: str, signature: Signature):
        declared = signature.parameters
        follows = [*declared[1:], None]
        lengths = [
            p.kind == "long long" and not p.is_array and f is not None and f.is_array
            for p, f in zip(declared, follows, strict=True)
        ]
        super().__init__(name, signature, [p for p, is_length in zip(declared, lengths, strict=True) if not is_length])
        dtypes = self._dtypes | self._structs
        self._expected = [(p, n, dtypes.get(p.name)) for p, n in zip(declared, lengths, strict=True)]
        # the parameter whose dtype decides
        self._real = next((k for k, p in enumerate(self.parameters) if p.kind == "real" and not p.is_list), None)

    def __call__(self, *values: Any, real: np.dtype | None = None) -> None:
        """Call the kernel with all parameters but the lengths; ``real`` where no array among them tells what it is."""
        if len(values) != len(self.parameters):
            values = self._complete(values)
        if real is None:
            real = np.dtype(np.float32) if self._real is None else values[self._real].dtype
        gpu = None if type(values[self._real or 0]) is np.ndarray else self._gpu_of_first(values)
        of_numpy, remaining, n, work, arguments = gpu is None and DATA, iter(values), -1, 0, list[Any]()
        for p, is_length, dtype in self._expected:
            if is_length:
                n = -1
                arguments.append(n)
                continue
            v = next(remaining)
            if p.is_array and n < 0:
                n = arguments[-1] = len(v) if isinstance(v, list) else int(getattr(v, "size", 0))
                work = max(work, -(-n // CHUNK))
            if p.is_list:
                v = self._list(p, v, real, gpu, (0).__le__)
            elif p.is_array:
                # the usual case first, without a call
                if of_numpy and type(v) is np.ndarray and v.dtype is (dtype or real) and v.flags.c_contiguous:
                    address = pointer(id(v) + DATA).value
                else:
                    address = None if gpu is None else device.matching_address(v, dtype or real, gpu)
                v = address if address is not None and v.size == n else self._address(p, v, real, gpu, n.__eq__)
            elif p.kind == "SkipIf" and v is not None:
                v = device.address(v)
            arguments.append(v)
            if p.name == self.signature.blocks:
                work = v
        function = self._functions.get((real, gpu)) or self._function(real, gpu)
        if gpu is None:
            function(*arguments)
        else:
            self._enqueue(function, arguments, work)


class TableKernel(Kernel):
    """A kernel ``KERNEL(name)(Table table, ...)``, which works on all tensors of a bucket in one call."""

    def __init__(self, name: str, signature: Signature):
        declared = signature.parameters
        follows = [*declared[1:], None]
        is_length = [f is not None and f.is_list for f in follows]
        parameters = [p for p, skip in zip(declared, is_length, strict=True) if not skip and p.kind != "Table"]
        super().__init__(name, signature, parameters)
        self._expected = [(p, self._dtypes.get(p.name), COUNTS.get(p.kind, MEMBERS)) for p in parameters]

    def __call__(self, members: BucketLayout, *values: Any) -> None:
        """Call the kernel with a table and what follows it."""
        if len(values) != len(self.parameters):
            values = self._complete(values)
        real = members.dtype
        gpu = None if type(values[0]) in (np.ndarray, HostArrays) else self._gpu_of_first(values)
        of_numpy = gpu is None and DATA
        least_counts = len(members.names), members.extent, -(-members.extent // 8), -(-members.extent // CHUNK)
        arguments: list[Any] = [members.table(gpu)]
        for v, (p, dtype, count) in zip(values, self._expected, strict=True):
            least = least_counts[count]
            if p.is_list:
                arguments.append(v.size if isinstance(v, DeviceMirror) else len(v))
                v = self._list(p, v, real, gpu, least.__le__)
            elif p.is_array:
                # What is neither a struct nor an array as it should be is checked again, for the error's text.
                of_struct = type(v) is KernelStruct and v.host.dtype is self._structs.get(p.name)
                if of_struct:
                    address = v.address(gpu)
                elif of_numpy and type(v) is np.ndarray and v.dtype is (dtype or real) and v.flags.c_contiguous:
                    address = pointer(id(v) + DATA).value
                else:
                    address = None if gpu is None else device.matching_address(v, dtype or real, gpu)
                matches = address is not None and (of_struct or v.size >= least)
                v = address if matches else self._address(p, v, real, gpu, least.__le__)
            elif p.kind == "SkipIf" and v is not None:
                v = device.address(v)
            arguments.append(v)
        function = self._functions.get((real, gpu)) or self._function(real, gpu)
        if gpu is None:
            function(*arguments)
        else:
            chunks = members.span[1] - members.span[0]
            self._enqueue(function, arguments, len(members.names) if self.signature.blocks == "members" else chunks)


@functools.cache
def _module(source: str, real: str, gpu: int) -> Any:
    """Compile a file of native/ for a GPU."""
    headers = {h.name: h.read_text() for h in sorted(NATIVE.glob("*.h"))}
    options = (*CUDA_FLAGS, f"-Dreal={real}")
    return device.compile_text(source, (NATIVE / source).read_text(), headers, options, cubins.cached)


KERNELS: dict[str, FlatKernel | TableKernel] = {
    name: (TableKernel if signature.parameters[0].kind == "Table" else FlatKernel)(name, signature)
    for name, signature in kernel_signatures().items()
}
