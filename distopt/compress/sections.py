"""Sections: the entries of a stretch of an array in few bits, for the owner of a shard (packed.cu).

A section is a header of 4 bytes, indices in Elias-Fano's code from the start of the stretch on, and values in one of
the formats of ``Packed``, or as they are.  Its length tells how many entries it has.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from distopt import device, kernels
from distopt.compress.context import ExchangeContext, per_payload
from distopt.compress.planes import payload_size, plane_addresses, unpack_entries
from distopt.compress.values import VALUES, Format
from distopt.kernels.layout import CHUNK
from distopt.kernels.signatures import struct

HEADER = 4  # bytes
ALIGNED = 8  # a section begins at a multiple of so many bytes
KIND = 0x45460200  # "EF", and the version of a section
SPREAD, GATHERED = 0x9E3779B1, 0x0E8B2F51  # packed.cu; their product is 1 modulo 2^32
FORMATS = ("exact", *VALUES)  # of values, the first one as they are


@functools.cache
def format_of(value: str, itemsize: int) -> Format:
    """Return a format of values, where an element of the array has so many bytes."""
    return Format(0, itemsize) if value == "exact" else VALUES[value]


def table(bases: np.ndarray, sizes: np.ndarray, places: np.ndarray, value: str, itemsize: Any) -> np.ndarray:
    """Return where everything is in consecutive sections, ``(sections,)`` of ``struct Section``.

    Each has room for so many places, of a stretch of an array that begins at its base and has its size.
    """
    form = Format(0, itemsize) if value == "exact" else VALUES[value]
    rows, some = np.zeros(len(bases), struct("Section")), places > 0
    bits = some * (np.frexp((sizes // np.maximum(places, 1)).astype(float))[1] - 1)
    words = some * -(-(places + (sizes >> bits)) // 64)
    jumps, lower = np.maximum(-(-places // CHUNK) - 1, 0), -(-places * bits // 32)
    rows["kind"], rows["format"], rows["n"] = KIND + 16 * form.number + itemsize, form.number, sizes
    rows["places"], rows["bits"], rows["words"] = places, bits, words
    rows["jumps"] = HEADER
    rows["low"] = HEADER + 4 * jumps
    rows["high"] = -(-(rows["low"] + 4 * lower) // ALIGNED) * ALIGNED
    rows["values"] = rows["high"] + 8 * words
    rows["scales"] = rows["values"] + form.code_bytes(places)
    rows["bytes"] = HEADER + some * (rows["values"] + form.value_bytes(places) - HEADER)
    rows["base"] = bases
    whole = -(-rows["bytes"] // ALIGNED) * ALIGNED
    rows["at"], rows["plane"] = whole.cumsum() - whole, places.cumsum() - places
    return rows


def section_bytes(n: int, places: int, value: str, itemsize: int) -> int:
    """Return the bytes of one section, as ``table`` has them of many."""
    if not places:
        return HEADER
    bits = (n // places).bit_length() - 1
    words, jumps, lower = -(-(places + (n >> bits)) // 64), -(-places // CHUNK) - 1, -(-places * bits // 32)
    high = -(-(HEADER + 4 * jumps + 4 * lower) // ALIGNED) * ALIGNED
    return high + 8 * words + int(format_of(value, itemsize).value_bytes(places))


def room(rows: np.ndarray, context: ExchangeContext) -> np.ndarray:
    """Return zeros for these sections, which lie in it as they do in a message."""
    payload = context.bucket.scratch("sections", int(rows["at"][-1] + rows["bytes"][-1]) if len(rows) else 0)
    device.clear(payload)
    return payload


def pack(
    arrays: Sequence[np.ndarray],
    planes: Sequence[np.ndarray],
    rows: np.ndarray,
    cuts: Sequence[int],
    payload: np.ndarray,
    context: ExchangeContext,
) -> list[np.ndarray]:
    """Return the sections of arrays' entries, each ``(bytes,)`` of uint8; what they cannot carry goes back."""
    # cuts: how many of the rows are each array's, in order; payload: their memory, ``room``.
    rows, found = rows.copy(), list[tuple[int, int, int, int]]()
    for x, both in zip(arrays, planes, strict=True):
        found.append((device.address(x), *plane_addresses(both, x.itemsize)))
    rows["x"], rows["index"], rows["entry"], rows["held"] = np.array(found).repeat(cuts, 0).T
    dtypes = set(map(operator.attrgetter("dtype"), arrays))
    for dtype in dtypes:
        mine = rows if len(dtypes) == 1 else rows[np.array([x.dtype == dtype for x in arrays]).repeat(cuts)]
        if len(mine):
            kernels.pack_sections(payload, *_launch(mine, context), real=dtype)
    return [payload[at : at + nbytes] for at, nbytes in zip(rows["at"].tolist(), rows["bytes"].tolist(), strict=True)]


def unpack(
    payloads: Sequence[np.ndarray], rows: np.ndarray, like: np.ndarray, context: ExchangeContext
) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries of sections: the plane of indices, and that of values; an index below 0 is no entry.

    They are added to the arrays whose addresses are the rows' ``x``.
    """
    places = int(np.add.reduce(rows["places"]))
    planes = context.bucket.scratch("section entries", payload_size(places, like.itemsize))
    index, entry = unpack_entries(planes, like.dtype)
    index, entry = index[:places], entry[:places]
    if places:
        addresses = [device.address(payload) for payload in payloads]
        kernels.unpack_sections(per_payload("sections", addresses, context), index, entry, *_launch(rows, context))
    return index, entry


def entries(payload: np.ndarray, n: int, value: str, itemsize: int) -> int:
    """Return how many entries a section has, as its header says; the host reads it."""
    if payload.nbytes < HEADER:
        raise ValueError(f"a section must be of at least {HEADER} bytes, its header, got {payload.nbytes}")
    # a header mixes the format of values with the number of elements
    salt = (KIND + 16 * format_of(value, itemsize).number + itemsize) * 0xC2B2AE3D + n * 0x85EBCA77
    found = (int(payload[:HEADER].view(np.uint32)[0]) ^ salt % 2**32) * GATHERED % 2**32
    if found > n:
        raise ValueError(
            f"a section's header must be one of {n} elements with values in {value}, got another; it was damaged on "
            "its way, or is another compressor's"
        )
    return int(found)


def _launch(rows: np.ndarray, context: ExchangeContext) -> tuple[device.DeviceMirror, int]:
    """Return the table where a kernel finds it, and the turns: one for each piece of the largest section, of each."""
    cells: np.ndarray = np.frombuffer(rows, np.int64)
    mirror = context.bucket.constant(
        f"table of {len(rows)} sections", functools.partial(np.zeros, cells.size, np.int64)
    )
    mirror.host[:] = cells
    return mirror, len(rows) * max(1, -(-int(np.maximum.reduce(rows["places"])) // CHUNK))
