"""Send chosen entries in few bits: about 12 for an index at a density of 0.1 %, and 8 or 16 for a value."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from distopt import device, kernels
from distopt.compress.compressor import At, column, table
from distopt.compress.sparse import INDEX, Growth, Sparse, payload_size, unpack_entries
from distopt.ledger import Anatomy, Look
from distopt.tables import CHUNK, Members
from distopt.texts import struct

HEADER = 16  # bytes
MAGIC = 0x45460100  # "EF", and the version of what stands behind the header; the format of values makes it complete
VALUES = {"float16": (1, 2), "bfloat16": (2, 2), "int8": (3, 1)}  # the number of a format (packed.cu), and its bytes
GROUP = 64  # entries that share a scale (packed.cu)
ZEROS = np.array([8 - byte.bit_count() for byte in range(256)], np.int32)  # in a byte, by its value
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)  # the last one first
PLACES = np.where(np.arange(8) < ZEROS[:, None], 7 - np.argsort(BITS, axis=1, kind="stable"), 0)  # of its zeros, so too


class Packed(Sparse):
    """What ``selector`` chooses, with indices in Elias-Fano's code and values rounded to ``value``.

    k indices below n are k (L + 1) + n / 2^L bits with L = floor(log2(n / k)), whatever they are: within 2 bits each of
    the least that is possible, and within 0.6 where k < n / 20 (packed.cu).  In 'float16' and 'int8' 64 neighbours
    share a power of two, from 2^-112 on, so that neither tiny nor huge ones are lost; in int8 an entry is off by
    1 / 128 of the largest at most, and what is not finite is sent as NaN.

    What rounding leaves goes back where the entry was, so ``ErrorFeedback(Packed(TopK(0.01)))`` loses nothing: to the
    bit for magnitudes below 2^128, that is for all of float32.  Larger ones of float64 are sent as the largest there
    is, and the rest of them stays.

    A payload whose header was damaged, or is not this compressor's, raises ValueError; on a GPU, where a kernel cannot
    raise, its entries become NaN.

    Raises ValueError for another code or format, and for a selector with a memory, which the errors of rounding would
    not get to; TypeError for what selects nothing.
    """

    def __init__(self, selector: Sparse, index: str = "elias-fano", value: str = "float16"):
        if not isinstance(selector, Sparse) or isinstance(selector, Packed):
            raise _refusal(selector)
        if index != "elias-fano":
            raise ValueError(f"index must be elias-fano, got {index!r}")
        if value not in list(VALUES):  # [what has no hash is no key, and is told so too]
            raise ValueError(f"value must be one of {', '.join(VALUES)}, got {value!r}")
        self.selector, self.index, self.value = selector, index, value
        self.ragged, self.capped = selector.ragged, selector.capped

    @property
    def count(self) -> Callable[..., Any]:
        """The selector's."""
        found: Callable[..., Any] = self.selector.count  # type: ignore[attr-defined]
        return found

    def counts(self, sizes: np.ndarray) -> np.ndarray:
        """The selector's."""
        found: np.ndarray = self.selector.counts(sizes)  # type: ignore[attr-defined]
        return found

    @property
    def density(self) -> float:
        """The selector's.  AttributeError if it has none."""
        return float(self.selector.density)  # type: ignore[attr-defined]

    def with_density(self, density: float) -> "Packed":
        """The same with another density."""
        return Packed(self.selector.with_density(density), self.index, self.value)  # type: ignore[attr-defined]

    def payload_bytes(self, n: int, itemsize: int = 4, bucket: Members | None = None) -> int | None:
        """A function of how many entries are sent of how many, if that does not depend on the data."""
        places = self._places(n, itemsize, bucket)
        return None if places is None else int(packing(n, places, self.value)["bytes"][0])

    def _places(self, n: int, itemsize: int, bucket: Members | None) -> int | None:
        """For how many entries there is room, if that does not depend on the data."""
        planes = self.selector.payload_bytes(n, itemsize, bucket)
        return None if planes is None else planes // (itemsize + INDEX)

    def take(self, x: np.ndarray, add: Growth, at: At) -> np.ndarray:
        """The selector's choice."""
        return self.selector.take(x, add, at)

    def encode(self, planes: np.ndarray, x: np.ndarray, at: At) -> np.ndarray:
        """One call; on a GPU a launch, and one that clears."""
        index, entry = unpack_entries(planes, x.dtype)
        layout = packing(x.size, index.size, self.value)
        payload = at.scratch("packed", int(layout["bytes"][0]))
        device.clear(payload)
        kernels.pack_planes(x, index, entry, payload, _constant(layout, at))
        return payload

    def look(self, payload: np.ndarray, x: np.ndarray, at: At) -> Look:
        """Values with their scales; upper parts, jumps and lower parts of the indices; the rest is the header.

        Entries are told apart by their upper parts: neighbours that share one count as the nearer member's.
        """
        members, n, upper, here = table(x, at), x.size, None, not device.on_gpu(x)
        places = int(payload[:HEADER].view(np.uint32)[2]) if here else self._places_in(payload, x, at)
        layout = packing(n, places, self.value)
        if here and not self.tells(members):
            upper = payload[int(layout["high"][0]) : int(layout["jumps"][0])].copy()

        def found() -> Anatomy:
            counts = self.known_counts(places, members) if upper is None else by_upper_part(upper, layout, members)
            return self._described(n, places, members)._replace(counts=counts)

        return found

    def tells(self, members: Members) -> bool:
        """Does the selector?"""
        return self.selector.tells(members)

    def known_counts(self, k: int, members: Members) -> np.ndarray | None:
        """The selector's."""
        return self.selector.known_counts(k, members)

    def choice(self, k: int, members: Members) -> int:
        """The selector's."""
        return self.selector.choice(k, members)

    def forecast(self, n: int, itemsize: int, bucket: Members) -> Anatomy:
        """The same."""
        return self._described(n, self._places(n, itemsize, bucket) or 0, bucket)

    def _described(self, n: int, places: int, members: Members) -> Anatomy:
        start = int(packing(n, places, self.value)["values"][0])
        return self.described(_value_bytes(places, self.value), start - HEADER, places, members)

    def decode(self, payloads: list[np.ndarray], out: np.ndarray, at: At) -> list[tuple[np.ndarray, np.ndarray]]:
        """One call for payloads of one size.  ValueError for one that was damaged, as far as the host can see it."""
        places = [self._places_in(payload, out, at) for payload in payloads]
        planes = at.scratch("entries", payload_size(sum(places), out.itemsize))
        index, entry = unpack_entries(planes, out.dtype)
        found, end = [], 0
        for room, same in itertools.groupby(zip(places, payloads, strict=True), key=lambda pair: pair[0]):
            here = [payload for _, payload in same]
            begin, end = end, end + room * len(here)
            layout = _constant(packing(out.size, room, self.value), at)
            addresses = column("packed", [device.address(payload) for payload in here], at)
            kernels.unpack_planes(addresses, index[begin:end], entry[begin:end], layout)
            cuts = [slice(begin + k * room, begin + (k + 1) * room) for k in range(len(here))]
            found += [(index[cut], entry[cut]) for cut in cuts]
        return found

    def _places_in(self, payload: np.ndarray, out: np.ndarray, at: At) -> int:
        """For how many entries a payload has room; all of them hold one if their number depends on the data."""
        places = self._places(out.size, out.itemsize, at.bucket)
        places = at.room if places is None else places
        if places is None or not device.on_gpu(payload):
            if payload.nbytes < HEADER:
                raise ValueError(f"a payload has a header of {HEADER} bytes, got {payload.nbytes} bytes")
            held = check_header(device.host_copy(payload[:HEADER]), out.size, places, self.value)
            places = held if places is None else places
        expected = int(packing(out.size, places, self.value)["bytes"][0])
        if payload.nbytes != expected:
            raise ValueError(f"a payload of {places} of {out.size} elements has {expected} bytes, got {payload.nbytes}")
        return places

    def __repr__(self) -> str:
        return f"Packed({self.selector!r}, index={self.index!r}, value={self.value!r})"


def _refusal(selector: Any) -> Exception:
    """Why this cannot be packed, and what can be."""
    within = vars(selector).values() if getattr(selector, "stateful", False) else ()
    inner = next((v for v in within if isinstance(v, Sparse)), None)
    if isinstance(selector, Packed) or isinstance(inner, Packed):
        return ValueError(f"{selector!r} is packed already")
    if inner is not None:
        return ValueError(
            f"{selector!r} has a memory already, which would not get what rounding loses: "
            f"write {type(selector).__name__}(Packed({inner!r}))"
        )
    return TypeError(f"selector must choose entries, as TopK and Threshold do, got {selector!r}")


@functools.lru_cache(256)
def packing(n: int, places: int, value: str) -> np.ndarray:
    """``struct Packing`` of packed.cu: where everything is in a payload for so many of n entries.

    The header and the words of the upper parts stand at multiples of 8 bytes, also in payloads behind this one.
    """
    number = VALUES[value][0]
    bits = (n // places).bit_length() - 1 if places else 0
    words = -(-(places + (n >> bits)) // 64) if places else 0
    jumps, lower, plane = max(-(-places // CHUNK) - 1, 0), -(-places * bits // 32), VALUES[value][1] * places
    sizes = HEADER, 8 * words, 4 * jumps, 4 * lower, plane, _value_bytes(places, value) - plane
    *starts, end = itertools.accumulate(sizes)
    found = np.array([(MAGIC + number, number, n, places, bits, words, *starts, -(-end // 8) * 8)], struct("Packing"))
    found.flags.writeable = False
    return found


def by_upper_part(upper: np.ndarray, layout: np.ndarray, members: Members) -> np.ndarray:
    """How many entries belong to each member, but for those of 2^L neighbours at a start of one.

    Before the z-th zero stand as many ones as entries have an upper part below z.
    """
    k, bits = int(layout["places"][0]), int(layout["bits"][0])
    wanted = (members.rows["offset"].astype(np.int64) + (1 << bits >> 1)) >> bits
    if not k:
        return np.zeros_like(wanted)
    zeros = np.cumsum(ZEROS[upper], dtype=np.int32)
    byte = np.minimum(np.searchsorted(zeros, wanted), upper.size - 1)
    last = PLACES[upper[byte], np.clip(zeros[byte] - wanted, 0, 7)]
    before = np.where(wanted > 0, np.minimum(8 * byte + last + 1 - wanted, k), 0)
    return np.diff(before, append=k)


def _value_bytes(places: int, value: str) -> int:
    """Of the values, and of their scales."""
    return VALUES[value][1] * places + -(-places // GROUP) * (value != "bfloat16")


def _constant(layout: np.ndarray, at: At) -> device.Mirror:
    """A packing where a kernel finds it."""
    found = at.constant("packing", functools.partial(np.zeros_like, layout))
    found.host[:] = layout
    return found


def check_header(header: np.ndarray, n: int, places: int | None, value: str) -> int:
    """How many entries there are, of n elements.  ValueError that names the field that is not as it has to be."""
    kind, size, entries, check = map(int, header.view(np.uint32))
    due = MAGIC + VALUES[value][0]
    if kind != due:
        raise ValueError(f"a payload with values in {value} begins with {due:#x}, got {kind:#x}")
    if size != n:
        raise ValueError(f"a payload is of {n} elements, got one of {size}")
    if check != (kind * 0x9E3779B1 + size * 0x85EBCA77 + entries * 0xC2B2AE3D) % 2**32:
        raise ValueError(f"a payload's header is damaged: its checksum {check:#x} is not that of {entries} entries")
    if entries > (n if places is None else places):
        raise ValueError(f"a payload has at most {n if places is None else places} entries, got {entries}")
    return entries
