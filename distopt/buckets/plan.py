"""The plan of buckets: which arrays share a flat buffer, as a pure function of an ordered list."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distopt.formatting import printable
from distopt.kernels.layout import compute_dtype

# Bytes.  Members start at multiples, so that vector loads of every SIMD level are aligned.
ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class BucketSpec:
    """Parameters that share one flat buffer."""

    names: tuple[str, ...]
    # elements of each member, and where it starts in the buffer
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    # the dtype of the parameters and their gradients
    stored: np.dtype

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the flat buffer: gradients of 16 bits are added up in float32."""
        return compute_dtype(self.stored)

    @property
    def size(self) -> int:
        """The elements of the flat buffer, with the gaps that align its members."""
        return self.offsets[-1] + self.sizes[-1]

    @property
    def nbytes(self) -> int:
        """The bytes of the flat buffer."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Plan:
    """The buckets of a model; ``print(plan)`` shows them as a table."""

    # in the order in which they are sent
    buckets: tuple[BucketSpec, ...]
    # elements that fill a bucket
    threshold: int
    # the bytes of each bucket's payload with the compressor in use, None where they depend on the data; () when dense
    payload: tuple[int | None, ...] = ()
    # how payloads are exchanged that cannot be added on the wire; "" for those that can
    exchange: str = ""

    def with_payload(self, payload: Sequence[int | None], exchange: str = "") -> "Plan":
        """Return the same plan with the bytes of each bucket's payload, None where they depend on the data."""
        return replace(self, payload=tuple(payload), exchange=exchange)

    def __str__(self) -> str:
        tensors = sum(len(b.names) for b in self.buckets)
        elements = sum(sum(b.sizes) for b in self.buckets)
        lines = [
            f"{tensors} tensors, {elements:,} elements, {len(self.buckets)} buckets (threshold {self.threshold:,})",
            f"{'bucket':>6}  {'dtype':7}  {'tensors':>7}  {'elements':>12}  {'payload':>10}  {'dense':>10}  members",
        ]
        for k, b in enumerate(self.buckets):
            members = " .. ".join(map(printable, dict.fromkeys((b.names[0], b.names[-1]))))
            payload = self.payload[k] if self.payload else b.nbytes
            lines.append(
                f"{k:>6}  {b.dtype!s:7}  {len(b.names):>7}  {sum(b.sizes):>12,}  {_bytes(payload):>10}  "
                f"{_bytes(b.nbytes):>10}  {members}"
            )
        if self.exchange:
            lines.append(f"exchange: {self.exchange}")
        return "\n".join(lines)


def _bytes(n: int | None) -> str:
    if n is None:
        return "varies"
    return f"{n / 1e6:.3f} MB" if n >= 1e6 else f"{n / 1e3:.3f} kB"


def plan(names: Sequence[str], sizes: Sequence[int], dtypes: Sequence[Any], threshold: int) -> Plan:
    """Group an ordered list of arrays into buckets, by the rule of SINGA's ``DistOpt``.

    An array of more than ``threshold`` elements is a bucket of its own; smaller ones queue, in order and apart for each
    dtype, until the queue holds more than ``threshold``.  So a bucket of several arrays has at most twice that, plus
    gaps of less than 64 bytes that align its members.  A threshold of 0 makes every array its own bucket.
    """
    groups: list[list[int]] = []
    queues: dict[np.dtype, list[int]] = {}
    # elements in each queue
    filled: dict[np.dtype, int] = {}
    for k, size in enumerate(sizes):
        dtype = np.dtype(dtypes[k])
        if size > threshold:
            groups.append([k])
            continue
        queues.setdefault(dtype, []).append(k)
        filled[dtype] = filled.get(dtype, 0) + size
        if filled[dtype] > threshold or threshold == 0:
            groups.append(queues.pop(dtype))
            filled[dtype] = 0
    groups += queues.values()
    return Plan(tuple(_bucket(group, names, sizes, np.dtype(dtypes[group[0]])) for group in groups), threshold)


def merge(buckets: Sequence[BucketSpec], starts: Sequence[int]) -> BucketSpec:
    """Return the bucket of all members of several ones of one dtype."""
    offsets = [start + offset for b, start in zip(buckets, starts, strict=True) for offset in b.offsets]
    names, sizes = [n for b in buckets for n in b.names], [size for b in buckets for size in b.sizes]
    return BucketSpec(tuple(names), tuple(sizes), tuple(offsets), buckets[0].stored)


def _bucket(group: Sequence[int], names: Sequence[str], sizes: Sequence[int], dtype: np.dtype) -> BucketSpec:
    step = ALIGNMENT // compute_dtype(dtype).itemsize
    room = np.array([-(-sizes[k] // step) * step for k in group], np.int64)
    offsets = tuple((np.cumsum(room) - room).tolist())
    return BucketSpec(tuple(names[k] for k in group), tuple(sizes[k] for k in group), offsets, dtype)
