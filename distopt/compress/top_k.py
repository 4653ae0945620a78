"""Send the largest entries, as pairs of index and value."""

import abc
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from distopt import device, kernels
from distopt.checks import check_bool, check_float
from distopt.compress import select
from distopt.compress.base import Lossy, threshold_of_sum
from distopt.compress.context import ExchangeContext, Make, check_fits, layout_of, sizes_of
from distopt.compress.entry_shards import EntryShards
from distopt.compress.planes import (
    INDEX,
    add_planes,
    combination_bits,
    counts_by_member,
    payload_size,
    truncate,
    unpack_entries,
)
from distopt.compress.shards import ShardCodec
from distopt.compress.state import State
from distopt.compress.traits import Budget, Traits
from distopt.device import DeviceMirror
from distopt.kernels.breakdown import LazyBreakdown, PayloadBreakdown
from distopt.kernels.layout import CHUNK, BucketLayout

SPARE = 64  # at least one of so many entries has room
LIMIT = 2**31  # what an index can tell apart


class Increment(NamedTuple):
    """The array that is added to x before entries are selected: a gradient, with its momentum if it has a velocity.

    Args:
        gradient: ``(n,)``, or empty; it is spent where momentum is added.
        velocity: ``(n,)``, or empty for no momentum.
        momentum: by how much of itself the velocity outlives a step.
        nesterov: Nesterov's momentum.
    """

    gradient: np.ndarray
    velocity: np.ndarray
    momentum: float = 0.0
    nesterov: bool = False

    def added(self, members: BucketLayout, context: ExchangeContext) -> np.ndarray:
        """Bring the velocity up to date, which a selecting kernel on a GPU cannot do, and return what is added."""
        if self.velocity.size:
            kernels.correct_momentum(members, *self, context.skip_flag)
        return self.gradient


class Sparse(Lossy):
    """A compressor that selects entries; without error feedback the others are dropped.

    A payload is the plane of values, then the plane of 0-based int32 indices, ascending; its length tells how many.

    Attributes:
        density: the fraction of entries that is sent; None if that depends on the data.
        reselect: an owner of a shard chooses again among the sums; else it sends all of them.
        value: the format of values in a two-phase exchange (``sections``).
        block: in a two-phase exchange, shards begin at multiples of so many elements from the start of a tensor.

    Raises:
        ValueError: for buckets of 2^31 elements or more.
    """

    traits = Traits(ragged=True, counts_senders=True)
    density: float | None = None
    reselect: bool = False
    value = "exact"
    block = 64

    def sharded(self) -> ShardCodec:
        return EntryShards(self, self.value)

    def expected_parts(self, layout: BucketLayout) -> list[tuple[int, int, int]] | None:
        """Return of each part that it chooses from where it begins and ends in the flat array, and how many are sent.

        None if that depends on the data.
        """
        return None

    def known_entries(self, layout: BucketLayout, summed: bool) -> int | None:
        """Return how many entries are sent of tensors, or parts that begin at multiples of ``block``; None: unknown."""
        return None

    def breakdown(self, payload: np.ndarray | None, x: np.ndarray, context: ExchangeContext) -> LazyBreakdown:
        layout, itemsize = layout_of(x, context), x.itemsize
        if payload is None:
            k = (self.payload_bytes(x.size, itemsize, layout) or 0) // (itemsize + INDEX)
            counts = self.known_counts(k, layout)
        else:
            index, _ = unpack_entries(payload, x.dtype)
            k, counts = index.size, self.known_counts(index.size, layout)
            if counts is None and not device.on_gpu(x):
                counts = counts_by_member(index, layout)
        return lambda: self.breakdown_of(k, k * itemsize, k * INDEX, layout)._replace(counts=counts)

    def breakdown_of(self, k: int, values: int, indices: int, layout: BucketLayout) -> PayloadBreakdown:
        """Return that of k entries, of so many bytes: no code of indices has fewer bits than there are choices."""
        return PayloadBreakdown(values, indices, self.choice_bits(k, layout) + 8 * values)

    def choice_bits(self, k: int, layout: BucketLayout) -> int:
        """Return the bits that tell which k entries are sent: by default any k of all."""
        return combination_bits(int(layout.records["size"].sum()), k)

    def known_counts(self, k: int, layout: BucketLayout) -> np.ndarray | None:
        """Return how many of k entries each member has, ``(members,)``; None if that depends on the data."""
        return np.array([k]) if len(layout.names) == 1 else None

    def part_starts(self, layout: BucketLayout) -> np.ndarray:
        """Return where the parts begin that it chooses from, ``(parts,)`` of int64: by default one, all of it."""
        return np.zeros(1, np.int64)

    def reselect_sum(self, x: np.ndarray, add: np.ndarray, counts: np.ndarray, context: ExchangeContext) -> np.ndarray:
        """Move what an owner sends of a sum out of x + add, its memory and the sum: by default all that is not zero.

        ``counts`` are of the entries that all ranks have sent, by part.
        """
        return Threshold(0.0).extract(x, Increment(add, x[:0]), context)

    def compress(
        self, x: np.ndarray, state: State, context: ExchangeContext, add: np.ndarray | None = None
    ) -> np.ndarray:
        return self.encode(self.select(x, context, add), x, context)

    def select(self, x: np.ndarray, context: ExchangeContext, add: np.ndarray | Increment | None = None) -> np.ndarray:
        """Move the selected entries out of x (+ add); return the planes of their values and indices (``planes``)."""
        increment = add if isinstance(add, Increment) else Increment(x[:0] if add is None else add, x[:0])
        check_size(x.size)
        if add is not None:
            check_fits(x, increment.gradient)
        return self.extract(x, increment, context)

    @abc.abstractmethod
    def extract(self, x: np.ndarray, add: Increment, context: ExchangeContext) -> np.ndarray:
        """Replace x by x + add without the selected entries; return the planes of these."""

    def encode(self, planes: np.ndarray, x: np.ndarray, context: ExchangeContext) -> np.ndarray:
        """Return the payload that carries these planes; what it cannot carry goes back to x."""
        return planes

    def decode(
        self, payloads: Sequence[np.ndarray], out: np.ndarray, context: ExchangeContext
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the indices and values of each payload; an index below 0 is no entry."""
        return [unpack_entries(payload, out.dtype) for payload in payloads]

    def decompress(self, payload: np.ndarray, out: np.ndarray, context: ExchangeContext) -> None:
        for index, entry in self.decode([payload], out, context):
            kernels.decode_sparse(out, index, entry)

    def decompress_all(self, payloads: Sequence[np.ndarray], out: np.ndarray, context: ExchangeContext) -> None:
        """Overwrite ``out`` by the sum of payloads: in one launch on a GPU, one after the other on the host."""
        add_planes(self.decode(payloads, out, context), out, context)


def _checked_density(density: Any) -> float:
    if isinstance(density, bool) or not isinstance(density, Real):
        raise TypeError(f"density must be a number, got {density!r}")
    if not 0 < float(density) <= 1:
        raise ValueError(f"density must be in (0, 1], got {density}")
    return float(density)


def new_mirror(make: Make) -> DeviceMirror:
    """Return a table that differs from step to step."""
    return DeviceMirror(make())


def selected_counts(density: float, sizes: np.ndarray) -> np.ndarray:
    """Return a fraction of these sizes, rounded up: one at least, if there is one."""
    exact = density * sizes
    wanted = np.ceil(exact - 1e-9 * np.maximum(1.0, exact)).astype(np.int64)
    return wanted.clip(np.minimum(sizes, 1), sizes)


def check_size(n: int) -> None:
    """Raise ValueError for a flat array whose elements an int32 index cannot tell apart."""
    if n >= LIMIT:
        raise ValueError(
            f"a bucket must be of less than 2^31 elements, for int32 indices, got {n}; lower the threshold"
        )


class FixedDensity(Sparse):
    """A base class of selectors that send the same fraction of entries at every step."""

    traits = Traits(counts_senders=True, recordable=True)

    @abc.abstractmethod
    def counts(self, sizes: np.ndarray) -> np.ndarray:
        """Return how many entries of each part are sent, of parts of these sizes, ``(parts,)`` of int64."""

    def parts(self, sizes: np.ndarray) -> np.ndarray:
        """Return the sizes of what entries are chosen from, of members of these sizes: by default of each."""
        return sizes

    def payload_bytes(self, n: int, itemsize: int = 4, layout: BucketLayout | None = None) -> int:
        check_size(n)
        return payload_size(self.counts(self.parts(sizes_of(n, layout))).sum(), itemsize)

    @abc.abstractmethod
    def with_density(self, density: float) -> "FixedDensity":
        """Return a selector of another fraction, of each tensor."""


class TopK(FixedDensity):
    """Send the ``density`` fraction of entries that are largest in magnitude, exactly; ties go to the lowest index.

    NaN counts as more than infinite.

    Args:
        density: the fraction of entries that is sent: ceil(density n) of n, at least 1.
        per_tensor: select so many of each tensor, instead of the whole bucket.
        reselect: in a two-phase exchange, the owner of a shard sends as many entries of the sum as a rank sent it on
            average, the largest; False: all of them, so that the sum is exact, and its bytes grow with the ranks.
        bytes: in the place of a density, the bytes that a rank sends over the wire in a step, of the whole model,
            headers included, or a schedule of k that returns them.  A step takes the largest density that fits
            (``exchange.budget``); what is summed as it is counts.

    Raises:
        TypeError: for a density that is no number, or a ``reselect`` that is no bool.
        ValueError: for a density outside (0, 1], for bytes below 1, and for both.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import ExchangeContext
        >>> x = np.array([1, -5, 2, 4], np.float32)
        >>> payload = TopK(0.5).compress(x, {}, ExchangeContext())
        >>> payload[:8].view(np.float32), payload[8:].view(np.int32)
        (array([-5.,  4.], dtype=float32), array([1, 3], dtype=int32))
        >>> x
        array([1., 0., 2., 0.], dtype=float32)
    """

    def __init__(
        self,
        density: float | None = None,
        per_tensor: bool = False,
        reselect: bool = True,
        *,
        bytes: Budget | None = None,
    ):
        if bytes is not None:
            if density is not None:
                raise ValueError(f"density must be None with bytes, from which it follows, got {density!r}")
            budget = bytes if callable(bytes) else check_float("bytes", bytes, least=1.0)
            self.traits = replace(self.traits, budget=budget)
            self.density: float | None = None
        else:
            self.density = _checked_density(density)
        self.per_tensor: bool = bool(per_tensor)
        self.reselect: bool = check_bool("reselect", reselect)

    def count(self, n: int) -> int:
        """Return how many of n entries are sent."""
        return int(self.counts(np.array([n]))[0])

    def with_density(self, density: float) -> "TopK":
        return TopK(density, True, self.reselect)

    def at_density(self, density: float) -> "TopK":
        """Return the same with another density."""
        return TopK(density, self.per_tensor, self.reselect)

    def counts(self, sizes: np.ndarray) -> np.ndarray:
        if self.density is None:
            raise ValueError(f"bytes must be those of a step, from whose plan the density follows, got {self!r} alone")
        return selected_counts(self.density, sizes)

    def choice_bits(self, k: int, layout: BucketLayout) -> int:
        return self._of_each(layout)[1] if self.per_tensor else super().choice_bits(k, layout)

    def known_counts(self, k: int, layout: BucketLayout) -> np.ndarray | None:
        return self._of_each(layout)[0] if self.per_tensor else super().known_counts(k, layout)

    def _of_each(self, layout: BucketLayout) -> tuple[np.ndarray, int]:
        return _counts_and_bits(self.density, layout.records["size"].astype(np.int64).tobytes())

    def expected_parts(self, layout: BucketLayout) -> list[tuple[int, int, int]]:
        sizes, begins = layout.records["size"].astype(np.int64), layout.records["offset"].astype(np.int64)
        if not self.per_tensor:
            return [(0, layout.extent, int(self.counts(self.parts(sizes))[0]))]
        return list(zip(begins.tolist(), (begins + sizes).tolist(), self.counts(sizes).tolist(), strict=True))

    def extract(self, x: np.ndarray, add: Increment, context: ExchangeContext) -> np.ndarray:
        """Select from a first guess of how large the largest entries are (topk_host.cu, topk_device.cu)."""
        members = layout_of(x, context)
        sizes = members.records["size"].astype(np.int64)

        def kept(make: Make) -> DeviceMirror:
            return context.constant(f"parts of {self!r}", make)

        return self._extract(members, x, add, self.counts(self.parts(sizes)), kept, context)

    def part_starts(self, layout: BucketLayout) -> np.ndarray:
        return layout.records["offset"].astype(np.int64) if self.per_tensor else super().part_starts(layout)

    def reselect_sum(self, x: np.ndarray, add: np.ndarray, counts: np.ndarray, context: ExchangeContext) -> np.ndarray:
        """Select the largest entries of a sum: of each part as many as a rank has sent of it on average, rounded up."""
        if not self.reselect:
            return super().reselect_sum(x, add, counts, context)
        members = layout_of(x, context)
        return self._extract(members, x, Increment(add, x[:0]), -(-counts // context.size), new_mirror, context)

    def _extract(
        self,
        members: BucketLayout,
        x: np.ndarray,
        add: Increment,
        counts: np.ndarray,
        mirror: Callable[[Make], DeviceMirror],
        context: ExchangeContext,
    ) -> np.ndarray:
        """Move the largest entries out of x + add, so many of each part; ``mirror`` brings a table to a GPU."""
        if self.per_tensor:
            offsets, sizes = members.records["offset"].astype(np.int64), members.records["size"].astype(np.int64)
        else:  # one part, in which the gaps lie, of which nothing is selected
            offsets, sizes = np.zeros(1, np.int64), np.array([x.size], np.int64)
        payload = context.bucket.scratch("payload", payload_size(np.add.reduce(counts), x.itemsize))
        planes = unpack_entries(payload, x.dtype)
        if device.on_gpu(x):
            parts = mirror(lambda: select.parts_table(offsets, sizes, counts))
            held = context.bucket.scratch("candidates", payload_size(select.candidates(parts.host), x.itemsize))
            state = context.bucket.scratch("state", 8 * select.largest_words(parts.host, x.dtype)).view(np.int64)
            added, candidates = add.added(members, context), unpack_entries(held, x.dtype)
            select.select_largest(members, x, added, parts, *planes, state, *candidates, context.skip_flag)
        else:
            candidates = np.minimum(sizes, counts + np.maximum(counts, sizes // SPARE))
            room = np.maximum.reduce(candidates, initial=0) + CHUNK
            held = context.bucket.scratch("candidates", payload_size(room, x.itemsize))
            parts_of = members.edges.host, offsets, sizes, counts
            kernels.encode_largest(x, *add, *parts_of, *planes, *unpack_entries(held, x.dtype), None)
        return payload

    def parts(self, sizes: np.ndarray) -> np.ndarray:
        return sizes if self.per_tensor else sizes.sum(keepdims=True)

    def __repr__(self) -> str:
        amount = f"bytes={self.traits.budget}" if self.density is None else f"{self.density}"
        return f"TopK({amount}, per_tensor={self.per_tensor}{', reselect=False' * (not self.reselect)})"


@functools.lru_cache(256)
def _counts_and_bits(density: float, sizes: bytes) -> tuple[np.ndarray, int]:
    """Entries of tensors, whose sizes are the bytes of int64, and the bits that tell which these are."""
    all_of = np.frombuffer(sizes, np.int64)
    counts = selected_counts(density, all_of)
    return counts, sum(map(combination_bits, all_of.tolist(), counts.tolist()))


class Threshold(Sparse):
    """Send the entries whose magnitude is at least ``magnitude``.

    NaN counts as infinite.  On a GPU, with error feedback, at most twice as many entries are sent as the rank with most
    of them had in the step before; the others stay behind.

    Args:
        magnitude: in units of the local, un-averaged gradient; 0 sends everything that is not zero.
        reselect: in a two-phase exchange, the owner of a shard sends what reaches this magnitude in the mean over
            ranks; False: all of the sum, so that it is exact, and its bytes grow with the ranks.

    Raises:
        TypeError: for a magnitude that is no number, or a ``reselect`` that is no bool.
        ValueError: for one that is negative or not finite.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import ExchangeContext
        >>> x = np.array([1, -5, 2, 4], np.float32)
        >>> payload = Threshold(4.0).compress(x, {}, ExchangeContext())
        >>> payload[:8].view(np.float32), payload[8:].view(np.int32)
        (array([-5.,  4.], dtype=float32), array([1, 3], dtype=int32))
    """

    traits = Traits(ragged=True, counts_senders=True, bounded=True)

    def __init__(self, magnitude: float, reselect: bool = True):
        if isinstance(magnitude, bool) or not isinstance(magnitude, Real):
            raise TypeError(f"magnitude must be a number, got {magnitude!r}")
        if not 0 <= magnitude < math.inf:
            raise ValueError(f"magnitude must be finite and at least 0, got {magnitude}")
        self.magnitude: float = float(magnitude)
        self.reselect: bool = check_bool("reselect", reselect)

    def payload_bytes(self, n: int, itemsize: int = 4, layout: BucketLayout | None = None) -> None:
        check_size(n)

    def extract(self, x: np.ndarray, add: Increment, context: ExchangeContext) -> np.ndarray:
        added = add.added(layout_of(x, context), context)
        return self._extract_on_gpu(x, added, context) if device.on_gpu(x) else self._extract_on_host(x, added, context)

    def count_selected(self, x: np.ndarray, counts: np.ndarray) -> None:
        """Add to ``counts[0]``, an int64, for how many entries of x there must be room."""
        kernels.count_above(x, counts, self._bound(x))

    def reselect_sum(self, x: np.ndarray, add: np.ndarray, counts: np.ndarray, context: ExchangeContext) -> np.ndarray:
        """Select the entries of a sum whose mean over ranks reaches the threshold."""
        if not self.reselect:
            return super().reselect_sum(x, add, counts, context)
        return self.of_sum(context.size).extract(x, Increment(add, x[:0]), context)

    def of_sum(self, ranks: int) -> "Threshold":
        """Return the same for sums over so many ranks."""
        return Threshold(threshold_of_sum(self.magnitude, ranks), self.reselect)

    def _bound(self, x: np.ndarray) -> int:
        """The magnitude above which entries are sent."""
        return max(_magnitude(self.magnitude, x.dtype), 1) - 1

    def _extract_on_host(self, x: np.ndarray, add: np.ndarray, context: ExchangeContext) -> np.ndarray:
        """Begin with room for few entries, and go on with room for all if they turn out to be many."""
        place, bound = np.zeros(2, np.int64), self._bound(x)
        payload = context.scratch("payload", payload_size(x.size // SPARE + CHUNK, x.itemsize))
        kernels.encode_above(x, add, *unpack_entries(payload, x.dtype), place, bound)
        if place[0] < x.size:
            first = truncate(payload, int(place[1]), x.dtype)
            payload = context.scratch("payload", payload_size(x.size + CHUNK, x.itemsize))
            for plane, part in zip(*(unpack_entries(p, x.dtype) for p in (payload, first)), strict=True):
                plane[: part.size] = part
            kernels.encode_above(x, add, *unpack_entries(payload, x.dtype), place, bound)
        return truncate(payload, int(place[1]), x.dtype)

    def _extract_on_gpu(self, x: np.ndarray, add: np.ndarray, context: ExchangeContext) -> np.ndarray:
        """Return a payload of ``capacity`` entries, padded; without one the host waits for their number."""
        capacity = context.capacity
        if capacity is None:
            if add.size:
                kernels.accumulate(add, x, context.skip_flag)
                add = x[:0]
            count = device.zeros(1, np.int64, x)
            self.count_selected(x, count)
            capacity = int(device.host_copy(count)[0])
        payload = context.scratch("payload", payload_size(capacity, x.itemsize))
        state = context.scratch("state", 8 * select.above_words(x.size)).view(np.int64)
        place = context.scratch("place", 16).view(np.int64)
        select.select_above(x, add, *unpack_entries(payload, x.dtype), place, self._bound(x), state, context.skip_flag)
        if context.wanted is not None:
            device.copy(context.wanted, place[1:])
        return payload

    def __repr__(self) -> str:
        return f"Threshold({self.magnitude}{', reselect=False' * (not self.reselect)})"


def _magnitude(value: float, dtype: Any) -> int:
    """Return the bits of the least magnitude of the dtype that is at least ``value``."""
    with np.errstate(over="ignore"):  # what no number of the dtype reaches is infinite
        rounded = np.array(value).astype(dtype)
    if float(rounded) < value:
        rounded = np.nextafter(rounded, np.array(np.inf, dtype))
    return int(rounded.view(f"i{rounded.itemsize}"))
