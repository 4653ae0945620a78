"""The tables of arrays that multi-tensor kernels read, and a fast way to find the arrays' addresses."""

import copy
import ctypes
import functools
import operator
import re
import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from distopt import device
from distopt.kernels.signatures import NATIVE, library, struct

MEMBER = struct("Member")
_HEADER = (NATIVE / "portable.h").read_text()
CHUNK, HALF, BFLOAT16 = (int(re.findall(rf"#define {n} (\d+)", _HEADER)[0]) for n in ("CHUNK", "HALF", "BFLOAT16"))
# Flags of numpy's arrays (ndarraytypes.h); CONTIGUOUS includes ALIGNED.
CONTIGUOUS, WRITABLE = 0x1 | 0x100, 0x400
# CPython's id is an address.
READABLE = sys.implementation.name == "cpython"
# The formats of 16 bits.
FORMATS = {np.dtype(np.float16): HALF, np.dtype(ml_dtypes.bfloat16): BFLOAT16}


def compute_dtype(dtype: Any) -> np.dtype:
    """Return the dtype in which numbers of a dtype are added and updated: float32 for those of 16 bits."""
    return np.dtype(np.float32) if np.dtype(dtype) in FORMATS else np.dtype(dtype)


class Table(ctypes.Structure):
    """The ``struct Table`` of layout.h."""

    _fields_ = (
        ("members", ctypes.c_void_p),
        ("count", ctypes.c_longlong),
        ("begin", ctypes.c_longlong),
        ("end", ctypes.c_longlong),
    )


class KernelStruct(device.DeviceMirror):
    """A struct of a C text, for a kernel that takes a pointer to it."""

    def __init__(self, name: str):
        super().__init__(np.zeros(1, struct(name)))

    def write(self, **values: float) -> None:
        """Set all fields by name; TypeError if they are not all of them."""
        names = self.host.dtype.names or ()
        if set(values) != set(names):
            raise TypeError(f"fields must be {', '.join(names)}, got {', '.join(values)}")
        self.host[0] = tuple(map(values.__getitem__, names))


class BucketLayout:
    """The table that a multi-tensor kernel reads: one record per array, with its place in the bucket's flat arrays."""

    # The arrays may change from step to step; everything else is fixed.

    def __init__(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], offsets: Sequence[int], stored: Any):
        self.names, self.shapes = tuple(names), tuple(shapes)
        # the arrays' dtype, and that of the flat arrays, in which kernels compute
        self.stored, self.dtype = np.dtype(stored), compute_dtype(stored)
        # offsets are in elements
        self.records = np.zeros(len(self.names), MEMBER)
        self.records["offset"], self.records["size"] = offsets, [int(np.prod(s)) for s in shapes]
        self.records["lr"] = self.records["decay"] = self.records["adapts"] = 1.0
        self.records["format"] = FORMATS.get(self.stored, 0)
        chunks = -(-self.records["size"] // CHUNK)
        self.records["first"] = np.cumsum(chunks) - chunks
        self.extent = int((self.records["offset"] + self.records["size"]).max(initial=0))
        self.chunks = int(chunks.sum())
        # the chunks that kernels see: the first, and the one after the last
        self.span = 0, self.chunks
        # of what is cut into shards: the first chunk here, and how many there are
        self.place = 0, self.chunks
        # where the flat arrays begin, in those of the layout that this is a section of
        self.start = 0
        # one key and one mirror for all shards
        self.key = object()
        self._mirror = device.DeviceMirror(self.records)
        self._shards: dict[tuple[int, int], BucketLayout] = {}
        self._sections: dict[tuple[int, int], BucketLayout] = {}
        self._parts: dict[bytes, BucketLayout] = {}
        self._compacted: BucketLayout | None = None
        self._arrays: Sequence[np.ndarray] = ()
        self._host_table: Table | None = None

    @functools.cached_property
    def edges(self) -> device.DeviceMirror:
        """Where members begin and end in the flat arrays, ascending, ``(2 members,)`` of int64, for kernels."""
        begins, sizes = self.records["offset"], self.records["size"]
        return device.DeviceMirror(np.stack([begins, begins + sizes], 1).reshape(-1))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, without the table for the host: its addresses and its span are this one's."""
        return self.__dict__ | {"_host_table": None}

    def shard(self, number: int, of: int) -> "BucketLayout":
        """Return a layout of the same members, of which kernels work on shard ``number`` of ``of`` equal ones."""
        if of == 1:
            return self
        if (number, of) not in self._shards:
            first, chunks = self.place
            begin, end = (min(max(chunks * k // of - first, 0), self.chunks) for k in (number, number + 1))
            part = copy.copy(self)
            part._shards, part.span = {}, (begin, end)
            self._shards[number, of] = part
        return self._shards[number, of]

    def section(self, begin: int, end: int) -> "BucketLayout":
        """Return a layout of the members ``begin`` to ``end`` alone, which points where this one points now."""
        # Its flat arrays are parts of this one's (`part_of`), and its shards are what this one's shards have of it.
        if (begin, end) not in self._sections:
            start = int(self.records["offset"][begin])
            offsets = (self.records["offset"][begin:end] - start).tolist()
            part = BucketLayout(self.names[begin:end], self.shapes[begin:end], offsets, self.stored)
            part.place = self.place[0] + int(self.records["first"][begin]), self.place[1]
            part.start = start
            self._sections[begin, end] = part
        part = self._sections[begin, end]
        part.records["data"] = self.records["data"][begin:end]
        return part

    def part_of(self, flat: np.ndarray) -> np.ndarray:
        """Return the part of a flat array, of the layout that this is a section of, which is a flat array of this."""
        return flat[self.start : self.start + self.extent]

    def select(self, mask: np.ndarray) -> "BucketLayout":
        """Return a layout of the members where ``mask`` is True, at the same offsets and without arrays."""
        chosen = np.flatnonzero(mask)
        if chosen.tobytes() not in self._parts:
            names, shapes = [self.names[k] for k in chosen], [self.shapes[k] for k in chosen]
            part = BucketLayout(names, shapes, self.records["offset"][chosen].tolist(), self.stored)
            self._parts[chosen.tobytes()] = part
        return self._parts[chosen.tobytes()]

    def stretch(self, start: int, stop: int) -> "BucketLayout":
        """Return a layout of what lies in ``flat[start:stop]``: members, or parts of them, each as a flat array."""
        begins = np.maximum(self.records["offset"], start)
        ends = np.minimum(self.records["offset"] + self.records["size"], stop)
        rows = np.flatnonzero(begins < ends)
        shapes = [(int(n),) for n in (ends - begins)[rows]]
        return BucketLayout([self.names[k] for k in rows], shapes, (begins[rows] - start).tolist(), self.stored)

    def compacted(self, flat: np.ndarray) -> "BucketLayout":
        """Return a layout of the same members without gaps, whose arrays are those in ``flat``."""
        if self._compacted is None:
            ends = np.cumsum(self.records["size"])
            self._compacted = BucketLayout(self.names, self.shapes, (ends - self.records["size"]).tolist(), self.dtype)
        self._compacted.records["data"] = device.address(flat) + self.records["offset"] * flat.itemsize
        return self._compacted

    def table(self, gpu: int | None) -> Table:
        """Return the struct for a kernel on the host (None) or on a GPU."""
        if gpu is None and self._host_table is not None:
            return self._host_table
        table = Table(self._mirror.address(gpu), len(self.names), *self.span)
        if gpu is None:
            # It may be kept: the records do not move.
            self._host_table = table
        return table

    def point_to(self, arrays: Sequence[np.ndarray]) -> "BucketLayout":
        """Point record i to ``arrays[i]``: C-contiguous, of the table's dtype and the member's shape."""
        # The very objects of the last call; that one was resized in place is not noticed.
        if len(arrays) == len(self._arrays) and all(map(operator.is_, arrays, self._arrays)):
            return self
        for name, shape, a in zip(self.names, self.shapes, arrays, strict=True):
            if a.dtype != self.stored or a.shape != shape or not a.flags.c_contiguous:
                raise TypeError(f"{name} must be a contiguous array {shape} {self.stored}, got {device.describe(a)}")
        self.records["data"] = [device.address(a) for a in arrays]
        self._arrays = tuple(arrays)
        return self

    @property
    def narrow(self) -> bool:
        """Whether the arrays hold numbers of 16 bits."""
        return self.stored in FORMATS

    def update_in(self, flat: np.ndarray, master: bool) -> None:
        """Make kernels update 16-bit arrays in ``flat``, a wide copy; a ``master`` copy if it outlives the update."""
        self.records["wide"] = device.address(flat) + self.records["offset"] * flat.itemsize
        self.records["master"] = master

    def view(self, flat: np.ndarray, index: int) -> np.ndarray:
        """Return the part of ``flat`` that belongs to the member of this index, in its shape."""
        offset = int(self.records["offset"][index])
        return flat[offset : offset + int(self.records["size"][index])].reshape(self.shapes[index])


class ArrayMatcher:
    """The expected dtypes and shapes of a list of arrays, to find their addresses in some nanoseconds for each."""

    # An array is as expected if it is exactly a numpy array, contiguous, and of the dtype and shape of the array that
    # this was made with; or such an array of cupy, where all of these are.

    def __init__(self, arrays: Sequence[np.ndarray], dtype: np.dtype | None = None):
        self._gpus = {device.gpu_of(a) for a in arrays}
        self._on_gpu = bool(self._gpus) and self._gpus != {None}
        # `changed` has addresses written here that nobody reads.
        self._unused_addresses = np.empty(len(arrays), np.uintp)
        # These stay valid: the caller holds the arrays.
        self._array_ids = np.fromiter(map(id, arrays), np.uintp, len(arrays))
        self._sizes = np.array([a.size for a in arrays], np.int64)
        self._shapes_there = [a.shape for a in arrays]
        # keeps the objects alive whose ids are compared
        self._dtypes = [dtype or a.dtype for a in arrays]
        self._ids = np.array([id(d) for d in self._dtypes], np.uintp)
        self._dimensions = np.array([a.ndim for a in arrays], np.int64)
        self._shapes = np.array([n for a in arrays for n in a.shape], np.int64)
        self._expected = [a.ctypes.data for a in (self._ids, self._dimensions, self._shapes)]
        self._checked_in_place = self._array_ids.ctypes.data, self._unused_addresses.ctypes.data

    def addresses(self, arrays: Sequence[Any], ids: np.ndarray | None = None) -> np.ndarray | None:
        """Return each array's address, (n,) uintp; None if one of them is not as expected."""
        count = len(self._dtypes)
        if len(arrays) != count or not READABLE:
            return None
        if self._on_gpu:
            if len(self._gpus) != 1:
                return None
            found = device.matching_addresses(arrays, self._dtypes, self._shapes_there, *self._gpus)
            return None if found is None else np.array(found, np.uintp)
        objects = np.fromiter(map(id, arrays), np.uintp, count) if ids is None else ids
        addresses = np.empty(count, np.uintp)
        fitting = self._array_addresses(device.address(objects), device.address(addresses), id(np.ndarray), CONTIGUOUS)
        return addresses if fitting == count else None

    def changed(self) -> int | None:
        """Return the index of the first array, of those given at first, that was made read-only, retyped or reshaped.

        None if there is none; arrays on a GPU are not checked.
        """
        if not READABLE or self._on_gpu:
            return None
        first = self._array_addresses(*self._checked_in_place, None, CONTIGUOUS | WRITABLE)
        return first if first < len(self._dtypes) else None

    def repeated(self, addresses: np.ndarray) -> tuple[int, int] | None:
        """Return the indices of two arrays that begin at the same address; None if there are none."""
        bits = max(1, (2 * len(addresses)).bit_length())
        seen = np.zeros(1 << bits, np.uintp)
        second = library().repeated(
            len(addresses), addresses.ctypes.data, self._sizes.ctypes.data, bits, seen.ctypes.data
        )
        if second == len(addresses):
            return None
        same = np.flatnonzero((addresses == addresses[second]) & (self._sizes > 0))
        return int(same[0]), second

    def _array_addresses(self, objects: int, target: int, kind: int | None, flags: int) -> int:
        """Write the addresses of these objects to ``target``; return how many, from the first on, are as expected."""
        count, header = len(self._dtypes), object.__basicsize__
        return int(library().array_addresses(count, objects, header, kind, flags, *self._expected, target))
