"""Copies between arrays, wherever they are."""

from typing import Any

import numpy as np

from distopt.device import pinned
from distopt.device.arrays import describe, on_gpu
from distopt.device.gpus import cupy, current_gpu
from distopt.device.memory import empty
from distopt.device.streams import current_stream

PINNED = 1 << 20  # bytes up to which an upload goes through pinned memory, and does not wait
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3  # cudaMemcpyKind


def copy(to: Any, source: Any) -> None:
    """Copy between contiguous arrays of one dtype and size, wherever they live; waits only if ``to`` is on the host."""
    if not on_gpu(to):
        to[...] = (host_copy(source) if on_gpu(source) else source).reshape(to.shape)
    elif (to.dtype, to.size) != (source.dtype, source.size):
        raise TypeError(f"cannot copy {describe(source)} to {describe(to)}")
    elif not on_gpu(source):
        _upload(to, np.ascontiguousarray(source))
    elif to.nbytes:
        runtime = cupy().cuda.runtime
        runtime.memcpyAsync(to.data.ptr, source.data.ptr, to.nbytes, DEVICE_TO_DEVICE, current_stream().ptr)


def copied(x: Any) -> np.ndarray:
    """A copy of a contiguous array, where x is."""
    found = empty(x.size, x.dtype, like=x).reshape(x.shape)
    copy(found, x)
    return found


def contiguous(x: Any) -> Any:
    """x, or a copy of it in C order if it is not."""
    return cupy().ascontiguousarray(x) if on_gpu(x) else np.asarray(x, order="C")


def host_copy(x: Any) -> np.ndarray:
    """A numpy array with the elements that x has when the current stream comes to it; the host waits for that."""
    if not on_gpu(x):
        return np.array(x)
    found = np.empty(x.shape, x.dtype)
    if x.nbytes:
        stream = current_stream()
        cupy().cuda.runtime.memcpyAsync(found.ctypes.data, x.data.ptr, x.nbytes, DEVICE_TO_HOST, stream.ptr)
        stream.synchronize()
    return found


def _upload(to: Any, source: np.ndarray) -> None:
    """Enqueue a copy from the host; ``source`` may change as soon as this returns."""
    stream, raw = current_stream(), source.reshape(-1).view(np.uint8)
    if stream.is_capturing():
        raise RuntimeError(f"a captured step cannot upload {describe(source)}: its arrays must stay the same ones")
    runtime = cupy().cuda.runtime
    if raw.size > PINNED:
        runtime.memcpyAsync(to.data.ptr, raw.ctypes.data, raw.size, HOST_TO_DEVICE, stream.ptr)
        stream.synchronize()
    elif raw.size:
        piece = pinned.pool.take(raw.size)
        piece.bytes[: raw.size] = raw
        runtime.memcpyAsync(to.data.ptr, piece.bytes.ctypes.data, raw.size, HOST_TO_DEVICE, stream.ptr)
        piece.event.record(stream)
        pinned.pool.give(piece, current_gpu())
