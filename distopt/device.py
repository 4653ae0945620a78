"""Memory, and what there is of a GPU: the only module that touches cupy's runtime."""

import contextlib
import importlib.util
import mmap
from typing import Any

import numpy as np

HUGE_PAGE = 2 << 20


def zeros(n: int, dtype: Any) -> np.ndarray:
    """Zeroed flat host memory for ``n`` elements, aligned to 64 bytes, or to 2 MiB (huge pages) from 2 MiB on."""
    nbytes = n * np.dtype(dtype).itemsize
    align = HUGE_PAGE if nbytes >= HUGE_PAGE else 64
    if align == HUGE_PAGE:
        room = -(-nbytes // align) * align + align  # the end has a huge page too
        pages = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory would have none
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them gives small pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        raw = np.frombuffer(pages, np.uint8)
    else:
        raw = np.zeros(nbytes + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + nbytes].view(dtype)


def describe(x: Any) -> str:
    """What an argument is, for the text of an error."""
    if not isinstance(x, np.ndarray):
        return f"{type(x).__name__}: {x!r:.60}"
    flaws = ", not contiguous" * (not x.flags.c_contiguous) + ", read-only" * (not x.flags.writeable)
    return f"an array {x.shape} {x.dtype if x.dtype.isnative else x.dtype.str}{flaws}"


def gpu_state() -> str:
    """'ok', or in one line why this process cannot use a GPU and what would help; imports cupy if it is installed."""
    if importlib.util.find_spec("cupy") is None:
        return "cupy is not installed: pip install 'distopt[cuda13]' (or [cuda12])"
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        return f"cupy is broken: {error}"
    except Exception as error:  # cupy's own CUDARuntimeError; its class lives in the module that may have failed
        return f"no CUDA driver: {error}"
    return "ok" if count else "the CUDA driver sees no device: check CUDA_VISIBLE_DEVICES"
