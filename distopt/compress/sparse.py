"""Send single entries, as pairs of index and value."""

import abc
import math
from numbers import Real
from typing import Any

import numpy as np

from distopt import kernels
from distopt.compress.compressor import At
from distopt.tables import CHUNK

INDEX = 4  # bytes of an index
SPARE = 64  # at least one of so many entries has room
LIMIT = 2**31  # what an index can tell apart


class Sparse(abc.ABC):
    """A payload is the plane of values, then the plane of 0-based int32 indices, ascending; its length tells how many.

    Without error feedback what is not selected is dropped.  Raises ValueError for buckets of 2^31 elements or more.
    """

    summable = lossless = may_overflow = stateful = False
    ragged = True

    def compress(
        self, x: np.ndarray, state: dict[str, np.ndarray], at: At, add: np.ndarray | None = None
    ) -> np.ndarray:
        """Move the selected entries out of x (+ add)."""
        if x.size >= LIMIT:
            raise ValueError(f"a bucket of {x.size} elements is too large for int32 indices: lower the threshold")
        if add is not None and add.size != x.size:
            raise ValueError(f"a gradient of {add.size} elements does not fit a memory of {x.size}")
        return self.take(x, x[:0] if add is None else add, at)

    @abc.abstractmethod
    def take(self, x: np.ndarray, add: np.ndarray, at: At) -> np.ndarray:
        """The payload of the selected entries of x + add, which is left in x without them; ``add`` may be empty."""

    def decompress(self, payload: np.ndarray, out: np.ndarray, at: At) -> None:
        """Add the entries to ``out``."""
        index, entry = unpack_entries(payload, out.dtype)
        kernels.give_sparse(out, index, entry)


def payload_size(k: int, itemsize: int) -> int:
    """Bytes of k entries; a multiple of the value's, so that payloads one behind the other are all aligned."""
    return -(-int(k) * (itemsize + INDEX) // itemsize) * itemsize


def unpack_entries(payload: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Indices and values of a payload; values come first, so that both planes are aligned."""
    itemsize = np.dtype(dtype).itemsize
    k = payload.size // (itemsize + INDEX)
    return payload[k * itemsize : k * (itemsize + INDEX)].view(np.int32), payload[: k * itemsize].view(dtype)


def shorten(payload: np.ndarray, k: int, dtype: Any) -> np.ndarray:
    """The payload of the first k entries, in the same memory: the indices move down to the values."""
    index, entry = unpack_entries(payload, dtype)
    split = k * entry.itemsize
    payload[split : split + k * INDEX] = index[:k].view(np.uint8)
    return payload[: payload_size(k, entry.itemsize)]


class TopK(Sparse):
    """The ``density`` fraction of entries that are largest in magnitude, exactly; ties go to the lowest index.

    k = ceil(density n), at least 1, of the whole bucket, or with ``per_tensor`` of each tensor of it.  NaN counts as
    infinite.  Raises ValueError for a density outside (0, 1].
    """

    ragged = False

    def __init__(self, density: float, per_tensor: bool = False):
        if isinstance(density, bool) or not isinstance(density, Real):
            raise TypeError(f"density must be a number, got {density!r}")
        if not 0 < density <= 1:
            raise ValueError(f"density must be in (0, 1], got {density}")
        self.density: float = float(density)
        self.per_tensor: bool = bool(per_tensor)

    def count(self, n: int) -> int:
        """How many of n entries are sent."""
        return int(self._counts(np.array([n]))[0])

    def _counts(self, sizes: np.ndarray) -> np.ndarray:
        exact = self.density * sizes
        wanted = np.ceil(exact - 1e-9 * np.maximum(1.0, exact)).astype(np.int64)
        return np.clip(wanted, np.minimum(sizes, 1), sizes)

    def payload_bytes(self, n: int, itemsize: int = 4) -> int | None:
        """A value and an index for each of k entries; per tensor it depends on their sizes."""
        return None if self.per_tensor else payload_size(self.count(n), itemsize)

    def take(self, x: np.ndarray, add: np.ndarray, at: At) -> np.ndarray:
        """The largest entries, from a first guess of how large those are (select.cu)."""
        bucket = at.bucket
        sizes = np.array(bucket.sizes if bucket else [x.size], np.int64)
        if self.per_tensor and bucket:
            offsets, counts = np.array(bucket.offsets, np.int64), self._counts(sizes)
        else:  # one part, in which the gaps lie, but do not count
            counts = self._counts(sizes.sum(keepdims=True))
            offsets, sizes = np.zeros(1, np.int64), np.array([x.size], np.int64)
        payload = at.scratch("payload", payload_size(counts.sum(), x.itemsize))
        candidates = np.minimum(sizes, counts + np.maximum(counts, sizes // SPARE))
        held = at.scratch("candidates", payload_size(candidates.max(initial=0) + CHUNK, x.itemsize))
        planes = (*unpack_entries(payload, x.dtype), *unpack_entries(held, x.dtype))
        kernels.take_largest(x, add, offsets, sizes, counts, *planes)
        return payload

    def __repr__(self) -> str:
        return f"TopK({self.density}, per_tensor={self.per_tensor})"


class Threshold(Sparse):
    """The entries whose magnitude is at least ``magnitude``, in units of the local, un-averaged gradient.

    0 sends everything that is not zero.  NaN counts as infinite.  Raises ValueError for a negative magnitude.
    """

    def __init__(self, magnitude: float):
        if isinstance(magnitude, bool) or not isinstance(magnitude, Real):
            raise TypeError(f"magnitude must be a number, got {magnitude!r}")
        if not 0 <= magnitude < math.inf:
            raise ValueError(f"magnitude must be finite and at least 0, got {magnitude}")
        self.magnitude: float = float(magnitude)

    def payload_bytes(self, n: int, itemsize: int = 4) -> None:
        """It depends on the data."""

    def take(self, x: np.ndarray, add: np.ndarray, at: At) -> np.ndarray:
        """What is large enough; there is room for few entries first, and for all if they turn out to be many."""
        bound, place = max(_magnitude(self.magnitude, x.dtype), 1) - 1, np.zeros(2, np.int64)
        payload = at.scratch("payload", payload_size(x.size // SPARE + CHUNK, x.itemsize))
        kernels.take_above(x, add, *unpack_entries(payload, x.dtype), place, bound)
        if place[0] < x.size:
            first = shorten(payload, int(place[1]), x.dtype)
            payload = at.scratch("payload", payload_size(x.size + CHUNK, x.itemsize))
            for plane, part in zip(*(unpack_entries(p, x.dtype) for p in (payload, first)), strict=True):
                plane[: part.size] = part
            kernels.take_above(x, add, *unpack_entries(payload, x.dtype), place, bound)
        return shorten(payload, int(place[1]), x.dtype)

    def __repr__(self) -> str:
        return f"Threshold({self.magnitude})"


def _magnitude(value: float, dtype: Any) -> int:
    """The least magnitude of the dtype that is at least ``value``."""
    rounded = np.array(value).astype(dtype)
    if float(rounded) < value:
        rounded = np.nextafter(rounded, np.array(np.inf, dtype))
    return int(rounded.view(f"i{rounded.itemsize}"))
