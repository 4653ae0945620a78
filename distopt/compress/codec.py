"""Send every element as a code of one bit or two: the direction that it has, and no more."""

import abc
import functools
import math

import numpy as np

from distopt import device, kernels
from distopt.compress.compressor import At, check_fits, column, table
from distopt.ledger import Anatomy, Look
from distopt.numbers import real
from distopt.tables import Members

SAMPLED = 2048  # a ledger looks at so many bytes
GOLDEN = (math.sqrt(5) - 1) / 2
LEAST, MOST = (float(x) for x in (np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max))


class Codec(abc.ABC):
    """A payload has a code for every position of the flat array, in whole words of 32 bits (codec.cu).

    Without error feedback what the codes do not stand for is dropped; with it, they are meant to be used.
    """

    summable = ragged = lossless = stateful = may_overflow = False
    bits: int  # of a code
    _header = 0  # bytes

    @abc.abstractmethod
    def payload_bytes(self, n: int, itemsize: int = 4, bucket: Members | None = None) -> int:
        """Bytes of the payload of n elements."""

    def compress(
        self, x: np.ndarray, state: dict[str, np.ndarray], at: At, add: np.ndarray | None = None
    ) -> np.ndarray:
        """Move what the codes of x (+ add) stand for out of x.  ValueError for an ``add`` of another size."""
        payload = at.scratch("payload", self.payload_bytes(x.size, x.itemsize))
        device.clear(payload)
        if add is not None:
            check_fits(x, add)
        self.take(x, x if add is None else add, add is not None, payload, at)
        return payload

    @abc.abstractmethod
    def take(self, x: np.ndarray, add: np.ndarray, given: bool, payload: np.ndarray, at: At) -> None:
        """Move codes to a payload of zeros; ``add`` is x if nothing is given."""

    def look(self, payload: np.ndarray, x: np.ndarray, at: At) -> Look:
        """Codes, behind a header; a host estimates from some of them what all could be coded to."""
        n, codes, header = x.size, payload[self._header :], 8 * self._header
        nbytes = codes.nbytes
        if device.on_gpu(codes):
            return lambda: Anatomy(nbytes)
        seen = codes[sampled(-(-n * self.bits // 8))]
        return lambda: Anatomy(nbytes, ideal=header + round(n * shannon(self._counts(seen, n))))

    def _counts(self, seen: np.ndarray, n: int) -> np.ndarray:
        """How often each code is in some bytes, or in those of all n elements, whose last one may have room for more.

        That is filled with zeros.
        """
        found: np.ndarray = np.bincount(seen, minlength=256) @ in_a_byte(self.bits)
        found[0] -= max(0, 8 // self.bits * seen.size - n)
        return found

    def forecast(self, n: int, itemsize: int, bucket: Members) -> Anatomy:
        """Codes, behind a header."""
        return Anatomy(self.payload_bytes(n, itemsize, bucket) - self._header)

    def decompress(self, payload: np.ndarray, out: np.ndarray, at: At) -> None:
        """Add what the codes stand for to ``out``."""
        numbers = at.scratch("numbers", out.nbytes).view(out.dtype)
        device.clear(numbers)
        self.decompress_all([payload], numbers, at)
        kernels.accumulate(numbers, out)

    def decompress_all(self, payloads: list[np.ndarray], out: np.ndarray, at: At) -> None:
        """Overwrite ``out`` by the sum of payloads in one pass.  ValueError for a payload of another size."""
        expected = self.payload_bytes(out.size, out.itemsize)
        for payload in payloads:
            if payload.nbytes != expected:
                raise ValueError(f"a payload of {out.size} elements has {expected} bytes, got {payload.nbytes}")
        self.give(column("payloads", [device.address(payload) for payload in payloads], at), out, at)

    @abc.abstractmethod
    def give(self, payloads: device.Mirror, out: np.ndarray, at: At) -> None:
        """Overwrite ``out`` by the sum of payloads at these addresses."""


@functools.lru_cache(256)
def sampled(size: int) -> np.ndarray:
    """The places of ``SAMPLED`` of so many bytes, all if there are no more.

    The golden section's multiples are spread evenly, and in step with no width of a matrix (Weyl, 1916).
    """
    if size <= SAMPLED:
        return np.arange(size)
    return (np.arange(SAMPLED) * GOLDEN % 1 * size).astype(np.int64)


@functools.cache
def in_a_byte(bits: int) -> np.ndarray:
    """How often each code of so many bits is in a byte, by the byte's value."""
    codes = [[byte >> place & (1 << bits) - 1 for place in range(0, 8, bits)] for byte in range(256)]
    return np.array([np.bincount(row, minlength=1 << bits) for row in codes])


def shannon(counts: np.ndarray) -> float:
    """Bits of information in one symbol, of symbols that were counted so often (Shannon, 1948)."""
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-shares @ np.log2(shares))


def _words(bits: int) -> int:
    """Bytes of the 32-bit words that hold so many bits."""
    return -(-bits // 32) * 4


class TwoBit(Codec):
    """Send ``threshold`` for every element that is at least that in magnitude, with its sign, and 0 for the others.

    MXNet's 2-bit compression: element i has bits 7 - 2 (i mod 4) and the next lower one of byte i // 4; 11 is
    +threshold, 10 is -threshold, 00 is 0.  An element that is not finite is sent as 01, which is NaN, and nothing of it
    stays behind.  An element moves by one threshold a step at most: gradients that are larger for long make a residual
    that grows without bound (``opt.state_dict()["states"]["residual"]``).  Units are those of the local, un-averaged
    gradient.

    Raises ValueError for a threshold that is not a positive float32, TypeError for one that is no number.
    """

    bits = 2

    def __init__(self, threshold: float = 0.5):
        self.threshold: float = real("threshold", threshold)
        if not LEAST <= self.threshold <= MOST:
            raise ValueError(f"threshold must be positive and finite, {LEAST:.2g} to {MOST:.8g}, got {threshold}")

    def payload_bytes(self, n: int, itemsize: int = 4, bucket: Members | None = None) -> int:
        """A word for 16 elements."""
        return _words(2 * n)

    def take(self, x: np.ndarray, add: np.ndarray, given: bool, payload: np.ndarray, at: At) -> None:
        """One pass."""
        kernels.take_two_bits(x, add, given, payload, self.threshold, at.refused)

    def give(self, payloads: device.Mirror, out: np.ndarray, at: At) -> None:
        """One pass."""
        kernels.give_two_bits(out, payloads, self.threshold)

    def __repr__(self) -> str:
        return f"TwoBit({self.threshold})"


class OneBit(Codec):
    """Send +s for every element above ``threshold``, and -s for the others.

    ``scale='mean'``: s is the mean magnitude of the bucket's elements, which comes in front of the bits as a float32
    (Karimireddy et al., "Error feedback fixes SignSGD", 2019).  ``scale='unit'``: s is 1, whatever the gradients are,
    and there is nothing but bits, as in MXNet; learning rates have to make up for it, and a gradient of zeros sends -1.
    Element i has bit 7 - i mod 8 of byte i // 8.

    What is not finite makes s so, and with it all that is sent of its bucket; 'unit' cannot tell it.  Nothing of it
    stays behind.

    Raises ValueError for a threshold that is not finite and for another scale, TypeError for a threshold that is no
    number.
    """

    bits = 1

    def __init__(self, threshold: float = 0.0, scale: str = "mean"):
        self.threshold: float = real("threshold", threshold)
        if not math.isfinite(self.threshold):
            raise ValueError(f"threshold must be finite, got {threshold}")
        if scale not in ("mean", "unit"):
            raise ValueError(f"scale must be one of mean, unit, got {scale!r}")
        self.scale = scale
        self._header = 4 if scale == "mean" else 0

    def payload_bytes(self, n: int, itemsize: int = 4, bucket: Members | None = None) -> int:
        """A word for 32 elements, and one for their scale."""
        return self._header + _words(n)

    def take(self, x: np.ndarray, add: np.ndarray, given: bool, payload: np.ndarray, at: At) -> None:
        """One pass, and another one before it if there is a mean to take."""
        members = table(x, at)
        if self._header:
            chunks, elements = members.span[1], int(members.rows["size"].sum())
            partial = at.scratch("partials", 8 * (chunks + len(members.names))).view(np.float64)
            kernels.partial_magnitudes(members, x, add, given, partial, at.refused)
            kernels.mean_of_partials(partial[:chunks], payload[:4].view(np.float32), elements, at.refused)
            add, given = x, False
        kernels.take_one_bit(members, x, add, given, payload, self._header, self.threshold, at.refused)

    def give(self, payloads: device.Mirror, out: np.ndarray, at: At) -> None:
        """One pass over the members; what lies between them stays."""
        kernels.give_one_bit(table(out, at), out, payloads, self._header)

    def __repr__(self) -> str:
        return f"OneBit({self.threshold}, scale={self.scale!r})"
