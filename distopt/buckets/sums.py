"""Sums over ranks where the caller looks for them, in the gradients' own arrays; and back."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from distopt import device, kernels
from distopt.buckets.buffers import Buffer, Buffers
from distopt.buckets.piece import Sum

Check = Callable[[str, np.ndarray, Any], np.ndarray]


def leave(
    buffers: Buffers, sums: Iterable[Sum], grads: Mapping[str, Any], refused: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Write the sums of these gradients to their arrays, unless ``refused`` (compress.At); the arrays, by name.

    A gradient that cannot hold its own sum, since it is None, read-only, not contiguous, of 16 bits, or another one's
    too, gets a new array.
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
        kernels.pack(buffer.sums, buffer.gradient, 1.0, buffer.bad)


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
    """Where each bucket's gradients are; None unless all can be written to, each apart from all others."""
    addresses: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    for buffer in buffers:
        given = [grads.get(name) for name in buffer.bucket.names]
        found = buffer.wide_layout.addresses(given)
        if found is None or not all(map(device.writable, given)) or buffers.strange(found, buffer.home).any():
            return None
        addresses.append(found)
        sizes.append(buffer.sums.rows["size"])
    taken = np.concatenate(addresses)[np.concatenate(sizes) > 0] if addresses else np.empty(0)
    return addresses if np.unique(taken).size == taken.size else None


def _with_new_arrays(buffers: Buffers, left: dict[str, Any]) -> list[np.ndarray]:
    """Addresses for sums, one by one; those that nobody asked for go where the gradient lives, and change nothing."""
    taken: set[int] = set()
    found = [buffer.home.copy() for buffer in buffers]
    for buffer, addresses in zip(buffers, found, strict=True):
        for row, name in enumerate(buffer.bucket.names):
            if name not in left:
                continue
            home = buffers.view(name)
            grad = left[name]
            if not _fits(grad, home) or device.address(grad) in taken or _elsewhere(buffers, grad, home):
                left[name] = device.zeros(home.size, home.dtype, home).reshape(home.shape)
            addresses[row] = device.address(left[name])
            if home.size:
                taken.add(int(addresses[row]))
    return found


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
