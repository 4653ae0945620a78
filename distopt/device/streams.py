"""The order of what is enqueued: streams, the events between them, and the host that waits for one."""

import time
from collections.abc import Callable
from typing import Any

from distopt.device.gpus import cupy

NOT_READY = 600  # cudaErrorNotReady


def current_stream() -> Any:
    """The stream in which this thread enqueues: cupy's, so that ``with stream:`` chooses it."""
    return cupy().cuda.get_current_stream()


def new_stream() -> Any:
    """A stream that waits for no other one of itself."""
    return cupy().cuda.Stream(non_blocking=True)


class Order:
    """An event, to order streams with; the host waits for none."""

    def __init__(self) -> None:
        self._event = cupy().cuda.Event(disable_timing=True)
        self._set = False

    def __call__(self, first: Any, then: Any) -> None:
        """What ``then`` is given from here on comes after what ``first`` has been given so far."""
        if first.ptr != then.ptr:
            self._event.record(first)
            then.wait_event(self._event)

    def mark(self) -> None:
        """Remember what the current stream has been given so far."""
        stream = current_stream()
        if not stream.is_capturing():  # a graph orders itself
            self._event.record(stream)
            self._set = True

    def follow(self) -> None:
        """What the current stream is given from here on comes after what was remembered."""
        stream = current_stream()
        if self._set and not stream.is_capturing():
            stream.wait_event(self._event)


def finish(stream: Any, look: Callable[[], None] = lambda: None) -> None:
    """Wait, on the host, for all that a stream has been given; ``look`` is called meanwhile, and may raise."""
    event = cupy().cuda.Event(disable_timing=True)
    event.record(stream)
    wait(event, look)


def wait(event: Any, look: Callable[[], None]) -> None:
    """Wait, on the host, for an event; ``look`` is called meanwhile, and may raise.

    Raises cupy's CUDARuntimeError if the GPU has failed: ``event.done`` would just never be true.
    """
    started, runtime = time.monotonic(), cupy().cuda.runtime
    while status := runtime.eventQuery(event.ptr):
        if status != NOT_READY:
            raise runtime.CUDARuntimeError(status)
        look()
        if time.monotonic() - started > 1e-3:
            time.sleep(1e-4)
