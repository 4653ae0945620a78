"""Threads that work on a GPU."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from distopt.device.gpus import cupy, use_gpu

T = TypeVar("T")


def in_thread(work: Callable[[], T], gpu: int | None, name: str | None = None) -> "Future[T]":
    """Work in a thread of its own, on a GPU (None: on the host alone) in the streams of cupy and torch current here."""
    # A thread has a current GPU and current streams of its own, and a new one those of GPU 0 that nothing waits for.
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
            # This does nothing with None.
            torch.cuda.set_stream(torchs)

    return enter


def _run(enter: Callable[[], object], work: Callable[[], T], future: "Future[T]") -> None:
    try:
        enter()
        result = work()
    except BaseException as error:
        future.set_exception(error)
        # The error's traceback would keep these, and they the error.
        del future, work
    else:
        future.set_result(result)
