"""The make-up of payloads by type of compressor, for ledgers and forecasts.

Of a compressor that is not registered here, a payload counts as values alone.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distopt import device
from distopt.comm.message import LazyBreakdown, PayloadBreakdown
from distopt.compress import (
    DCT,
    Chunks,
    Compressor,
    DeepGradientCompression,
    ErrorFeedback,
    ExchangeContext,
    Packed,
    TopK,
)
from distopt.compress.blocks import Blocks, BlockShards
from distopt.compress.context import layout_of, sizes_of
from distopt.compress.elias_fano import HEADER, packing
from distopt.compress.entry_shards import EntryShards
from distopt.compress.planes import INDEX, unpack_entries
from distopt.compress.quantize import Codec, CodeShards
from distopt.compress.sections import HEADER as HEADER_OF_SECTION
from distopt.compress.shards import Payload, Piece, ShardCodec
from distopt.compress.top_k import Sparse, selected_counts
from distopt.compress.values import VALUES
from distopt.kernels.layout import BucketLayout

SAMPLED = 2048  # bytes of codes from which their entropy is estimated
GOLDEN = (math.sqrt(5) - 1) / 2
ZEROS = np.array([8 - byte.bit_count() for byte in range(256)], np.int32)  # in a byte, by its value
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)  # the last one first
PLACES = np.where(np.arange(8) < ZEROS[:, None], 7 - np.argsort(BITS, axis=1, kind="stable"), 0)  # of its zeros, so too


# ------------------------------------------------------------------------------------------------- of a payload


@functools.singledispatch
def payload_breakdown(
    compressor: Compressor, payload: np.ndarray, x: np.ndarray, context: ExchangeContext
) -> LazyBreakdown:
    """Read what is needed of a payload now, and return a function that computes its make-up later.

    The payload may be overwritten in between, and no ledger may hold on to it.  Register a rule for a compressor of
    your own with ``@payload_breakdown.register``.

    Args:
        compressor: what has made the payload.
        payload: what ``compress`` returned.
        x: the flat array that it was made of, ``(n,)``, for its size, dtype and device.
        context: the call in which it was made.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import ExchangeContext, TopK
        >>> x = np.array([1, -5, 2, 4], np.float32)
        >>> payload = TopK(0.5).compress(x, {}, ExchangeContext())
        >>> payload_breakdown(TopK(0.5), payload, x, ExchangeContext())()
        PayloadBreakdown(values=8, indices=8, ideal=67, counts=array([2]))
    """
    nbytes = payload.nbytes
    return lambda: PayloadBreakdown(nbytes)


@payload_breakdown.register
def _(compressor: ErrorFeedback | DCT, payload: np.ndarray, x: np.ndarray, context: ExchangeContext) -> LazyBreakdown:
    return payload_breakdown(compressor.compressor, payload, x, context)


@payload_breakdown.register
def _(
    compressor: DeepGradientCompression, payload: np.ndarray, x: np.ndarray, context: ExchangeContext
) -> LazyBreakdown:
    layout = layout_of(x, context)
    selected = compressor.selected(layout, context)
    of_selected = payload_breakdown(compressor.selector, payload, x, compressor.selection(layout, context))

    def breakdown() -> PayloadBreakdown:
        inner = of_selected()
        if inner.counts is None:
            return inner
        counts = np.zeros(len(layout.names), np.int64)
        counts[selected] = inner.counts
        return inner._replace(counts=counts)

    return breakdown


@payload_breakdown.register
def _(compressor: Sparse, payload: np.ndarray, x: np.ndarray, context: ExchangeContext) -> LazyBreakdown:
    layout, itemsize, (index, _) = layout_of(x, context), x.itemsize, unpack_entries(payload, x.dtype)
    k, known = index.size, known_counts(compressor, layout)
    read = None if known or device.on_gpu(x) else counts_by_member(index, layout)

    def breakdown() -> PayloadBreakdown:
        counts = known(k) if known else read
        return _entries(compressor, k * itemsize, k * INDEX, k, layout)._replace(counts=counts)

    return breakdown


@payload_breakdown.register
def _(compressor: Packed, payload: np.ndarray, x: np.ndarray, context: ExchangeContext) -> LazyBreakdown:
    """Values with their scales; upper parts, jumps and lower parts of the indices; the rest is the header."""
    layout, n, on_host, upper = layout_of(x, context), x.size, not device.on_gpu(x), None
    k = int(payload[:HEADER].view(np.uint32)[2]) if on_host else compressor.payload_capacity(payload, x, context)
    parts, known = packing(n, k, compressor.value), known_counts(compressor, layout)
    if on_host and not known:
        upper = payload[int(parts["high"][0]) : int(parts["jumps"][0])].copy()

    def breakdown() -> PayloadBreakdown:
        counts = known(k) if known else None if upper is None else counts_by_upper_part(upper, parts, layout)
        return _packed(compressor, n, k, layout)._replace(counts=counts)

    return breakdown


@payload_breakdown.register
def _(compressor: Codec, payload: np.ndarray, x: np.ndarray, context: ExchangeContext) -> LazyBreakdown:
    """Codes behind a header; a host estimates from some of them to how few bits all could be coded."""
    n, bits, codes, header = x.size, compressor.bits, payload[compressor.header :], 8 * compressor.header
    nbytes = codes.nbytes
    if device.on_gpu(codes):
        return lambda: PayloadBreakdown(nbytes)
    sample = codes[sampled(-(-n * bits // 8))]
    return lambda: PayloadBreakdown(nbytes, ideal=header + round(n * entropy(count_codes(sample, bits, n))))


@payload_breakdown.register
def _(compressor: Blocks, payload: np.ndarray, x: np.ndarray, context: ExchangeContext) -> LazyBreakdown:
    breakdown = forecast_breakdown(compressor, x.size, x.itemsize, layout_of(x, context))
    return lambda: breakdown


# ------------------------------------------------------------------------------------------------- of pieces


@functools.singledispatch
def shard_breakdown(
    codec: ShardCodec, payloads: Sequence[tuple[Piece, Payload]], members: BucketLayout
) -> LazyBreakdown:
    """Read what is needed of the payloads of pieces, and return a function that computes their make-up later.

    Args:
        codec: what has made them.
        payloads: the pieces, and of each its payload.
        members: of the whole plan, among which entries are shared out.
    """
    total = sum(payload.data.nbytes for _, payload in payloads)
    return lambda: PayloadBreakdown(total)


@shard_breakdown.register
def _(codec: EntryShards, payloads: Sequence[tuple[Piece, Payload]], members: BucketLayout) -> LazyBreakdown:
    """Values with their scales, and indices; the rest is headers, and what aligns."""
    if any(device.on_gpu(payload.data) for _, payload in payloads):
        return lambda: PayloadBreakdown(sum(payload.data.nbytes for _, payload in payloads))
    values = indices = ideal = 0
    counts, row = np.zeros(len(members.names), np.int64), {name: k for k, name in enumerate(members.names)}
    for piece, payload in payloads:
        of_values = codec.value_bytes(payload.entries, piece.layout.dtype.itemsize)
        values += of_values
        indices += payload.data.nbytes - HEADER_OF_SECTION - of_values
        ideal += combination_bits(piece.size, payload.entries) + 8 * of_values
        index = codec.indices(payload, piece)
        counts[[row[name] for name in piece.layout.names]] += counts_by_member(index, piece.layout)
    return lambda: PayloadBreakdown(values, indices, ideal, counts)


@shard_breakdown.register
def _(
    codec: CodeShards | BlockShards, payloads: Sequence[tuple[Piece, Payload]], members: BucketLayout
) -> LazyBreakdown:
    """Codes beside scales, of all elements of the pieces."""
    counts, row = np.zeros(len(members.names), np.int64), {name: k for k, name in enumerate(members.names)}
    total = 0
    for piece, _ in payloads:
        total += codec.code_bytes(piece)
        counts[[row[name] for name in piece.layout.names]] += piece.layout.records["size"]
    return lambda: PayloadBreakdown(total, counts=counts)


# ------------------------------------------------------------------------------------------------- before there is one


@functools.singledispatch
def forecast_breakdown(compressor: Compressor, n: int, itemsize: int, bucket: BucketLayout) -> PayloadBreakdown:
    """Compute the make-up of a payload of n elements of ``itemsize`` bytes, as far as it depends on no data.

    Register a rule for a compressor of your own with ``@forecast_breakdown.register``.

    Args:
        compressor: what would make the payload.
        n: elements of the flat array.
        itemsize: bytes of each.
        bucket: where its members lie.
    """
    return PayloadBreakdown(compressor.payload_bytes(n, itemsize, bucket) or 0)


@forecast_breakdown.register
def _(compressor: ErrorFeedback | DCT, n: int, itemsize: int, bucket: BucketLayout) -> PayloadBreakdown:
    return forecast_breakdown(compressor.compressor, n, itemsize, bucket)


@forecast_breakdown.register
def _(compressor: DeepGradientCompression, n: int, itemsize: int, bucket: BucketLayout) -> PayloadBreakdown:
    return forecast_breakdown(
        compressor.selector, n, itemsize, bucket.select(compressor.selected(bucket, ExchangeContext()))
    )


@forecast_breakdown.register
def _(compressor: TopK, n: int, itemsize: int, bucket: BucketLayout) -> PayloadBreakdown:
    k = int(compressor.counts(compressor.parts(sizes_of(n, bucket))).sum())
    return _entries(compressor, k * itemsize, k * INDEX, k, bucket)


@forecast_breakdown.register
def _(compressor: Chunks, n: int, itemsize: int, bucket: BucketLayout) -> PayloadBreakdown:
    k = int(compressor.counts(sizes_of(n, bucket)).sum())
    return _entries(compressor, k * itemsize, k * INDEX, k, bucket)


@forecast_breakdown.register
def _(compressor: Packed, n: int, itemsize: int, bucket: BucketLayout) -> PayloadBreakdown:
    return _packed(compressor, n, compressor.capacity(n, itemsize, bucket) or 0, bucket)


@forecast_breakdown.register
def _(compressor: Codec, n: int, itemsize: int, bucket: BucketLayout) -> PayloadBreakdown:
    return PayloadBreakdown(compressor.payload_bytes(n, itemsize, bucket) - compressor.header)


@forecast_breakdown.register
def _(compressor: Blocks, n: int, itemsize: int, bucket: BucketLayout) -> PayloadBreakdown:
    """Codes; the rest is scales, and what fills up words."""
    return PayloadBreakdown(compressor.code_bytes(sizes_of(n, bucket)))


# ------------------------------------------------------------------------------------------------- of entries


def _entries(compressor: Sparse, values: int, indices: int, k: int, layout: BucketLayout) -> PayloadBreakdown:
    """So many bytes of k values and of their indices; no code of the indices has fewer bits than there are choices."""
    return PayloadBreakdown(values, indices, choice_bits(compressor, k, layout) + 8 * values)


def _packed(compressor: Packed, n: int, k: int, layout: BucketLayout) -> PayloadBreakdown:
    """The make-up of a packed payload of k of n entries; indices are what stands between header and values."""
    start = int(packing(n, k, compressor.value)["values"][0])
    return _entries(compressor, VALUES[compressor.value].value_bytes(k), start - HEADER, k, layout)


@functools.singledispatch
def choice_bits(selector: Any, k: int, layout: BucketLayout) -> int:
    """Return the bits that tell which k entries a selector has chosen: by default any k of all."""
    return combination_bits(_elements(layout), k)


@choice_bits.register
def _(selector: TopK, k: int, layout: BucketLayout) -> int:
    return _per_tensor(selector, layout)[1] if selector.per_tensor else combination_bits(_elements(layout), k)


@choice_bits.register
def _(selector: Chunks, k: int, layout: BucketLayout) -> int:
    full, rest = np.divmod(layout.records["size"].astype(np.int64), selector.of)
    of_rest = (combination_bits(n, -(-n * selector.k // selector.of)) for n in rest.tolist())
    return int(full.sum()) * combination_bits(selector.of, selector.k) + sum(of_rest)


@choice_bits.register
def _(selector: Packed, k: int, layout: BucketLayout) -> int:
    return choice_bits(selector.selector, k, layout)


@functools.singledispatch
def known_counts(selector: Any, layout: BucketLayout) -> Callable[[int], np.ndarray] | None:
    """Return a function of k that says how many of k entries each member has; None if that depends on the data."""
    return (lambda k: np.array([k])) if len(layout.names) == 1 else None


@known_counts.register
def _(selector: TopK, layout: BucketLayout) -> Callable[[int], np.ndarray] | None:
    if selector.per_tensor:
        return lambda k: _per_tensor(selector, layout)[0]
    return (lambda k: np.array([k])) if len(layout.names) == 1 else None


@known_counts.register
def _(selector: Chunks, layout: BucketLayout) -> Callable[[int], np.ndarray] | None:
    return lambda k: selector.counts(layout.records["size"])


@known_counts.register
def _(selector: Packed, layout: BucketLayout) -> Callable[[int], np.ndarray] | None:
    return known_counts(selector.selector, layout)


def _elements(layout: BucketLayout) -> int:
    return int(layout.records["size"].sum())


def _per_tensor(selector: TopK, layout: BucketLayout) -> tuple[np.ndarray, int]:
    return _counts_and_bits(selector.density, layout.records["size"].astype(np.int64).tobytes())


@functools.lru_cache(256)
def _counts_and_bits(density: float, sizes: bytes) -> tuple[np.ndarray, int]:
    """Entries of tensors, whose sizes are the bytes of int64, and the bits that tell which these are."""
    all_of = np.frombuffer(sizes, np.int64)
    counts = selected_counts(density, all_of)
    return counts, sum(map(combination_bits, all_of.tolist(), counts.tolist()))


@functools.lru_cache(1024)
def combination_bits(n: int, k: int) -> int:
    """Return the bits that tell which k of n: the logarithm of the binomial coefficient."""
    return round((math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2))


def counts_by_member(index: np.ndarray, layout: BucketLayout) -> np.ndarray:
    """Count how many of these indices, on the host, belong to each member; they ascend, and none is in a gap."""
    starts = layout.records["offset"].astype(index.dtype)
    return np.diff(np.searchsorted(index, starts), append=index.size)


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


# ------------------------------------------------------------------------------------------------- of codes


@functools.lru_cache(256)
def sampled(size: int) -> np.ndarray:
    """Return the places of ``SAMPLED`` of so many bytes, all if there are no more.

    The golden section's multiples are spread evenly, and in step with no width of a matrix (Weyl, 1916).
    """
    if size <= SAMPLED:
        return np.arange(size)
    return (np.arange(SAMPLED) * GOLDEN % 1 * size).astype(np.int64)


def count_codes(sample: np.ndarray, bits: int, n: int) -> np.ndarray:
    """Count each code of so many bits in some bytes, or in those of all n elements, whose last one may be filled up.

    What it is filled up with are zeros, which do not count.
    """
    counts: np.ndarray = np.bincount(sample, minlength=256) @ codes_by_byte(bits)
    counts[0] -= max(0, 8 // bits * sample.size - n)
    return counts


@functools.cache
def codes_by_byte(bits: int) -> np.ndarray:
    """Count each code of so many bits in a byte, by the byte's value, ``(256, 2 ** bits)``."""
    codes = [[byte >> place & (1 << bits) - 1 for place in range(0, 8, bits)] for byte in range(256)]
    return np.array([np.bincount(row, minlength=1 << bits) for row in codes])


def entropy(counts: np.ndarray) -> float:
    """Return the bits of information in one symbol, of symbols that were counted so often (Shannon, 1948)."""
    fractions = counts[counts > 0] / max(1, counts.sum())
    return float(-fractions @ np.log2(fractions))
