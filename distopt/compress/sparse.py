"""Send single entries, as pairs of index and value."""

import abc
import math
from numbers import Real
from typing import Any

import numpy as np

from distopt import kernels
from distopt.compress.compressor import At

DIGIT = 11  # bits of a magnitude that one pass over the data settles
LIMIT = 2**31  # indices are int32


class Sparse(abc.ABC):
    """A payload is the plane of values, then the plane of 0-based int32 indices, ascending; its length tells how many.

    Without error feedback what is not selected is dropped.  Raises ValueError for buckets of 2^31 elements or more.
    """

    summable = lossless = may_overflow = stateful = False

    @abc.abstractmethod
    def select(self, x: np.ndarray, n: int) -> tuple[int, int, int]:
        """Which entries of the flat array x, of which n are not gaps, are worth sending.

        Returns (k, least, ties): k entries, all whose magnitude (select.cu) is above ``least``, and the first ``ties``
        that are equal to it.
        """

    def compress(self, x: np.ndarray, state: dict[str, np.ndarray], at: At) -> np.ndarray:
        """Move the selected entries out of x."""
        n = sum(at.bucket.sizes) if at.bucket is not None else x.size
        return pack_entries(*take(x, self.select(x, n)))

    def decompress(self, payload: np.ndarray, out: np.ndarray, at: At) -> None:
        """Add the entries to ``out``."""
        index, entry = unpack_entries(payload, out.dtype)
        kernels.give_sparse(out, index, entry)


def take(x: np.ndarray, selected: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Indices and values of the selected entries, which become zero in x."""
    if x.size >= LIMIT:
        raise ValueError(f"a bucket of {x.size} elements is too large for int32 indices: lower the threshold")
    k, least, ties = selected
    index, entry = np.empty(k, np.int32), np.empty(k, x.dtype)
    if k:
        kernels.take_above(x, index, entry, least, ties)
    return index, entry


def pack_entries(index: np.ndarray, entry: np.ndarray) -> np.ndarray:
    """One payload; values first, so that both planes are aligned."""
    return np.concatenate([entry.view(np.uint8), index.view(np.uint8)])


def unpack_entries(payload: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Indices and values of a payload."""
    split = payload.size // (np.dtype(dtype).itemsize + 4) * np.dtype(dtype).itemsize
    return payload[split:].view(np.int32), payload[:split].view(dtype)


class TopK(Sparse):
    """The ``density`` fraction of entries that are largest in magnitude, exactly; ties go to the lowest index.

    k = ceil(density n), at least 1, of the whole bucket, or with ``per_tensor`` of each tensor of it.  NaN counts as
    infinite.  Raises ValueError for a density outside (0, 1].
    """

    def __init__(self, density: float, per_tensor: bool = False):
        if isinstance(density, bool) or not isinstance(density, Real):
            raise TypeError(f"density must be a number, got {density!r}")
        if not 0 < density <= 1:
            raise ValueError(f"density must be in (0, 1], got {density}")
        self.density: float = float(density)
        self.per_tensor: bool = bool(per_tensor)

    def count(self, n: int) -> int:
        """How many of n entries are sent."""
        exact = self.density * n
        return min(n, max(1, math.ceil(exact - 1e-9 * max(1.0, exact))))

    def payload_bytes(self, n: int, itemsize: int = 4) -> int | None:
        """A value and an index for each of k entries; per tensor it depends on their sizes."""
        return None if self.per_tensor else self.count(n) * (itemsize + 4)

    def select(self, x: np.ndarray, n: int) -> tuple[int, int, int]:
        """Find the k-th largest magnitude, digit by digit."""
        k = self.count(n)
        return (k, *kth_magnitude(x, k)) if k else (0, 0, 0)

    def compress(self, x: np.ndarray, state: dict[str, np.ndarray], at: At) -> np.ndarray:
        """Move the largest entries out of x."""
        if not self.per_tensor or at.bucket is None:
            return super().compress(x, state, at)
        found = []
        for offset, size in zip(at.bucket.offsets, at.bucket.sizes, strict=True):
            part = x[offset : offset + size]
            index, entry = take(part, self.select(part, size))
            found.append((index + np.int32(offset), entry))
        return pack_entries(*(np.concatenate(plane) for plane in zip(*found, strict=True)))

    def __repr__(self) -> str:
        return f"TopK({self.density}, per_tensor={self.per_tensor})"


def kth_magnitude(x: np.ndarray, k: int) -> tuple[int, int]:
    """The magnitude of the k-th largest entry of x, and how many of that magnitude are among the first k."""
    bits, prefix = 8 * x.dtype.itemsize - 1, 0
    while bits:
        digit = min(DIGIT, bits)
        bits -= digit
        found = np.zeros(1 << digit, np.int64)
        kernels.count_digit(x, found, prefix, bits)
        from_top = np.cumsum(found[::-1])
        steps = int(np.searchsorted(from_top, k))
        k -= int(from_top[steps - 1]) if steps else 0
        prefix = (prefix << digit) + found.size - 1 - steps
    return prefix, k


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

    def select(self, x: np.ndarray, n: int) -> tuple[int, int, int]:
        """Count what is large enough."""
        least = _magnitude(self.magnitude, x.dtype)
        found = np.zeros(2, np.int64)
        kernels.count_above(x, found, least)
        ties = int(found[1]) if least else 0
        return int(found[0]) + ties, least, ties

    def __repr__(self) -> str:
        return f"Threshold({self.magnitude})"


def _magnitude(value: float, dtype: Any) -> int:
    """The least magnitude of the dtype that is at least ``value``."""
    rounded = np.array(value).astype(dtype)
    if float(rounded) < value:
        rounded = np.nextafter(rounded, np.array(np.inf, dtype))
    return int(rounded.view(f"i{rounded.itemsize}"))
