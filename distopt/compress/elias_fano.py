"""Send chosen entries in few bits: about 12 for an index at a density of 0.1 %, and 2, 8 or 16 for a value."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from distopt import device, kernels
from distopt.compress.base import Compressor, at_density, count_selected, of_sum
from distopt.compress.context import ExchangeContext, layout_of, per_payload
from distopt.compress.planes import INDEX, payload_size, unpack_entries
from distopt.compress.top_k import FixedDensity, Increment, Sparse
from distopt.compress.values import VALUES
from distopt.kernels.breakdown import LazyBreakdown, PayloadBreakdown
from distopt.kernels.layout import CHUNK, BucketLayout
from distopt.kernels.signatures import struct

HEADER = 16  # bytes
MAGIC = 0x45460100  # "EF", and the version of what stands after the header; the format of values makes it complete

ZEROS = np.array([8 - byte.bit_count() for byte in range(256)], np.int32)  # in a byte, by its value
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)  # the last one first
PLACES = np.where(np.arange(8) < ZEROS[:, None], 7 - np.argsort(BITS, axis=1, kind="stable"), 0)  # of its zeros, so too


class Packed(Sparse):
    """Send what ``selector`` chooses, with indices in Elias-Fano's code and values rounded to ``value``.

    The code is that of Elias, "Efficient storage and retrieval by content and address of static files", 1974, and
    Fano, "On the number of bits required to implement an associative memory", 1971.

    k indices below n are k (L + 1) + n / 2^L bits with L = floor(log2(n / k)), whatever they are: within 2 bits each of
    the least that is possible, and within 0.6 where k < n / 20 (packed.cu).  In 'float16' and 'int8' 64 neighbours
    share a power of two, from 2^-112 on, so that neither tiny nor huge ones are lost; in int8 an entry is off by
    1 / 128 of the largest at most, and what is not finite is sent as NaN.

    In '2bit' 256 neighbours share two magnitudes, the means of their smaller and of their larger ones, and each entry
    is sent as the nearer one with its sign: 2.125 bits.  What is not finite is sent as NaN, and the rest of its 256 as
    the smaller magnitude.

    What rounding leaves goes back where the entry was, so ``ErrorFeedback(Packed(TopK(0.01)))`` loses nothing: to the
    bit for magnitudes below 2^128, that is for all of float32; in 2bit to the bit for an entry between half of what it
    is sent as and 65,536 times that, which a selector's nearly always is, else within one unit in the last place of the
    larger.  Larger ones of float64 are sent as the largest there is, and the rest of them stays.

    A payload whose header was damaged, or is not this compressor's, raises ValueError; on a GPU, where a kernel cannot
    raise, its entries become NaN.

    Args:
        selector: which entries are sent.
        index: 'elias-fano'.
        value: 'float16', 'bfloat16', 'int8' or '2bit'.

    Raises:
        TypeError: for a selector that selects no entries.
        ValueError: for another code or format, and for a selector with a memory, which the errors of rounding would not
            get to.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import ExchangeContext, TopK
        >>> x = np.arange(1000, dtype=np.float32)
        >>> TopK(0.01).payload_bytes(x.size), Packed(TopK(0.01)).payload_bytes(x.size)
        (80, 56)
        >>> payload, out = Packed(TopK(0.01)).compress(x, {}, ExchangeContext()), np.zeros_like(x)
        >>> Packed(TopK(0.01)).decompress(payload, out, ExchangeContext())
        >>> np.flatnonzero(out)[:3], out[-3:]
        (array([990, 991, 992]), array([997., 998., 999.], dtype=float32))
    """

    def __init__(self, selector: Sparse, index: str = "elias-fano", value: str = "float16"):
        if not isinstance(selector, Sparse) or isinstance(selector, Packed):
            raise _not_packable(selector)
        if index != "elias-fano":
            raise ValueError(f"index must be elias-fano, got {index!r}")
        if value not in list(VALUES):  # [what has no hash is no key, and is told so too]
            raise ValueError(f"value must be one of {', '.join(VALUES)}, got {value!r}")
        self.selector, self.index, self.value = selector, index, value
        self.traits, self.density = selector.traits, selector.density
        self.reselect, self.block = selector.reselect, selector.block

    def at_density(self, density: float) -> "Packed":
        """Return the same with another density."""
        return Packed(cast(Sparse, at_density(self.selector, density)), self.index, self.value)

    def of_sum(self, ranks: int) -> "Packed":
        """Return the same for sums over so many ranks."""
        return Packed(cast(Sparse, of_sum(self.selector, ranks)), self.index, self.value)

    def count_selected(self, x: np.ndarray, counts: np.ndarray) -> None:
        """Add to ``counts[0]``, an int64, for how many entries of x there must be room."""
        count_selected(self.selector, x, counts)

    def expected_parts(self, layout: BucketLayout) -> list[tuple[int, int, int]] | None:
        return self.selector.expected_parts(layout)

    def known_entries(self, layout: BucketLayout, summed: bool) -> int | None:
        return self.selector.known_entries(layout, summed)

    def part_starts(self, layout: BucketLayout) -> np.ndarray:
        return self.selector.part_starts(layout)

    def reselect_sum(self, x: np.ndarray, add: np.ndarray, counts: np.ndarray, context: ExchangeContext) -> np.ndarray:
        return self.selector.reselect_sum(x, add, counts, context)

    def counts(self, sizes: np.ndarray) -> np.ndarray:
        """Return how many entries of each part are sent, of parts of these sizes."""
        return self._fixed.counts(sizes)

    @property
    def _fixed(self) -> FixedDensity:
        """The selector, as one that has a density."""
        if self.selector.density is None:
            raise TypeError(f"selector must be one with a density, got {self.selector!r}; use TopK")
        return cast(FixedDensity, self.selector)

    def with_density(self, density: float) -> "Packed":
        """Return the same with another density."""
        return Packed(self._fixed.with_density(density), self.index, self.value)

    def payload_bytes(self, n: int, itemsize: int = 4, layout: BucketLayout | None = None) -> int | None:
        capacity = self.capacity(n, itemsize, layout)
        return None if capacity is None else int(packing(n, capacity, self.value)["bytes"][0])

    def breakdown(self, payload: np.ndarray | None, x: np.ndarray, context: ExchangeContext) -> LazyBreakdown:
        """Tell values with their scales, and what stands between them and the header: indices."""
        layout, n, upper = layout_of(x, context), x.size, None
        if payload is None:
            k = self.capacity(n, x.itemsize, layout) or 0
        elif device.on_gpu(x):
            k = self.payload_capacity(payload, x, context)
        else:
            k = int(payload[:HEADER].view(np.uint32)[2])
        parts, counts = packing(n, k, self.value), self.known_counts(k, layout)
        if payload is not None and not device.on_gpu(x) and counts is None:
            upper = payload[int(parts["high"][0]) : int(parts["jumps"][0])].copy()

        def breakdown() -> PayloadBreakdown:
            found = counts if upper is None else counts_by_upper_part(upper, parts, layout)
            values = VALUES[self.value].value_bytes(k)
            return self.breakdown_of(k, values, int(parts["values"][0]) - HEADER, layout)._replace(counts=found)

        return breakdown

    def choice_bits(self, k: int, layout: BucketLayout) -> int:
        return self.selector.choice_bits(k, layout)

    def known_counts(self, k: int, layout: BucketLayout) -> np.ndarray | None:
        return self.selector.known_counts(k, layout)

    def capacity(self, n: int, itemsize: int, layout: BucketLayout | None) -> int | None:
        """Return for how many entries there is room, None if that depends on the data.

        Args:
            n: elements of the array; gaps between its members count.
            itemsize: bytes of an element.
            layout: where its members lie, if it has several.
        """
        planes = self.selector.payload_bytes(n, itemsize, layout)
        return None if planes is None else planes // (itemsize + INDEX)

    def extract(self, x: np.ndarray, add: Increment, context: ExchangeContext) -> np.ndarray:
        return self.selector.extract(x, add, context)

    def encode(self, planes: np.ndarray, x: np.ndarray, context: ExchangeContext) -> np.ndarray:
        index, entry = unpack_entries(planes, x.dtype)
        parts = packing(x.size, index.size, self.value)
        payload = context.scratch("packed", int(parts["bytes"][0]))
        device.clear(payload)
        kernels.pack_planes(x, index, entry, payload, _constant(parts, context))
        return payload

    def decode(
        self, payloads: Sequence[np.ndarray], out: np.ndarray, context: ExchangeContext
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Decode payloads, those of one size in one call.

        Args:
            payloads: of any number of ranks, each of uint8.
            out: an array of x's size, dtype and device, which stays as it is.
            context: the call of the compressor.

        Returns:
            For each payload the indices, ``(places,)`` of int32, and the values, ``(places,)`` of x's dtype.

        Raises:
            ValueError: the host sees a payload to be damaged.
        """
        places = [self.payload_capacity(payload, out, context) for payload in payloads]
        planes = context.scratch("entries", payload_size(sum(places), out.itemsize))
        index, entry = unpack_entries(planes, out.dtype)
        decoded, end = [], 0
        for k, pairs in itertools.groupby(zip(places, payloads, strict=True), key=lambda pair: pair[0]):
            addresses = [device.address(payload) for _, payload in pairs]
            begin, end = end, end + k * len(addresses)
            parts = _constant(packing(out.size, k, self.value), context)
            kernels.unpack_planes(per_payload("packed", addresses, context), index[begin:end], entry[begin:end], parts)
            starts = [begin + number * k for number in range(len(addresses))]
            decoded += [(index[start : start + k], entry[start : start + k]) for start in starts]
        return decoded

    def payload_capacity(self, payload: np.ndarray, out: np.ndarray, context: ExchangeContext) -> int:
        """Return for how many entries a payload has room; all places hold one if their number depends on the data.

        Args:
            payload: of uint8.
            out: an array of x's size, dtype and device, which stays as it is.
            context: the call of the compressor.

        Raises:
            ValueError: the payload, or its header where that is on the host, is not one of such an array.
        """
        places = self.capacity(out.size, out.itemsize, context.layout)
        places = context.capacity if places is None else places
        if places is None or not device.on_gpu(payload):
            if payload.nbytes < HEADER:
                raise ValueError(f"a payload must be of at least {HEADER} bytes, its header, got {payload.nbytes}")
            entries = check_header(device.host_copy(payload[:HEADER]), out.size, places, self.value)
            places = entries if places is None else places
        expected = int(packing(out.size, places, self.value)["bytes"][0])
        if payload.nbytes != expected:
            raise ValueError(
                f"a payload of {places} of {out.size} elements must be of {expected} bytes, got {payload.nbytes}"
            )
        return places

    def __repr__(self) -> str:
        return f"Packed({self.selector!r}, index={self.index!r}, value={self.value!r})"


def _not_packable(selector: Any) -> Exception:
    """Say why this cannot be packed, and what can be."""
    within = vars(selector).values() if isinstance(selector, Compressor) and selector.traits.stateful else ()
    inner = next((v for v in within if isinstance(v, Sparse)), None)
    if isinstance(selector, Packed) or isinstance(inner, Packed):
        return ValueError(f"selector must be one that is not packed already, got {selector!r}")
    if inner is not None:
        return ValueError(
            f"selector must be one without a memory, which would not get what rounding loses, got {selector!r}; "
            f"write {type(selector).__name__}(Packed({inner!r}))"
        )
    return TypeError(f"selector must be one that chooses entries, as TopK or Threshold, got {selector!r}")


@functools.lru_cache(256)
def packing(n: int, places: int, value: str) -> np.ndarray:
    """Return ``struct Packing`` of packed.cu: where everything is in a payload for so many of n entries.

    The header and the words of the upper parts stand at multiples of 8 bytes, also in payloads after this one.
    """
    form = VALUES[value]
    bits = (n // places).bit_length() - 1 if places else 0
    words = -(-(places + (n >> bits)) // 64) if places else 0
    jumps, lower = max(-(-places // CHUNK) - 1, 0), -(-places * bits // 32)
    *starts, values = itertools.accumulate((HEADER, 8 * words, 4 * jumps, 4 * lower))
    starts += [values, values + form.code_bytes(places)]
    nbytes = -(-(values + form.value_bytes(places)) // 8) * 8
    parts = np.array([(MAGIC + form.number, form.number, n, places, bits, words, *starts, nbytes)], struct("Packing"))
    parts.flags.writeable = False
    return parts


def _constant(parts: np.ndarray, context: ExchangeContext) -> device.DeviceMirror:
    """A packing where a kernel finds it."""
    return context.constant(f"packing {parts.tolist()}", parts.copy)


def check_header(header: np.ndarray, n: int, places: int | None, value: str) -> int:
    """Return how many entries a payload has, as its header says."""
    kind, size, entries, check = map(int, header.view(np.uint32))
    due = MAGIC + VALUES[value].number
    if kind != due:
        raise ValueError(f"a payload with values in {value} must begin with {due:#x}, got {kind:#x}")
    if size != n:
        raise ValueError(f"a payload must be of {n} elements, got {size}")
    expected = (kind * 0x9E3779B1 + size * 0x85EBCA77 + entries * 0xC2B2AE3D) % 2**32
    if check != expected:
        raise ValueError(
            f"a payload's header must have the checksum {expected:#x} of {entries} entries, got {check:#x}; "
            "it was damaged on its way"
        )
    if entries > (n if places is None else places):
        raise ValueError(f"a payload must be of at most {n if places is None else places} entries, got {entries}")
    return entries


def counts_by_upper_part(upper: np.ndarray, parts: np.ndarray, layout: BucketLayout) -> np.ndarray:
    """Count how many entries of a packed payload belong to each member, from the upper parts of their indices.

    Neighbours that share an upper part count as the nearer member's.  Before the z-th zero stand as many ones as
    entries have an upper part below z.
    """
    k, bits = int(parts["places"][0]), int(parts["bits"][0])
    wanted = (layout.records["offset"].astype(np.int64) + (1 << bits >> 1)) >> bits
    if not k:
        return np.zeros_like(wanted)
    zeros = np.cumsum(ZEROS[upper], dtype=np.int32)
    byte = np.minimum(np.searchsorted(zeros, wanted), upper.size - 1)
    last = PLACES[upper[byte], np.clip(zeros[byte] - wanted, 0, 7)]
    before = np.where(wanted > 0, np.minimum(8 * byte + last + 1 - wanted, k), 0)
    return np.diff(before, append=k)
