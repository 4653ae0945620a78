"""Copies between arrays on the host and on GPUs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from distopt.device import pinned
from distopt.device.arrays import address, describe, on_gpu
from distopt.device.gpus import cupy, current_gpu
from distopt.device.memory import empty, zeros
from distopt.device.streams import await_work, current_stream

# Bytes up to which an upload goes through pinned memory, and does not wait.
PINNED = 1 << 20
# cudaMemcpyKind
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3


def copy(to: Any, source: Any) -> None:
    """Copy the elements of a contiguous array to another one; the host waits only for those that come from a GPU."""
    if not on_gpu(to):
        to[...] = (host_copy(source) if on_gpu(source) else source).reshape(to.shape)
    elif (to.dtype, to.size) != (source.dtype, source.size):
        raise TypeError(
            f"source must be of the dtype and size of {describe(to)}, got {describe(source)}: source.astype(dtype) "
            "converts it"
        )
    elif not on_gpu(source):
        _upload(to, np.ascontiguousarray(source))
    elif to.nbytes:
        runtime = cupy().cuda.runtime
        runtime.memcpyAsync(to.data.ptr, source.data.ptr, to.nbytes, DEVICE_TO_DEVICE, current_stream().ptr)


def copied(x: Any) -> np.ndarray:
    """Return a copy of a contiguous array, on the same host or GPU."""
    duplicate = empty(x.size, x.dtype, like=x).reshape(x.shape)
    copy(duplicate, x)
    return duplicate


def concatenated(parts: Sequence[Any], aligned: int = 1) -> np.ndarray:
    """Return flat arrays of one dtype in one, each at a multiple of ``aligned`` elements: a view if they lie so."""
    whole: np.ndarray = parts[0]
    if len(parts) == 1:
        return whole
    memory, first, starts, end = whole.base, address(whole), list[int](), 0
    lies = type(memory) is type(whole) and memory.flags.c_contiguous
    for part in parts:
        starts.append(-(-end // aligned) * aligned)
        end = starts[-1] + part.size
        lies = lies and part.base is memory and address(part) == first + starts[-1] * whole.itemsize
    if lies and memory is not None:
        return memory.reshape(-1).view(whole.dtype)[(first - address(memory)) // whole.itemsize :][:end]
    whole = zeros(end, whole.dtype, like=whole)
    for start, part in zip(starts, parts, strict=True):
        copy(whole[start : start + part.size], part)
    return whole


def contiguous(x: Any) -> Any:
    """Return the array itself if it is in C order, else a copy that is."""
    return cupy().ascontiguousarray(x) if on_gpu(x) else np.asarray(x, order="C")


def host_copy(x: Any) -> np.ndarray:
    """Return a numpy array with a copy of an array's elements; the host waits for the end of the current stream."""
    if not on_gpu(x):
        return np.array(x)
    array = np.empty(x.shape, x.dtype)
    if x.nbytes:
        stream = current_stream()
        # The host waits in a copy to memory that is not pinned.
        await_work(stream)
        cupy().cuda.runtime.memcpyAsync(array.ctypes.data, x.data.ptr, x.nbytes, DEVICE_TO_HOST, stream.ptr)
        stream.synchronize()
    return array


def _upload(to: Any, source: np.ndarray) -> None:
    """Enqueue a copy from the host; ``source`` may change as soon as this returns."""
    stream, raw = current_stream(), source.reshape(-1).view(np.uint8)
    if stream.is_capturing():
        raise RuntimeError(
            f"arrays of a captured step must stay the same ones, got {describe(source)} to upload: copy new values "
            "into those before the step"
        )
    runtime = cupy().cuda.runtime
    if raw.size > PINNED:
        await_work(stream)
        runtime.memcpyAsync(to.data.ptr, raw.ctypes.data, raw.size, HOST_TO_DEVICE, stream.ptr)
        stream.synchronize()
    elif raw.size:
        piece = pinned.pool.acquire(raw.size)
        piece.bytes[: raw.size] = raw
        runtime.memcpyAsync(to.data.ptr, piece.bytes.ctypes.data, raw.size, HOST_TO_DEVICE, stream.ptr)
        piece.event.record(stream)
        pinned.pool.release(piece, current_gpu())
