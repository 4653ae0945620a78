"""Fuse many small arrays into few flat buffers: the plan, a pure function of an ordered list."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distopt.checkpoint.error import printable
from distopt.tables import wide

ALIGNMENT = 64  # bytes at multiples of which a member starts: vector loads of every SIMD level stay aligned


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters that share one flat buffer; offsets and sizes in elements."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    stored: np.dtype  # of the parameters and their gradients

    @property
    def dtype(self) -> np.dtype:
        """Of the buffer: gradients of 16 bits are added up in float32."""
        return wide(self.stored)

    @property
    def size(self) -> int:
        """Elements of the flat buffer, with the gaps that align its members."""
        return self.offsets[-1] + self.sizes[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Plan:
    """Which parameters share a buffer; ``print(plan)`` shows it."""

    buckets: tuple[Bucket, ...]
    threshold: int
    payload: tuple[int | None, ...] = ()  # bytes per bucket with the compressor in use; () when dense

    def sending(self, payload: Sequence[int | None]) -> "Plan":
        """The same plan, with the bytes of each bucket's payload, None where they depend on the data."""
        return replace(self, payload=tuple(payload))

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
        return "\n".join(lines)


def _bytes(n: int | None) -> str:
    if n is None:
        return "varies"
    return f"{n / 1e6:.3f} MB" if n >= 1e6 else f"{n / 1e3:.3f} kB"


def plan(names: Sequence[str], sizes: Sequence[int], dtypes: Sequence[Any], threshold: int) -> Plan:
    """Group an ordered list of arrays into buckets, by SINGA's rule.

    An array of more than ``threshold`` elements travels alone; smaller ones queue, in order and apart for each dtype,
    until the queue holds more than ``threshold``.  So a bucket of several arrays has at most twice that, plus gaps of
    less than 64 bytes that align its members.  ``threshold=0`` makes every array its own bucket.
    """
    groups: list[list[int]] = []
    queues: dict[np.dtype, list[int]] = {}
    filled: dict[np.dtype, int] = {}  # elements in each queue
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


def _bucket(group: Sequence[int], names: Sequence[str], sizes: Sequence[int], dtype: np.dtype) -> Bucket:
    step = ALIGNMENT // wide(dtype).itemsize
    room = np.array([-(-sizes[k] // step) * step for k in group], np.int64)
    offsets = tuple((np.cumsum(room) - room).tolist())
    return Bucket(tuple(names[k] for k in group), tuple(sizes[k] for k in group), offsets, dtype)
