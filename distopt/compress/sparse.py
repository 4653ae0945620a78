"""Send single entries, as pairs of index and value."""

import abc
import functools
import math
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from distopt import device, kernels
from distopt.compress import select
from distopt.compress.compressor import At, check_fits, column, sizes_of, table
from distopt.ledger import Anatomy, Look
from distopt.tables import CHUNK, Members

INDEX = 4  # bytes of an index
SPARE = 64  # at least one of so many entries has room
LIMIT = 2**31  # what an index can tell apart


class Growth(NamedTuple):
    """What is added to x before entries are selected: a gradient, or that with momentum, for which it has a velocity.

    A gradient whose momentum is added is spent.
    """

    gradient: np.ndarray
    velocity: np.ndarray
    momentum: float = 0.0
    nesterov: bool = False

    def added(self, members: Members, at: At) -> np.ndarray:
        """The array that is added, once the velocity is up to date, which a kernel that selects cannot do itself."""
        if self.velocity.size:
            kernels.correct_momentum(members, *self, at.refused)
        return self.gradient


class Sparse(abc.ABC):
    """A payload is the plane of values, then the plane of 0-based int32 indices, ascending; its length tells how many.

    Without error feedback what is not selected is dropped.  Raises ValueError for buckets of 2^31 elements or more.
    """

    summable = lossless = may_overflow = stateful = False
    ragged, capped = True, False

    def compress(
        self, x: np.ndarray, state: dict[str, np.ndarray], at: At, add: np.ndarray | None = None
    ) -> np.ndarray:
        """Move the selected entries out of x (+ add)."""
        return self.encode(self.select(x, at, add), x, at)

    def select(self, x: np.ndarray, at: At, add: np.ndarray | Growth | None = None) -> np.ndarray:
        """The planes of the selected entries (``unpack_entries``), which have left x (+ add)."""
        growth = add if isinstance(add, Growth) else Growth(x[:0] if add is None else add, x[:0])
        check_size(x.size)
        if add is not None:
            check_fits(x, growth.gradient)
        return self.take(x, growth, at)

    @abc.abstractmethod
    def take(self, x: np.ndarray, add: Growth, at: At) -> np.ndarray:
        """The planes of the selected entries of x + add, which is left in x without them; ``add`` may be empty."""

    @abc.abstractmethod
    def payload_bytes(self, n: int, itemsize: int = 4, bucket: Members | None = None) -> int | None:
        """Bytes of the payload of n elements, if they do not depend on the data."""

    def encode(self, planes: np.ndarray, x: np.ndarray, at: At) -> np.ndarray:
        """The payload that carries what ``select`` found; what that cannot carry goes back to x."""
        return planes

    def decode(self, payloads: list[np.ndarray], out: np.ndarray, at: At) -> list[tuple[np.ndarray, np.ndarray]]:
        """Indices and values that are carried to an array like ``out``; an index below 0 is no entry."""
        return [unpack_entries(payload, out.dtype) for payload in payloads]

    def look(self, payload: np.ndarray, x: np.ndarray, at: At) -> Look:
        """The two planes."""
        members, itemsize, (index, _) = table(x, at), x.itemsize, unpack_entries(payload, x.dtype)
        k, seen = index.size, None if self.tells(members) or device.on_gpu(x) else by_member(index, members)

        def found() -> Anatomy:
            counts = self.known_counts(k, members) if seen is None else seen
            return self.described(k * itemsize, k * INDEX, k, members)._replace(counts=counts)

        return found

    def described(self, values: int, indices: int, k: int, members: Members) -> Anatomy:
        """So many bytes of k values and of their indices, which can be no less than such choices have bits."""
        return Anatomy(values, indices, self.choice(k, members) + 8 * values)

    def choice(self, k: int, members: Members) -> int:
        """Bits that tell which entries they are, any k of all."""
        return choices(int(members.rows["size"].sum()), k)

    def tells(self, members: Members) -> bool:
        """Does ``known_counts`` know?"""
        return len(members.names) == 1

    def known_counts(self, k: int, members: Members) -> np.ndarray | None:
        """How many of k entries are each member's, if nobody need look; of several members those of each are."""
        return np.array([k]) if len(members.names) == 1 else None

    def decompress(self, payload: np.ndarray, out: np.ndarray, at: At) -> None:
        """Add the entries to ``out``."""
        for index, entry in self.decode([payload], out, at):
            kernels.give_sparse(out, index, entry)

    def decompress_all(self, payloads: list[np.ndarray], out: np.ndarray, at: At) -> None:
        """Overwrite ``out`` by the sum of payloads: one launch on a GPU; a host is faster with one after the other."""
        planes = self.decode(payloads, out, at)
        if not device.on_gpu(out):
            device.clear(out)
            for index, entry in planes:
                kernels.give_sparse(out, index, entry)
            return
        kernels.give_all(
            out,
            column("indices", [device.address(index) for index, _ in planes], at),
            column("entries", [device.address(entry) for _, entry in planes], at),
            column("lengths", [index.size for index, _ in planes], at),
        )


def by_member(index: np.ndarray, members: Members) -> np.ndarray:
    """How many of these indices, on the host, belong to each; they ascend, and none is in a gap."""
    starts = members.rows["offset"].astype(index.dtype)
    return np.diff(np.searchsorted(index, starts), append=index.size)


@functools.lru_cache(1024)
def choices(n: int, k: int) -> int:
    """Bits that tell which k of n: the logarithm of the binomial coefficient."""
    return round((math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2))


def counted(density: float, sizes: np.ndarray) -> np.ndarray:
    """A fraction of so many entries each: one at least, if there is one."""
    exact = density * sizes
    wanted = np.ceil(exact - 1e-9 * np.maximum(1.0, exact)).astype(np.int64)
    return np.clip(wanted, np.minimum(sizes, 1), sizes)


@functools.lru_cache(256)
def of_each(density: float, sizes: bytes) -> tuple[np.ndarray, int]:
    """The same of sizes that are the bytes of int64, and the bits that tell which these are."""
    all_of = np.frombuffer(sizes, np.int64)
    counts = counted(density, all_of)
    return counts, sum(map(choices, all_of.tolist(), counts.tolist()))


def check_size(n: int) -> None:
    """ValueError for a flat array whose elements an index cannot tell apart."""
    if n >= LIMIT:
        raise ValueError(f"a bucket of {n} elements is too large for int32 indices: lower the threshold")


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
    more than infinite.  Raises ValueError for a density outside (0, 1].
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
        return int(self.counts(np.array([n]))[0])

    def with_density(self, density: float) -> "TopK":
        """The same fraction of each tensor, and another one."""
        return TopK(density, per_tensor=True)

    def counts(self, sizes: np.ndarray) -> np.ndarray:
        """How many entries of each part are sent, if entries are chosen from parts of these sizes."""
        return counted(self.density, sizes)

    def payload_bytes(self, n: int, itemsize: int = 4, bucket: Members | None = None) -> int:
        """A value and an index for each of k entries; ValueError for buckets that are too large."""
        check_size(n)
        return payload_size(self.counts(self._parts(sizes_of(n, bucket))).sum(), itemsize)

    def forecast(self, n: int, itemsize: int, bucket: Members) -> Anatomy:
        """The two planes."""
        k = int(self.counts(self._parts(sizes_of(n, bucket))).sum())
        return self.described(k * itemsize, k * INDEX, k, bucket)

    def take(self, x: np.ndarray, add: Growth, at: At) -> np.ndarray:
        """The largest entries, from a first guess of how large those are (select.cu, sift.cu)."""
        rows = table(x, at).rows
        offsets, sizes = rows["offset"].astype(np.int64), rows["size"].astype(np.int64)
        counts = self.counts(self._parts(sizes))
        if not self.per_tensor:  # one part, in which the gaps lie, but do not count
            offsets, sizes = np.zeros(1, np.int64), np.array([x.size], np.int64)
        payload = at.scratch("payload", payload_size(counts.sum(), x.itemsize))
        planes = unpack_entries(payload, x.dtype)
        if device.on_gpu(x):
            parts = at.constant(f"parts of {self!r}", lambda: select.parts_table(offsets, sizes, counts))
            held = at.scratch("candidates", payload_size(select.candidates(parts.host), x.itemsize))
            state = at.scratch("state", 8 * select.largest_words(parts.host, x.dtype)).view(np.int64)
            added = add.added(table(x, at), at)
            select.take_largest(x, added, parts, *planes, state, *unpack_entries(held, x.dtype), at.refused)
        else:
            candidates = np.minimum(sizes, counts + np.maximum(counts, sizes // SPARE))
            held = at.scratch("candidates", payload_size(candidates.max(initial=0) + CHUNK, x.itemsize))
            kernels.take_largest(x, *add, offsets, sizes, counts, *planes, *unpack_entries(held, x.dtype))
        return payload

    def tells(self, members: Members) -> bool:
        """Of one tensor, or if as many are chosen of each as its size says."""
        return self.per_tensor or super().tells(members)

    def known_counts(self, k: int, members: Members) -> np.ndarray | None:
        """As many of each tensor as its size says, if they are chosen so."""
        return self._of_each(members)[0] if self.per_tensor else super().known_counts(k, members)

    def choice(self, k: int, members: Members) -> int:
        """Of each tensor its own, if they are chosen so."""
        return self._of_each(members)[1] if self.per_tensor else super().choice(k, members)

    def _of_each(self, members: Members) -> tuple[np.ndarray, int]:
        return of_each(self.density, members.rows["size"].astype(np.int64).tobytes())

    def _parts(self, sizes: np.ndarray) -> np.ndarray:
        """The sizes of what entries are chosen from, of members of these sizes."""
        return sizes if self.per_tensor else sizes.sum(keepdims=True)

    def __repr__(self) -> str:
        return f"TopK({self.density}, per_tensor={self.per_tensor})"


class Threshold(Sparse):
    """The entries whose magnitude is at least ``magnitude``, in units of the local, un-averaged gradient.

    0 sends everything that is not zero.  NaN counts as infinite.  On a GPU, with error feedback, at most twice as many
    entries are sent as the rank with most of them had in the step before; the others stay behind.  Raises ValueError
    for a negative magnitude.
    """

    capped = True

    def __init__(self, magnitude: float):
        if isinstance(magnitude, bool) or not isinstance(magnitude, Real):
            raise TypeError(f"magnitude must be a number, got {magnitude!r}")
        if not 0 <= magnitude < math.inf:
            raise ValueError(f"magnitude must be finite and at least 0, got {magnitude}")
        self.magnitude: float = float(magnitude)

    def payload_bytes(self, n: int, itemsize: int = 4, bucket: Members | None = None) -> None:
        """It depends on the data; ValueError for buckets that are too large."""
        check_size(n)

    def take(self, x: np.ndarray, add: Growth, at: At) -> np.ndarray:
        """What is large enough; on a GPU as much of it as there is room for."""
        added = add.added(table(x, at), at)
        return self._take_there(x, added, at) if device.on_gpu(x) else self._take_here(x, added, at)

    def count(self, x: np.ndarray, found: np.ndarray) -> None:
        """Add to ``found[0]`` how many entries of x are large enough."""
        kernels.count_above(x, found, self._bound(x))

    def _bound(self, x: np.ndarray) -> int:
        """The magnitude above which entries are sent."""
        return max(_magnitude(self.magnitude, x.dtype), 1) - 1

    def _take_here(self, x: np.ndarray, add: np.ndarray, at: At) -> np.ndarray:
        """There is room for few entries first, and for all if they turn out to be many."""
        place, bound = np.zeros(2, np.int64), self._bound(x)
        payload = at.scratch("payload", payload_size(x.size // SPARE + CHUNK, x.itemsize))
        kernels.take_above(x, add, *unpack_entries(payload, x.dtype), place, bound)
        if place[0] < x.size:
            first = shorten(payload, int(place[1]), x.dtype)
            payload = at.scratch("payload", payload_size(x.size + CHUNK, x.itemsize))
            for plane, part in zip(*(unpack_entries(p, x.dtype) for p in (payload, first)), strict=True):
                plane[: part.size] = part
            kernels.take_above(x, add, *unpack_entries(payload, x.dtype), place, bound)
        return shorten(payload, int(place[1]), x.dtype)

    def _take_there(self, x: np.ndarray, add: np.ndarray, at: At) -> np.ndarray:
        """A payload of ``at.room`` entries, padded; without, of all there are, for whose count the host waits."""
        room = at.room
        if room is None:
            if add.size:
                kernels.accumulate(add, x, at.refused)
                add = x[:0]
            count = device.zeros(1, np.int64, x)
            self.count(x, count)
            room = int(device.host_copy(count)[0])
        payload = at.scratch("payload", payload_size(room, x.itemsize))
        state = at.scratch("state", 8 * select.above_words(x.size)).view(np.int64)
        place = at.scratch("place", 16).view(np.int64)
        select.take_above(x, add, *unpack_entries(payload, x.dtype), place, self._bound(x), state, at.refused)
        if at.found is not None:
            device.copy(at.found, place[1:])
        return payload

    def __repr__(self) -> str:
        return f"Threshold({self.magnitude})"


def _magnitude(value: float, dtype: Any) -> int:
    """The least magnitude of the dtype that is at least ``value``."""
    rounded = np.array(value).astype(dtype)
    if float(rounded) < value:
        rounded = np.nextafter(rounded, np.array(np.inf, dtype))
    return int(rounded.view(f"i{rounded.itemsize}"))
