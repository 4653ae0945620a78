"""Flat memory on the host or on a GPU."""

import contextlib
import math
import mmap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from distopt.device.arrays import on_gpu
from distopt.device.gpus import cupy, current_gpu
from distopt.device.streams import current_stream, synchronize

HUGE_PAGE = 2 << 20

_thread = threading.local()


def zeros(n: int, dtype: Any, like: Any = None) -> np.ndarray:
    """Return zeroed memory of shape ``(n,)``, on the current GPU if ``like`` is on a GPU, else on the host."""
    # Host memory is aligned to 64 bytes, or to 2 MiB (huge pages) from 2 MiB on; cupy's is aligned to 512 bytes.
    nbytes = n * np.dtype(dtype).itemsize
    if on_gpu(like):
        array: np.ndarray = gpu_zeros(n, dtype)
        return array
    align = HUGE_PAGE if nbytes >= HUGE_PAGE else 64
    if align == HUGE_PAGE:
        # Private, as shared memory gets small pages.
        pages = mmap.mmap(-1, nbytes + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = np.frombuffer(pages, np.uint8)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # A kernel without huge pages gives small ones.  No more of them than n elements fill.
            with contextlib.suppress(OSError):
                pages.madvise(mmap.MADV_HUGEPAGE, -raw.ctypes.data % align, nbytes // align * align)
    else:
        raw = np.zeros(nbytes + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + nbytes].view(dtype)


def empty(n: int, dtype: Any, like: Any = None) -> np.ndarray:
    """Return uninitialized memory of shape ``(n,)``, on the current GPU if ``like`` is on a GPU, else on the host."""
    array: np.ndarray = cupy().empty(n, dtype) if on_gpu(like) else np.empty(n, dtype)
    return array


def gpu_zeros(n: int, dtype: Any) -> Any:
    """Return zeroed memory of shape ``(n,)`` on the current GPU; MemoryError if there is not enough."""
    x = cupy().empty(n, dtype)
    clear(x)
    return x


def gpu_array_at(address: int, shape: tuple[int, ...], dtype: Any, owner: Any, gpu: int | None = None) -> Any:
    """Return memory of a GPU that cupy did not allocate as an array; ``owner`` lives as long as it or a view of it."""
    number = current_gpu() if gpu is None else gpu
    memory = cupy().cuda.UnownedMemory(address, math.prod(shape) * np.dtype(dtype).itemsize, owner, number)
    return cupy().ndarray(shape, dtype, cupy().cuda.MemoryPointer(memory, 0))


def clear(x: Any) -> None:
    """Set all elements of a contiguous array to zero."""
    if type(x) is np.ndarray or not on_gpu(x):
        # as bytes, which numpy leaves to memset
        x.reshape(-1).view(np.uint8).fill(0)
    elif x.nbytes:
        cupy().cuda.runtime.memsetAsync(x.data.ptr, 0, x.nbytes, current_stream().ptr)


@contextlib.contextmanager
def owned_by(stream: Any) -> Iterator[None]:
    """Make memory that ``persistent_zeros`` allocates in this context belong to a stream of cupy's."""
    # When it is freed, cupy's pool may reuse it for later work of that stream without waiting for other streams.  So it
    # has to be the stream that waits for all others that use the memory, whatever the current one is.
    previous, _thread.owner = getattr(_thread, "owner", None), stream
    try:
        yield
    finally:
        _thread.owner = previous


def persistent_zeros(n: int, dtype: Any, like: Any) -> np.ndarray:
    """Return memory as ``zeros`` does, for use beyond the present context: it belongs to the stream of ``owned_by``."""
    if not on_gpu(like):
        return zeros(n, dtype)
    with getattr(_thread, "owner", None) or contextlib.nullcontext():
        array: np.ndarray = cupy().empty(n, dtype)
    clear(array)
    return array


def wait_for_last_use(x: Any, poll: Callable[[], None] = lambda: None) -> None:
    """Wait until the current stream is done with an array on a GPU, which may then be freed in any stream's order."""
    if on_gpu(x):
        synchronize(current_stream(), poll)
