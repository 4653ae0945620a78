"""Sums over ranks where the caller looks for them, in the gradients' own arrays; and back."""

import bisect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from distopt import device, kernels
from distopt.buckets.buffers import Buffer, Buffers
from distopt.buckets.piece import Sum
from distopt.tables import Members

Check = Callable[[str, np.ndarray, Any], np.ndarray]


def leave(
    buffers: Buffers, sums: Iterable[Sum], grads: Mapping[str, Any], refused: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Write the sums of these gradients to their arrays, unless ``refused`` (compress.At); the arrays, by name.

    A gradient that cannot hold its own sum, since it is None, read-only, not contiguous, of 16 bits, or shares memory
    with a parameter or another gradient, gets a new array.
    """
    left = dict(grads)
    addresses = _as_they_are(buffers, grads) or _with_new_arrays(buffers, left)
    for buffer, total, found in zip(buffers, sums, addresses, strict=True):
        buffer.sums.rows["data"] = found
        for piece in total:
            kernels.unpack(buffer.sums.share(piece.number, piece.of), piece.flat, 1.0, refused)
    return left


def take(buffers: Buffers, sums: Mapping[str, Any], check: Check) -> None:
    """Pack sums again; gradients without one are zeros.  As ``Buffer.pack`` it counts what is not finite.

    ``check(name, home, sum)`` returns a contiguous array like ``home``, or raises; it is asked where one is not so.
    """
    given = [_apart(buffers, buffer, sums, check) for buffer in buffers]  # before a bucket is packed over another's
    for buffer, arrays in zip(buffers, given, strict=True):
        buffer.sums.rows["data"] = _addresses(buffer, arrays)
        kernels.pack(buffer.sums, buffer.gradient, 1.0, buffer.bad, buffer.largest)


def _apart(buffers: Buffers, buffer: Buffer, sums: Mapping[str, Any], check: Check) -> list[np.ndarray]:
    """A bucket's sums, copied if one lies where another gradient lives; zeros at home for those that there are not."""
    names = buffer.bucket.names
    for name in names:
        if name not in sums:
            device.clear(buffers.view(name))
    given = [sums[name] if name in sums else buffers.view(name) for name in names]
    if buffer.wide_layout.addresses(given) is None:
        given = [check(name, buffers.view(name), a) for name, a in zip(names, given, strict=True)]
    strange = buffers.strange(_addresses(buffer, given), buffer.home).any()
    return [device.copied(a) for a in given] if strange else given


def _addresses(buffer: Buffer, arrays: list[np.ndarray]) -> np.ndarray:
    found = buffer.wide_layout.addresses(arrays)
    return np.array([device.address(a) for a in arrays], np.uintp) if found is None else found


def _as_they_are(buffers: Buffers, grads: Mapping[str, Any]) -> list[np.ndarray] | None:
    """Where each bucket's gradients are; None unless all can be written to, each apart from all else."""
    addresses: list[np.ndarray] = []
    for buffer in buffers:
        given = [grads.get(name) for name in buffer.bucket.names]
        found = buffer.wide_layout.addresses(given)
        if found is None or not all(map(device.writable, given)) or buffers.strange(found, buffer.home).any():
            return None
        addresses.append(found)
    pieces = [_pieces(b.sums, found) for b, found in zip(buffers, addresses, strict=True)] + _parameters(buffers)
    starts, ends = np.hstack([np.empty((2, 0), np.uintp), *pieces])
    order = np.argsort(starts)
    return None if (starts[order][1:] < ends[order][:-1]).any() else addresses


def _pieces(members: Members, addresses: np.ndarray) -> np.ndarray:
    """Where each array of a table, at these addresses, starts and ends; those that are empty are nowhere."""
    sizes = members.rows["size"].astype(np.uintp)
    return np.stack([addresses, addresses + sizes * members.stored.itemsize])[:, sizes > 0]


def _parameters(buffers: Buffers) -> list[np.ndarray]:
    return [_pieces(b.parameters, b.parameters.rows["data"].astype(np.uintp)) for b in buffers]


def _with_new_arrays(buffers: Buffers, left: dict[str, Any]) -> list[np.ndarray]:
    """Addresses for sums, one by one; those that nobody asked for go where the gradient lives, and change nothing."""
    taken = sorted(zip(*np.hstack([np.empty((2, 0), np.uintp), *_parameters(buffers)]).tolist(), strict=True))
    found = [buffer.home.copy() for buffer in buffers]
    for buffer, addresses in zip(buffers, found, strict=True):
        for row, name in enumerate(buffer.bucket.names):
            if name not in left:
                continue
            home = buffers.view(name)
            grad = left[name]
            if not _fits(grad, home) or _meets(taken, grad) or _elsewhere(buffers, grad, home):
                left[name] = device.zeros(home.size, home.dtype, home).reshape(home.shape)
            addresses[row] = device.address(left[name])
            if home.size:
                bisect.insort(taken, (int(addresses[row]), int(addresses[row]) + home.nbytes))
    return found


def _meets(taken: list[tuple[int, int]], grad: np.ndarray) -> bool:
    """Does it share memory with what is taken, pieces (start, end) in their order, none of which meets another?"""
    start = device.address(grad)
    place = bisect.bisect(taken, (start, start))
    before, behind = taken[:place][-1:], taken[place:][:1]
    return bool(grad.size) and (any(e > start for _, e in before) or any(s < start + grad.nbytes for s, _ in behind))


def _fits(grad: Any, home: np.ndarray) -> bool:
    """Can it hold a sum?"""
    return (
        device.is_array(grad)
        and (grad.shape, grad.dtype, device.place(grad)) == (home.shape, home.dtype, device.place(home))
        and bool(grad.flags.c_contiguous)
        and device.writable(grad)
    )


def _elsewhere(buffers: Buffers, grad: np.ndarray, home: np.ndarray) -> bool:
    """Does it lie where another gradient lives?"""
    return bool(buffers.strange(np.array([device.address(grad)], np.uintp), np.uintp(device.address(home))).any())
