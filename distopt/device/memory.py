"""Flat memory, on the host or on a GPU."""

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from distopt.device.arrays import on_gpu
from distopt.device.gpus import cupy
from distopt.device.streams import current_stream, finish

HUGE_PAGE = 2 << 20

_thread = threading.local()


def zeros(n: int, dtype: Any, like: Any = None) -> np.ndarray:
    """Zeroed flat memory for ``n`` elements, on the GPU if ``like`` is there, else on the host.

    Host memory is aligned to 64 bytes, or to 2 MiB (huge pages) from 2 MiB on; cupy's is aligned to 512 bytes.
    """
    nbytes = n * np.dtype(dtype).itemsize
    if on_gpu(like):
        found: np.ndarray = gpu_zeros(n, dtype)
        return found
    align = HUGE_PAGE if nbytes >= HUGE_PAGE else 64
    if align == HUGE_PAGE:
        pages = mmap.mmap(-1, nbytes + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones are small
        raw = np.frombuffer(pages, np.uint8)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them gives small pages
                pages.madvise(mmap.MADV_HUGEPAGE, -raw.ctypes.data % align, nbytes // align * align)  # no more than n
    else:
        raw = np.zeros(nbytes + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + nbytes].view(dtype)


def empty(n: int, dtype: Any, like: Any = None) -> np.ndarray:
    """Flat memory for ``n`` elements with anything in it, on the GPU if ``like`` is there, else on the host."""
    found: np.ndarray = cupy().empty(n, dtype) if on_gpu(like) else np.empty(n, dtype)
    return found


def gpu_zeros(n: int, dtype: Any) -> Any:
    """Zeroed flat memory on the current GPU.  Raises MemoryError if there is not enough."""
    x = cupy().empty(n, dtype)
    clear(x)
    return x


def clear(x: Any) -> None:
    """Set all elements of a contiguous array to zero."""
    if not on_gpu(x):
        x.reshape(-1).view(np.uint8).fill(0)  # bytes, which numpy leaves to memset
    elif x.nbytes:
        cupy().cuda.runtime.memsetAsync(x.data.ptr, 0, x.nbytes, current_stream().ptr)


@contextlib.contextmanager
def owned_by(stream: Any) -> Iterator[None]:
    """Memory that lasts and is made in this context goes back to a stream: the pool hands it out again in its order.

    So it has to be the stream that waits for all others that use the memory, whatever the current one is.
    """
    before, _thread.owner = getattr(_thread, "owner", None), stream
    try:
        yield
    finally:
        _thread.owner = before


def lasting_zeros(n: int, dtype: Any, like: Any) -> np.ndarray:
    """As ``zeros``, for memory that outlives the context in which it is made."""
    if not on_gpu(like):
        return zeros(n, dtype)
    with getattr(_thread, "owner", None) or contextlib.nullcontext():
        found: np.ndarray = cupy().empty(n, dtype)
    clear(found)
    return found


def last_read(x: Any, look: Callable[[], None] = lambda: None) -> None:
    """Return when the current stream is done with x, which may be freed then, in the order of any other stream.

    ``look`` is called meanwhile, and may raise.
    """
    if on_gpu(x):
        finish(current_stream(), look)
