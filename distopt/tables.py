"""Where the arrays of a bucket are: the tables that multi-tensor kernels read."""

import copy
import ctypes
import operator
import re
import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from distopt import device
from distopt.texts import NATIVE, library, struct

MEMBER = struct("Member")
_HEADER = (NATIVE / "portable.h").read_text()
CHUNK, HALF, BFLOAT16 = (int(re.findall(rf"#define {n} (\d+)", _HEADER)[0]) for n in ("CHUNK", "HALF", "BFLOAT16"))
CONTIGUOUS, WRITABLE = 0x1 | 0x100, 0x400  # and aligned: flags of numpy's arrays (ndarraytypes.h)
READABLE = sys.implementation.name == "cpython"  # where an id is an address
FORMATS = {np.dtype(np.float16): HALF, np.dtype(ml_dtypes.bfloat16): BFLOAT16}  # of 16 bits


def wide(dtype: Any) -> np.dtype:
    """What numbers of a dtype are added and updated in: float32 for those of 16 bits."""
    return np.dtype(np.float32) if np.dtype(dtype) in FORMATS else np.dtype(dtype)


class Table(ctypes.Structure):
    """``struct Table`` of portable.h."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("count", ctypes.c_longlong),
        ("begin", ctypes.c_longlong),
        ("end", ctypes.c_longlong),
    )


class Numbers(device.Mirror):
    """A struct of a text, for a kernel that takes a pointer to it."""

    def __init__(self, name: str):
        super().__init__(np.zeros(1, struct(name)))

    def write(self, **values: float) -> None:
        """Set all fields, by name."""
        names = self.host.dtype.names or ()
        if set(values) != set(names):
            raise TypeError(f"wants {', '.join(names)}, got {', '.join(values)}")
        self.host[0] = tuple(values[name] for name in names)


class Members:
    """The table that a multi-tensor kernel reads: one row per array, with its place in the bucket's flat arrays.

    ``names``, ``shapes`` and ``offsets`` (in elements) are fixed; the arrays may change from step to step.  They are of
    dtype ``stored``; the bucket's flat arrays are of the ``dtype`` that kernels compute in, float32 for 16 bits.
    """

    def __init__(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], offsets: Sequence[int], stored: Any):
        self.names, self.shapes, self.stored, self.dtype = tuple(names), tuple(shapes), np.dtype(stored), wide(stored)
        self.rows = np.zeros(len(self.names), MEMBER)
        self.rows["offset"], self.rows["size"] = offsets, [int(np.prod(s)) for s in shapes]
        self.rows["lr"] = self.rows["decay"] = self.rows["adapts"] = 1.0
        self.rows["format"] = FORMATS.get(self.stored, 0)
        chunks = -(-self.rows["size"] // CHUNK)
        self.rows["first"] = np.cumsum(chunks) - chunks
        self.extent = int((self.rows["offset"] + self.rows["size"]).max(initial=0))
        self.chunks = int(chunks.sum())
        self.span = 0, self.chunks  # the chunks that kernels see
        self.key = object()  # the same for all shares
        self._mirror = device.Mirror(self.rows)  # likewise
        self._shares: dict[tuple[int, int], Members] = {}
        self._parts: dict[bytes, Members] = {}
        self._close: Members | None = None
        self._arrays: Sequence[np.ndarray] = ()

    def share(self, number: int, of: int) -> "Members":
        """The same members, of whose chunks kernels see only one of ``of`` equal parts."""
        if of == 1:
            return self
        if (number, of) not in self._shares:
            part = copy.copy(self)
            part._shares, part.span = {}, (self.chunks * number // of, self.chunks * (number + 1) // of)
            self._shares[number, of] = part
        return self._shares[number, of]

    def only(self, rows: np.ndarray) -> "Members":
        """The members of these rows, a bool each, at the same places; their arrays are yet to be pointed to."""
        chosen = np.flatnonzero(rows)
        if chosen.tobytes() not in self._parts:
            names, shapes = [self.names[k] for k in chosen], [self.shapes[k] for k in chosen]
            part = Members(names, shapes, self.rows["offset"][chosen].tolist(), self.stored)
            self._parts[chosen.tobytes()] = part
        return self._parts[chosen.tobytes()]

    def closely(self, flat: np.ndarray) -> "Members":
        """The same members, one right behind the other; their arrays are those that they have in ``flat``."""
        if self._close is None:
            ends = np.cumsum(self.rows["size"])
            self._close = Members(self.names, self.shapes, (ends - self.rows["size"]).tolist(), self.dtype)
        self._close.rows["data"] = device.address(flat) + self.rows["offset"] * flat.itemsize
        return self._close

    def table(self, gpu: int | None) -> Table:
        """What a kernel gets, on the host or on a GPU."""
        return Table(self._mirror.address(gpu), len(self.names), *self.span)

    def points_to(self, arrays: Sequence[np.ndarray]) -> bool:
        """Are these the very objects of the last ``point_to``?  One that was resized in place since is not noticed."""
        return len(arrays) == len(self._arrays) and all(map(operator.is_, arrays, self._arrays))

    def point_to(self, arrays: Sequence[np.ndarray]) -> "Members":
        """Let row i be ``arrays[i]``: C-contiguous, of the table's dtype, and of the row's shape."""
        if self.points_to(arrays):
            return self
        for name, shape, a in zip(self.names, self.shapes, arrays, strict=True):
            if a.dtype != self.stored or a.shape != shape or not a.flags.c_contiguous:
                raise TypeError(f"{name}: wants a contiguous array {shape} {self.stored}, got {device.describe(a)}")
        self.rows["data"] = [device.address(a) for a in arrays]
        self._arrays = tuple(arrays)
        return self

    @property
    def narrow(self) -> bool:
        """Do the arrays hold numbers of 16 bits?"""
        return self.stored in FORMATS

    def work_in(self, flat: np.ndarray, master: bool) -> None:
        """Let arrays of 16 bits be updated in ``flat``, which is a ``master`` if it outlives the update."""
        self.rows["wide"] = device.address(flat) + self.rows["offset"] * flat.itemsize
        self.rows["master"] = master

    def view(self, flat: np.ndarray, row: int) -> np.ndarray:
        """The part of ``flat`` that belongs to a row, in the row's shape."""
        offset = int(self.rows["offset"][row])
        return flat[offset : offset + int(self.rows["size"][row])].reshape(self.shapes[row])


class Layout:
    """What a list of arrays looks like, to find where they keep their elements: some nanoseconds for each.

    An array is taken as it is if it is exactly a numpy array, contiguous, and of the dtype and shape given here; or
    such an array of cupy, where all of these are.
    """

    def __init__(self, arrays: Sequence[np.ndarray], dtype: np.dtype | None = None):
        self._gpus = {device.place(a) for a in arrays}
        self._found = np.empty(len(arrays), np.uintp)  # addresses that nobody asks for
        self._looked_at = np.fromiter(map(id, arrays), np.uintp, len(arrays))  # whoever made this holds the arrays
        self._sizes = np.array([a.size for a in arrays], np.int64)
        self._shapes_there = [a.shape for a in arrays]
        self._dtypes = [dtype or a.dtype for a in arrays]  # holds the objects whose ids are compared
        self._ids = np.array([id(d) for d in self._dtypes], np.uintp)
        self._dimensions = np.array([a.ndim for a in arrays], np.int64)
        self._shapes = np.array([n for a in arrays for n in a.shape], np.int64)
        self._expected = [a.ctypes.data for a in (self._ids, self._dimensions, self._shapes)]
        self._own = self._looked_at.ctypes.data, self._found.ctypes.data

    def addresses(self, arrays: Sequence[Any]) -> np.ndarray | None:
        """Where each array's elements are; None if one of them is not as expected."""
        count = len(self._dtypes)
        if len(arrays) != count or not READABLE:
            return None
        if self._on_gpu:
            return self._addresses_there(arrays)
        objects, found = np.fromiter(map(id, arrays), np.uintp, count), np.empty(count, np.uintp)
        fitting = self._locate(objects.ctypes.data, found.ctypes.data, id(np.ndarray), CONTIGUOUS)
        return found if fitting == count else None

    def changed(self) -> int | None:
        """The first of the very arrays given here that was made read-only in place, or got another dtype or shape; None
        if none was.  Some nanoseconds for each; arrays on a GPU are not looked at.
        """
        if not READABLE or self._on_gpu:
            return None
        first = self._locate(*self._own, None, CONTIGUOUS | WRITABLE)
        return first if first < len(self._dtypes) else None

    def repeated(self, addresses: np.ndarray) -> tuple[int, int] | None:
        """Two arrays, like those given here, that begin at the same address; None if there are none."""
        bits = max(1, (2 * len(addresses)).bit_length())
        seen = np.zeros(1 << bits, np.uintp)
        second = library().repeated(
            len(addresses), addresses.ctypes.data, self._sizes.ctypes.data, bits, seen.ctypes.data
        )
        if second == len(addresses):
            return None
        same = np.flatnonzero((addresses == addresses[second]) & (self._sizes > 0))
        return int(same[0]), second

    @property
    def _on_gpu(self) -> bool:
        return bool(self._gpus) and self._gpus != {None}

    def _locate(self, objects: int, found: int, kind: int | None, flags: int) -> int:
        """How many of these objects, from the first on, are as expected; where they keep their elements is found."""
        count, header = len(self._dtypes), object.__basicsize__
        return int(library().locate(count, objects, header, kind, flags, *self._expected, found))

    def _addresses_there(self, arrays: Sequence[Any]) -> np.ndarray | None:
        """The same for arrays on a GPU."""
        fitting = all(
            device.on_gpu(a) and a.dtype == dtype and a.shape == shape and a.flags.c_contiguous
            for a, dtype, shape in zip(arrays, self._dtypes, self._shapes_there, strict=True)
        )
        if not fitting or {device.place(a) for a in arrays} != self._gpus:
            return None
        return np.array([device.address(a) for a in arrays], np.uintp)
