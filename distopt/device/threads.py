"""Threads that work on a GPU."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from distopt.device.gpus import cupy, use_gpu

T = TypeVar("T")


def in_thread(work: Callable[[], T], gpu: int | None, name: str | None = None) -> "Future[T]":
    """Do something in a thread of its own, on a GPU as this thread does: in the streams of cupy and torch current here.

    A thread has a current GPU and current streams of its own, and a new one those of GPU 0 that nothing waits for.

    Args:
        work: what is done.
        gpu: the GPU's number; None for work on the host alone.
        name: the thread's.

    Returns:
        What ``work`` will return or raise.

    Example:
        >>> in_thread(lambda: 2 + 3, gpu=None).result()
        5
    """
    future = Future[T]()
    threading.Thread(target=_run, args=(_place(gpu), work, future), name=name, daemon=True).start()
    return future


def _place(gpu: int | None) -> Callable[[], object]:
    """Return what lets another thread work on a GPU as this one does."""
    if gpu is None:
        return lambda: None
    stream, torch = cupy().cuda.get_current_stream(gpu), sys.modules.get("torch")
    torchs = torch.cuda.current_stream(gpu) if torch is not None and torch.cuda.is_initialized() else None

    def enter() -> None:
        use_gpu(gpu)
        stream.use()
        if torch is not None:
            torch.cuda.set_stream(torchs)  # which does nothing with None

    return enter


def _run(enter: Callable[[], object], work: Callable[[], T], future: "Future[T]") -> None:
    try:
        enter()
        result = work()
    except BaseException as error:
        future.set_exception(error)
        del future, work  # which the error's traceback would keep, and they the error
    else:
        future.set_result(result)
