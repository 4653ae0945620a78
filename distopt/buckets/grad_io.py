"""Copies of sums between the buckets and the gradients' own arrays, where a caller may read and change them."""

import bisect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from distopt import device, kernels
from distopt.buckets.bucket import Bucket, BucketSet, Reduced
from distopt.kernels.layout import BucketLayout

Check = Callable[[str, np.ndarray, Any], np.ndarray]


def write_sums(
    buckets: BucketSet, sums: Iterable[Reduced], grads: Mapping[str, Any], skip_flag: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Write sums over ranks to the arrays of their gradients, and return these arrays by name."""
    # A gradient that cannot hold its own sum, since it is None, read-only, not contiguous, of 16 bits, or shares memory
    # with a parameter or another gradient, gets a new array.
    by_name = dict(grads)
    addresses = _addresses_in_place(buckets, grads) or _with_new_arrays(buckets, by_name)
    for bucket, total, targets in zip(buckets, sums, addresses, strict=True):
        bucket.sums.records["data"] = targets
        for piece in total:
            kernels.unpack(bucket.sums.shard(piece.number, piece.of), piece.flat, 1.0, skip_flag)
    return by_name


def read_sums(buckets: BucketSet, sums: Mapping[str, Any], check: Check) -> None:
    """Pack sums into the buckets again, and count what is not finite, as ``Bucket.pack``; missing sums are zeros."""
    # check: `check(name, home, sum)` returns a contiguous array of the shape and dtype of `home`, or raises; it is
    # called for the arrays of a bucket of which one does not fit.
    #
    # All of them, before packing overwrites any.
    inputs = [_disjoint(buckets, bucket, sums, check) for bucket in buckets]
    for bucket, arrays in zip(buckets, inputs, strict=True):
        bucket.sums.records["data"] = _addresses(bucket, arrays)
        kernels.pack(bucket.sums, bucket.gradient, 1.0, bucket.bad, bucket.largest)


def _disjoint(buckets: BucketSet, bucket: Bucket, sums: Mapping[str, Any], check: Check) -> list[np.ndarray]:
    """Return a bucket's sums, copied if one lies where another gradient lives; zeroed gradients for missing sums."""
    names = bucket.spec.names
    for name in names:
        if name not in sums:
            device.clear(buckets.view(name))
    arrays = [sums[name] if name in sums else buckets.view(name) for name in names]
    if bucket.wide_layout.addresses(arrays) is None:
        arrays = [check(name, buckets.view(name), a) for name, a in zip(names, arrays, strict=True)]
    overlaps = buckets.in_other_views(_addresses(bucket, arrays), bucket.own_addresses).any()
    return [device.copied(a) for a in arrays] if overlaps else arrays


def _addresses(bucket: Bucket, arrays: list[np.ndarray]) -> np.ndarray:
    addresses = bucket.wide_layout.addresses(arrays)
    return np.array([device.address(a) for a in arrays], np.uintp) if addresses is None else addresses


def _addresses_in_place(buckets: BucketSet, grads: Mapping[str, Any]) -> list[np.ndarray] | None:
    """Return the addresses of each bucket's gradients; None unless all are writable and overlap nothing else."""
    addresses: list[np.ndarray] = []
    for bucket in buckets:
        arrays = [grads.get(name) for name in bucket.spec.names]
        starts = bucket.wide_layout.addresses(arrays)
        if starts is None or not all(map(device.writable, arrays)):
            return None
        if buckets.in_other_views(starts, bucket.own_addresses).any():
            return None
        addresses.append(starts)
    pieces = [_pieces(b.sums, places) for b, places in zip(buckets, addresses, strict=True)] + _parameters(buckets)
    starts, ends = np.hstack([np.empty((2, 0), np.uintp), *pieces])
    order = np.argsort(starts)
    return None if (starts[order][1:] < ends[order][:-1]).any() else addresses


def _pieces(members: BucketLayout, addresses: np.ndarray) -> np.ndarray:
    """Return the starts and ends, (2, n), of a table's arrays at these addresses, without empty ones."""
    sizes = members.records["size"].astype(np.uintp)
    return np.stack([addresses, addresses + sizes * members.stored.itemsize])[:, sizes > 0]


def _parameters(buckets: BucketSet) -> list[np.ndarray]:
    return [_pieces(b.parameters, b.parameters.records["data"].astype(np.uintp)) for b in buckets]


def _with_new_arrays(buckets: BucketSet, by_name: dict[str, Any]) -> list[np.ndarray]:
    """Return addresses for sums one by one, and put new arrays in ``by_name`` where a gradient cannot hold its sum."""
    # Sums that nobody asked for go where the gradient lives, which changes nothing.
    occupied = sorted(zip(*np.hstack([np.empty((2, 0), np.uintp), *_parameters(buckets)]).tolist(), strict=True))
    targets = [bucket.own_addresses.copy() for bucket in buckets]
    for bucket, addresses in zip(buckets, targets, strict=True):
        for row, name in enumerate(bucket.spec.names):
            if name not in by_name:
                continue
            home, grad = buckets.view(name), by_name[name]
            own = np.uintp(device.address(home))
            fits = (
                device.is_array(grad)
                and (grad.shape, grad.dtype, device.gpu_of(grad)) == (home.shape, home.dtype, device.gpu_of(home))
                and bool(grad.flags.c_contiguous)
                and device.writable(grad)
                and not _overlaps(occupied, grad)
                and not buckets.in_other_views(np.array([device.address(grad)], np.uintp), own).any()
            )
            if not fits:
                by_name[name] = device.zeros(home.size, home.dtype, home).reshape(home.shape)
            addresses[row] = device.address(by_name[name])
            if home.size:
                bisect.insort(occupied, (int(addresses[row]), int(addresses[row]) + home.nbytes))
    return targets


def _overlaps(occupied: list[tuple[int, int]], grad: np.ndarray) -> bool:
    """Tell whether an array shares memory with ``occupied``: sorted pieces (start, end) that do not overlap."""
    start = device.address(grad)
    place = bisect.bisect(occupied, (start, start))
    before, after = occupied[:place][-1:], occupied[place:][:1]
    return bool(grad.size) and (any(e > start for _, e in before) or any(s < start + grad.nbytes for s, _ in after))
