"""Sums over ranks where the caller looks for them: in the gradients' own arrays."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from distopt import device, kernels
from distopt.buckets.buffers import Buffers
from distopt.buckets.piece import Sum
from distopt.device import is_array


def leave(
    buffers: Buffers, sums: Iterable[Sum], grads: Mapping[str, Any], refused: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Write the sums of these gradients to their arrays, unless ``refused`` (compress.At); the arrays, by name.

    A gradient that cannot hold its own sum, since it is None, read-only, not contiguous or another one's too, gets a
    new array.
    """
    left: dict[str, np.ndarray] = {}
    taken: set[int] = set()
    for buffer, total in zip(buffers, sums, strict=True):
        homes = [buffers.view(name) for name in buffer.bucket.names]
        for name, home in zip(buffer.bucket.names, homes, strict=True):
            if name in grads:
                grad = grads[name]
                mine = _fits(grad, home) and device.address(grad) not in taken and _apart(buffers, grad, home)
                left[name] = grad if mine else device.zeros(home.size, home.dtype, home).reshape(home.shape)
                if home.size:
                    taken.add(device.address(left[name]))
        buffer.means.point_to([left.get(n, home) for n, home in zip(buffer.bucket.names, homes, strict=True)])
        for piece in total:
            kernels.unpack(buffer.means.share(piece.number, piece.of), piece.flat, 1.0, refused)
    return left


def _fits(grad: Any, home: np.ndarray) -> bool:
    """Can it hold a sum?"""
    return (
        is_array(grad)
        and (grad.shape, grad.dtype, device.place(grad)) == (home.shape, home.dtype, device.place(home))
        and bool(grad.flags.c_contiguous)
        and device.writable(grad)
    )


def _apart(buffers: Buffers, grad: np.ndarray, home: np.ndarray) -> bool:
    """Is it where no other gradient lives?"""
    return device.address(grad) == device.address(home) or not buffers.hold(grad)
