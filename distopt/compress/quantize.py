"""Send every element as a code of one bit or two: its sign, and with two bits whether it is large."""

import abc
import functools
import math
from collections.abc import Sequence

import numpy as np

from distopt import device, kernels
from distopt.checks import as_float
from distopt.compress.base import Lossy, threshold_of_sum
from distopt.compress.context import ExchangeContext, check_fits, layout_of, per_payload
from distopt.compress.shards import ElementShards, Payload, Piece, PieceBytes, Selected, ShardCodec, remembered
from distopt.compress.state import State
from distopt.kernels.breakdown import LazyBreakdown, PayloadBreakdown
from distopt.kernels.layout import BucketLayout

SAMPLED = 2048  # bytes of codes from which their entropy is estimated
GOLDEN = (math.sqrt(5) - 1) / 2
LEAST, MOST = (float(x) for x in (np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max))


class Codec(Lossy):
    """A compressor whose payload has a code for every position of the flat array, in words of 32 bits (codec.cu).

    Without error feedback, with which codes are meant to be used, what they do not stand for is dropped.
    """

    bits: int  # of a code
    header = 0  # bytes in front of the codes

    @abc.abstractmethod
    def payload_bytes(self, n: int, itemsize: int = 4, layout: BucketLayout | None = None) -> int: ...

    @abc.abstractmethod
    def of_sum(self, ranks: int) -> "Codec":
        """Return the codec of sums over so many ranks, whose means have the magnitudes that this one is meant for."""

    def sharded(self) -> ShardCodec:
        return CodeShards(self)

    def code_bytes(self, n: int) -> int:
        """Return the bytes of the codes of n elements, without what fills up the last word."""
        return -(-n * self.bits // 8)

    def breakdown(self, payload: np.ndarray | None, x: np.ndarray, context: ExchangeContext) -> LazyBreakdown:
        """Tell header and codes apart; a host estimates from some of them to how few bits all could be coded."""
        n, bits, header = x.size, self.bits, 8 * self.header
        nbytes = self.payload_bytes(n, x.itemsize) - self.header
        if payload is None or device.on_gpu(payload):
            return lambda: PayloadBreakdown(nbytes)
        sample = payload[self.header :][sampled(-(-n * bits // 8))]
        return lambda: PayloadBreakdown(nbytes, ideal=header + round(n * entropy(count_codes(sample, bits, n))))

    def compress(
        self, x: np.ndarray, state: State, context: ExchangeContext, add: np.ndarray | None = None
    ) -> np.ndarray:
        payload = context.scratch("payload", self.payload_bytes(x.size, x.itemsize))
        device.clear(payload)
        if add is not None:
            check_fits(x, add)
        self.encode(x, x if add is None else add, add is not None, payload, context)
        return payload

    @abc.abstractmethod
    def encode(
        self, x: np.ndarray, add: np.ndarray, added: bool, payload: np.ndarray, context: ExchangeContext
    ) -> None:
        """Move what its codes stand for out of x (+ add), and write them to a payload of zeros."""

    def decompress(self, payload: np.ndarray, out: np.ndarray, context: ExchangeContext) -> None:
        numbers = context.scratch("numbers", out.nbytes).view(out.dtype)
        device.clear(numbers)
        self.decompress_all([payload], numbers, context)
        kernels.accumulate(numbers, out)

    def decompress_all(self, payloads: Sequence[np.ndarray], out: np.ndarray, context: ExchangeContext) -> None:
        """Overwrite ``out`` by the sum of payloads, in one pass."""
        expected = self.payload_bytes(out.size, out.itemsize)
        for payload in payloads:
            if payload.nbytes != expected:
                raise ValueError(f"a payload of {out.size} elements must be of {expected} bytes, got {payload.nbytes}")
        self.decode_sum(
            per_payload("payloads", [device.address(payload) for payload in payloads], context), out, context
        )

    @abc.abstractmethod
    def decode_sum(self, payloads: device.DeviceMirror, out: np.ndarray, context: ExchangeContext) -> None:
        """Overwrite ``out`` by the sum of payloads."""


def _words(bits: int) -> int:
    """Return the bytes of the 32-bit words that hold so many bits."""
    return -(-bits // 32) * 4


class CodeShards(ElementShards):
    """Codes of a bit or two are cut at the borders of shards, each part after the scale of its bucket.

    Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence speed", 2021.

    Args:
        codec: makes the codes.
    """

    def __init__(self, codec: Codec):
        self._codec = codec

    def expected_bytes(self, layout: BucketLayout, pieces: Sequence[Piece], summed: bool) -> list[PieceBytes]:
        codec = self._codec.of_sum(1) if summed else self._codec
        codes = [codec.code_bytes(piece.size) for piece in pieces]
        return [PieceBytes(codec.header + nbytes, nbytes) for nbytes in codes]

    def code_bytes(self, piece: Piece) -> int:
        return self._codec.code_bytes(piece.size)

    def select(
        self, x: np.ndarray, state: State, context: ExchangeContext, pieces: Sequence[Piece], places: np.ndarray
    ) -> Selected:
        memory, add = remembered(self, x, state, context)
        return Selected(self._codec.compress(memory, state, context, add), memory)

    def pack(
        self,
        selected: Sequence[Selected],
        counts: Sequence[np.ndarray],
        contexts: Sequence[ExchangeContext],
        pieces: Sequence[Sequence[Piece]],
    ) -> list[list[Payload]]:
        return [[self._part(s.payload, piece) for piece in cuts] for s, cuts in zip(selected, pieces, strict=True)]

    def _part(self, payload: np.ndarray, piece: Piece) -> Payload:
        """Return the part of a bucket's payload that is sent of a piece, after the scale of the bucket."""
        codec = self._codec
        begin = codec.header + piece.start * codec.bits // 8
        part = payload[begin : begin + codec.code_bytes(piece.size)]
        return Payload(device.concatenated([payload[: codec.header], part]) if codec.header else part, 0)

    def add(self, payloads: Sequence[Payload], total: np.ndarray, piece: Piece, context: ExchangeContext) -> np.ndarray:
        device.clear(total)
        self._decode(self._codec, [payload.data for payload in payloads], total, context)
        return np.zeros(0, np.int64)

    def compress_sum(
        self, total: np.ndarray, memory: np.ndarray | None, counts: np.ndarray, piece: Piece, context: ExchangeContext
    ) -> Payload:
        codec = self._codec.of_sum(context.size)
        x, add = (total, None) if memory is None else (memory, total)
        payload = codec.compress(x, {}, context, add)
        return Payload(payload[: codec.header + codec.code_bytes(piece.size)], 0)

    def decompress(
        self,
        payloads: Sequence[Sequence[Payload]],
        arrays: Sequence[np.ndarray],
        contexts: Sequence[ExchangeContext],
        pieces: Sequence[Sequence[Piece]],
        summed: bool = True,
    ) -> None:
        for of_bucket, x, context, cuts in zip(payloads, arrays, contexts, pieces, strict=True):
            codec = self._codec.of_sum(context.size) if summed else self._codec
            for payload, piece in zip(of_bucket, cuts, strict=True):
                self._decode(codec, [payload.data], piece.of(x), piece.context(context))

    def payload_bytes(self, entries: int, piece: Piece, itemsize: int, summed: bool) -> int:
        return self.expected_bytes(piece.layout, [piece], summed)[0].total

    @staticmethod
    def _decode(codec: Codec, payloads: Sequence[np.ndarray], out: np.ndarray, context: ExchangeContext) -> None:
        addresses = [device.address(payload) for payload in payloads]
        codec.decode_sum(per_payload("payloads", addresses, context), out, context)


class TwoBit(Codec):
    """Send ``threshold`` for every element that is at least that in magnitude, with its sign, and 0 for the others.

    MXNet's 2-bit compression: element i has bits 7 - 2 (i mod 4) and the next lower one of byte i // 4; 11 is
    +threshold, 10 is -threshold, 00 is 0.  An element that is not finite is sent as 01, which is NaN, and nothing of it
    stays behind.  An element moves by one threshold a step at most: gradients that are larger for long make a residual
    that grows without bound (``opt.state_dict()["states"]["residual"]``).

    Args:
        threshold: in units of the local, un-averaged gradient.

    Raises:
        TypeError: for a threshold that is no number.
        ValueError: for one that is not a positive float32.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import ExchangeContext
        >>> x = np.array([0.75, -1, 0.25, 0], np.float32)
        >>> payload = TwoBit(0.5).compress(x, {}, ExchangeContext())
        >>> f"{payload[0]:08b}", payload.nbytes
        ('11100000', 4)
        >>> x
        array([ 0.25, -0.5 ,  0.25,  0.  ], dtype=float32)
    """

    bits = 2

    def __init__(self, threshold: float = 0.5):
        self.threshold: float = as_float("threshold", threshold)
        if not LEAST <= self.threshold <= MOST:
            raise ValueError(f"threshold must be positive and finite, {LEAST:.2g} to {MOST:.8g}, got {threshold}")

    def payload_bytes(self, n: int, itemsize: int = 4, layout: BucketLayout | None = None) -> int:
        return _words(2 * n)

    def of_sum(self, ranks: int) -> "TwoBit":
        return TwoBit(threshold_of_sum(self.threshold, ranks, MOST))

    def encode(
        self, x: np.ndarray, add: np.ndarray, added: bool, payload: np.ndarray, context: ExchangeContext
    ) -> None:
        kernels.encode_two_bits(x, add, added, payload, self.threshold, context.skip_flag)

    def decode_sum(self, payloads: device.DeviceMirror, out: np.ndarray, context: ExchangeContext) -> None:
        kernels.decode_two_bits(out, payloads, self.threshold)

    def __repr__(self) -> str:
        return f"TwoBit({self.threshold})"


class OneBit(Codec):
    """Send +s for every element above ``threshold``, and -s for the others.

    Element i has bit 7 - i mod 8 of byte i // 8.  What is not finite makes s so, and with it all that is sent of its
    bucket; 'unit' cannot tell it.  Nothing of it stays behind.

    Args:
        threshold: in units of the local, un-averaged gradient.
        scale: with 'mean', s is the mean magnitude of the bucket's elements, which comes in front of the bits as a
            float32 (Karimireddy et al., "Error feedback fixes SignSGD", 2019).  With 'unit', s is 1, whatever the
            gradients are, and there is nothing but bits, as in MXNet; learning rates have to make up for it, and a
            gradient of zeros sends -1.

    Raises:
        TypeError: for a threshold that is no number.
        ValueError: for one that is not finite, and for another scale.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import ExchangeContext
        >>> x = np.array([3, -1, 0, 2], np.float32)
        >>> payload = OneBit().compress(x, {}, ExchangeContext())
        >>> payload[:4].view(np.float32), f"{payload[4]:08b}"
        (array([1.5], dtype=float32), '10010000')
        >>> x
        array([1.5, 0.5, 1.5, 0.5], dtype=float32)
    """

    bits = 1

    def __init__(self, threshold: float = 0.0, scale: str = "mean"):
        self.threshold: float = as_float("threshold", threshold)
        if not math.isfinite(self.threshold):
            raise ValueError(f"threshold must be finite, got {threshold}")
        if scale not in ("mean", "unit"):
            raise ValueError(f"scale must be one of mean, unit, got {scale!r}")
        self.scale = scale
        self.header = 4 if scale == "mean" else 0

    def payload_bytes(self, n: int, itemsize: int = 4, layout: BucketLayout | None = None) -> int:
        return self.header + _words(n)

    def of_sum(self, ranks: int) -> "OneBit":
        threshold = threshold_of_sum(self.threshold, ranks)
        return OneBit(threshold) if self.scale == "mean" else UnitOfSum(threshold, ranks)

    def encode(
        self, x: np.ndarray, add: np.ndarray, added: bool, payload: np.ndarray, context: ExchangeContext
    ) -> None:
        """Take one pass, and another one before it for the mean."""
        members = layout_of(x, context)
        if self.scale == "mean":
            chunks, elements = members.span[1], int(members.records["size"].sum())
            partial = context.scratch("partials", 8 * (chunks + len(members.names))).view(np.float64)
            kernels.partial_magnitudes(members, x, add, added, partial, context.skip_flag)
            kernels.mean_of_partials(partial[:chunks], payload[:4].view(np.float32), elements, context.skip_flag)
            add, added = x, False
        kernels.encode_one_bit(members, x, add, added, payload, self.header, self.threshold, context.skip_flag)

    def decode_sum(self, payloads: device.DeviceMirror, out: np.ndarray, context: ExchangeContext) -> None:
        """Leave what lies between the members as it is."""
        kernels.decode_one_bit(layout_of(out, context), out, payloads, self.header)

    def __repr__(self) -> str:
        return f"OneBit({self.threshold}, scale={self.scale!r})"


class UnitOfSum(OneBit):
    """Send +-``ranks`` in the place of +-1, in front of the bits: what a sum of units over so many ranks can be.

    Args:
        threshold: as of ``OneBit``.
        ranks: whose sum is sent.
    """

    def __init__(self, threshold: float, ranks: int):
        super().__init__(threshold, "unit")
        self.ranks, self.header = ranks, 4

    def of_sum(self, ranks: int) -> "UnitOfSum":
        return UnitOfSum(threshold_of_sum(self.threshold, ranks), self.ranks * ranks)

    def encode(
        self, x: np.ndarray, add: np.ndarray, added: bool, payload: np.ndarray, context: ExchangeContext
    ) -> None:
        device.copy(payload[:4].view(np.float32), np.array([self.ranks], np.float32))
        super().encode(x, add, added, payload, context)

    def __repr__(self) -> str:
        return f"UnitOfSum({self.threshold}, {self.ranks})"


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
