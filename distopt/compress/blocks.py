"""Send every element as an integer of 8 bits or 4, beside a scale for each block of them (blocks.cu)."""

import functools
import itertools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distopt import device, kernels
from distopt.checks import check_int, check_one_of
from distopt.compress.base import Lossy
from distopt.compress.context import ExchangeContext, check_fits, layout_of, per_payload, sizes_of
from distopt.compress.shards import (
    ElementShards,
    Payload,
    Piece,
    PieceBytes,
    Selected,
    ShardCodec,
    ShardTraits,
    remembered,
)
from distopt.compress.state import State
from distopt.compress.traits import Traits
from distopt.device import DeviceMirror
from distopt.kernels.breakdown import LazyBreakdown, PayloadBreakdown
from distopt.kernels.layout import CHUNK, BucketLayout

SMALLEST = 32  # elements of a block at least
ROUNDINGS = "nearest", "stochastic"
OF_RANK, OF_SUM = range(2)  # what random numbers are for: the two phases of an exchange


class Blocks(Lossy):
    """A compressor whose payload has, member by member, a code for every element and a bfloat16 for every block.

    Wang et al., "ZeRO++: extremely efficient collective communication for giant model training", 2023, exchange
    gradients so.  What codes do not stand for stays in x; without error feedback it is dropped.

    Args:
        block: elements that share a scale; the last block of a tensor, or of its part in a shard, may be shorter.
        rounding: 'nearest', ties to even, or 'stochastic': up or down at random, so that the mean is the element.
        seed: of 'stochastic'; random numbers are a function of it, the step, the rank, the name of the bucket's first
            tensor and the element's position.

    Raises:
        TypeError: for a block or a seed that is no integer.
        ValueError: for a block that is no power of two in [32, 4096], an unknown rounding, or a seed outside [0, 2^64).
    """

    bits: int  # of a code

    def __init__(self, block: int, rounding: str = "nearest", seed: int = 0):
        self.block = check_int("block", block, SMALLEST)
        if self.block > CHUNK or self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two in [{SMALLEST}, {CHUNK}], got {block}")
        self.rounding = check_one_of("rounding", rounding, ROUNDINGS)
        # Random numbers depend on the step.
        self.traits = Traits(of_sums=True, changes_with_step=self.rounding == "stochastic")
        self.seed = check_int("seed", seed, 0)
        if self.seed >= 2**64:
            raise ValueError(f"seed must be at least 0 and below 2^64, got {seed}")
        self._encode, self._dither, self._decode = (
            getattr(kernels, f"{verb}_int{self.bits}") for verb in ("encode", "dither", "decode")
        )

    def payload_bytes(self, n: int, itemsize: int = 4, layout: BucketLayout | None = None) -> int:
        return int(_member_bytes(sizes_of(n, layout), self.bits, self.block).sum())

    def code_bytes(self, sizes: np.ndarray) -> int:
        """Return the bytes of the codes of members of these sizes, without what fills them up."""
        return int((-(-sizes * self.bits // 8)).sum())

    def breakdown(self, payload: np.ndarray | None, x: np.ndarray, context: ExchangeContext) -> LazyBreakdown:
        """Count codes; the rest is scales, and what fills up words."""
        codes = self.code_bytes(sizes_of(x.size, layout_of(x, context)))
        return lambda: PayloadBreakdown(codes)

    def nbytes(self, sizes: np.ndarray) -> int:
        """Return the bytes of a payload of members of these sizes."""
        return int(_member_bytes(sizes, self.bits, self.block).sum())

    def sharded(self) -> ShardCodec:
        return BlockShards(self)

    def compress(
        self, x: np.ndarray, state: State, context: ExchangeContext, add: np.ndarray | None = None
    ) -> np.ndarray:
        return self.encode(x, add, self.whole(x, context), context, (OF_RANK, context.rank))

    def decompress(self, payload: np.ndarray, out: np.ndarray, context: ExchangeContext) -> None:
        self.decode([payload], out, self.whole(out, context), context, adds=True)

    def decompress_all(self, payloads: Sequence[np.ndarray], out: np.ndarray, context: ExchangeContext) -> None:
        """Overwrite ``out`` by the sum of payloads, in one pass; what lies between its members stays as it is."""
        self.decode(payloads, out, self.whole(out, context), context)

    def whole(self, x: np.ndarray, context: ExchangeContext) -> "Placed":
        """Return one payload that has all of x."""
        return self.placed((layout_of(x, context),), (0,))

    def placed(self, layouts: tuple[BucketLayout, ...], starts: tuple[int, ...]) -> "Placed":
        """Return the places of members in a payload for each of these stretches of a flat array."""
        return _placed(layouts, starts, self.bits, self.block)

    def encode(
        self,
        x: np.ndarray,
        add: np.ndarray | None,
        to: "Placed",
        context: ExchangeContext,
        use: tuple[int, int],
        base: int = 0,
    ) -> np.ndarray:
        """Move what its codes stand for out of x + ``add``, in one pass; return the payloads, one after the other."""
        if add is not None:
            check_fits(x, add)
        payload = context.scratch("payload", sum(to.nbytes))
        given = to.layout, x, x if add is None else add, add is not None, payload, to.outbox, self.block
        if self.rounding == "nearest":
            self._encode(*given, context.skip_flag)
        else:
            place = zlib.crc32(ascii(layout_of(x, context).names[:1]).encode())  # of no other bucket or fragment
            self._dither(*given, random_key(self.seed, context.step, *use, place), base, context.skip_flag)
        return payload

    def decode(
        self,
        payloads: Sequence[np.ndarray],
        out: np.ndarray,
        of: "Placed",
        context: ExchangeContext,
        adds: bool = False,
    ) -> None:
        """Overwrite ``out`` by the sum of payloads, in their order and in one pass."""
        ranks = len(payloads) // len(of.nbytes)
        for payload, expected in zip(payloads, np.repeat(of.nbytes, ranks).tolist(), strict=True):
            if payload.nbytes != expected:
                raise ValueError(f"a payload of {out.size} elements must be of {expected} bytes, got {payload.nbytes}")
        addresses = per_payload("payloads", [device.address(payload) for payload in payloads], context)
        self._decode(of.layout, out, addresses, of.place, of.number, ranks, self.block, adds)


class Int8(Blocks):
    """Send each block's elements as multiples, from -127 to 127, of a scale: 8.06 bits an element.

    The scale is a bfloat16, by which the block's largest element has the code 127 or -127, so that an element moves by
    at most 1 / 253 of that.  A block in which something is not finite arrives as NaN, and nothing of it stays behind.

    Args:
        block: elements that share a scale, a power of two in [32, 4096]; no block has elements of two tensors.
        rounding: 'nearest', ties to even, or 'stochastic': up or down at random, so that the mean is the element
            (Alistarh et al., "QSGD", 2017), which then moves by up to twice as much.
        seed: of 'stochastic'; random numbers are a function of it, the step, the rank, the name of the bucket's first
            tensor and the element's position.

    Raises:
        TypeError: for a block or a seed that is no integer.
        ValueError: for a block that is no such power of two, an unknown rounding, or a seed outside [0, 2^64).

    Example:
        >>> import numpy as np
        >>> from distopt.compress import ExchangeContext
        >>> x = np.array([127, -63.75, 0.25, 0], np.float32)
        >>> payload = Int8().compress(x, {}, ExchangeContext())
        >>> payload[:4].view(np.int8), payload.nbytes  # the scale, 1, follows them
        (array([127, -64,   0,   0], dtype=int8), 8)
        >>> x
        array([0.  , 0.25, 0.25, 0.  ], dtype=float32)
    """

    bits = 8

    def __init__(self, block: int = 256, rounding: str = "nearest", seed: int = 0):
        super().__init__(block, rounding, seed)


class Int4(Blocks):
    """Send each block's elements as multiples, from -7 to 7, of a scale: 4.13 bits an element.

    As ``Int8``, but that an element moves by up to 1 / 13 of the largest of its block; use it with ``ErrorFeedback``.

    Args:
        block: as of ``Int8``.
        rounding: as of ``Int8``.
        seed: as of ``Int8``.

    Raises:
        TypeError: for a block or a seed that is no integer.
        ValueError: for a block that is no such power of two, an unknown rounding, or a seed outside [0, 2^64).

    Example:
        >>> import numpy as np
        >>> from distopt.compress import ExchangeContext
        >>> x = np.array([7, -3.25, 0.25, 0], np.float32)
        >>> payload = Int4().compress(x, {}, ExchangeContext())
        >>> payload[:2].tolist() == [0xD7, 0x00], payload.nbytes  # the first element is in the lower half of a byte
        (True, 8)
        >>> x
        array([ 0.  , -0.25,  0.25,  0.  ], dtype=float32)
    """

    bits = 4

    def __init__(self, block: int = 128, rounding: str = "nearest", seed: int = 0):
        super().__init__(block, rounding, seed)


def random_key(*numbers: int) -> int:
    """Return 64 bits, as a signed number, that depend on all numbers: SplitMix64 (Steele et al., 2014) of each."""
    key, bits = 0, 2**64 - 1
    for number in numbers:
        key = (key + number + 0x9E3779B97F4A7C15) & bits
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & bits
        key = (key ^ key >> 27) * 0x94D049BB133111EB & bits
        key ^= key >> 31
    return key - (key >> 63 << 64)


class Placed(NamedTuple):
    """Where members are in payloads, one for each stretch of a flat array.

    Args:
        layout: the members of all stretches, at their places in the flat array.
        nbytes: of each payload.
        outbox: where each member begins in all payloads one after the other.
        place: where each member begins in its payload.
        number: of each member's payload.
    """

    layout: BucketLayout
    nbytes: list[int]
    outbox: DeviceMirror
    place: DeviceMirror
    number: DeviceMirror


@functools.lru_cache(256)
def _placed(layouts: tuple[BucketLayout, ...], starts: tuple[int, ...], bits: int, block: int) -> Placed:
    counts = [len(layout.names) for layout in layouts]
    sizes = np.concatenate([layout.records["size"].astype(np.int64) for layout in layouts])
    offsets = np.concatenate([layout.records["offset"].astype(np.int64) for layout in layouts])
    number = np.repeat(np.arange(len(layouts)), counts)
    each = _member_bytes(sizes, bits, block)
    outbox = np.cumsum(each) - each
    nbytes = np.bincount(number, each, len(layouts)).astype(np.int64)
    place = outbox - (np.cumsum(nbytes) - nbytes)[number]
    layout = layouts[0]
    if len(layouts) > 1 or starts[0]:
        layout = BucketLayout(
            [name for layout in layouts for name in layout.names],
            [shape for layout in layouts for shape in layout.shapes],
            (offsets + np.array(starts, np.int64)[number]).tolist(),
            layout.stored,
        )
    return Placed(layout, nbytes.tolist(), DeviceMirror(outbox), DeviceMirror(place), DeviceMirror(number))


def _member_bytes(sizes: np.ndarray, bits: int, block: int) -> np.ndarray:
    """Return the bytes of members of these sizes: codes, and scales of two bytes, each in whole words of four."""
    scales = -(-sizes // block)
    members: np.ndarray = 4 * (-(-sizes * bits // 32) - (-scales // 2))
    return members


def _sizes(piece: Piece) -> np.ndarray:
    """Return the elements of each member of a piece."""
    return piece.layout.records["size"].astype(np.int64)


class BlockShards(ElementShards):
    """Blocks are cut at their borders, so that shards have the codes and scales of the whole.

    Args:
        blocks: makes the codes.
    """

    def __init__(self, blocks: Blocks):
        self._blocks, self.traits = blocks, ShardTraits(blocks.block)

    def expected_bytes(self, layout: BucketLayout, pieces: Sequence[Piece], summed: bool) -> list[PieceBytes]:
        # of sizes alone: places, which the payloads of a step have anyway, are most of the time of a forecast
        sizes = map(_sizes, pieces)
        return [PieceBytes(self._blocks.nbytes(n), self._blocks.code_bytes(n)) for n in sizes]

    def code_bytes(self, piece: Piece) -> int:
        return self._blocks.code_bytes(_sizes(piece))

    def select(
        self, x: np.ndarray, state: State, context: ExchangeContext, pieces: Sequence[Piece], places: np.ndarray
    ) -> Selected:
        if not pieces:
            return Selected(context.scratch("payload", 0), x)
        memory, add = remembered(self, x, state, context)
        payload = self._blocks.encode(memory, add, self._of_pieces(pieces), context, (OF_RANK, context.rank))
        return Selected(payload, memory)

    def pack(
        self,
        selected: Sequence[Selected],
        counts: Sequence[np.ndarray],
        contexts: Sequence[ExchangeContext],
        pieces: Sequence[Sequence[Piece]],
    ) -> list[list[Payload]]:
        packed = []
        for (payload, _), cuts in zip(selected, pieces, strict=True):
            nbytes = self._of_pieces(cuts).nbytes if cuts else []
            ends = itertools.accumulate(nbytes)
            packed.append([Payload(payload[end - n : end], 0) for end, n in zip(ends, nbytes, strict=True)])
        return packed

    def add(self, payloads: Sequence[Payload], total: np.ndarray, piece: Piece, context: ExchangeContext) -> np.ndarray:
        self._blocks.decode([payload.data for payload in payloads], total, self._of_piece(piece), context)
        return np.zeros(0, np.int64)

    def compress_sum(
        self, total: np.ndarray, memory: np.ndarray | None, counts: np.ndarray, piece: Piece, context: ExchangeContext
    ) -> Payload:
        x, add = (total, None) if memory is None else (memory, total)
        payload = self._blocks.encode(x, add, self._of_piece(piece), context, (OF_SUM, piece.owner), piece.start)
        return Payload(payload, 0)

    def decompress(
        self,
        payloads: Sequence[Sequence[Payload]],
        arrays: Sequence[np.ndarray],
        contexts: Sequence[ExchangeContext],
        pieces: Sequence[Sequence[Piece]],
        summed: bool = True,
    ) -> None:
        for of_bucket, x, context, cuts in zip(payloads, arrays, contexts, pieces, strict=True):
            self._blocks.decode([payload.data for payload in of_bucket], x, self._of_pieces(cuts), context)

    def payload_bytes(self, entries: int, piece: Piece, itemsize: int, summed: bool) -> int:
        return self._of_piece(piece).nbytes[0]

    def _of_piece(self, piece: Piece) -> Placed:
        """Return the places of a piece in one payload, from its start on."""
        return self._blocks.placed((piece.layout,), (0,))

    def _of_pieces(self, pieces: Sequence[Piece]) -> Placed:
        """Return the places of pieces in a payload each, from the start of their bucket on."""
        return self._blocks.placed(tuple(p.layout for p in pieces), tuple(p.start for p in pieces))
