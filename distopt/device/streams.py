"""CUDA streams: their order among each other, and waits of the host for them."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from distopt.device.gpus import cupy

# cudaErrorNotReady
NOT_READY = 600
# The null stream, under its three names.
OWN = (0, 1, 2)
# A priority; CUDA takes the greatest that the GPU has for one beyond its range.
FIRST = -(1 << 15)

_thread = threading.local()


def current_stream() -> Any:
    """Return the stream in which this thread enqueues: cupy's, so that ``with stream:`` chooses it."""
    return cupy().cuda.get_current_stream()


class Handle:
    """A stream of another library, as CUDA's protocol for streams has it."""

    def __init__(self, pointer: int):
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol's version and the handle."""
        return 0, self._pointer


@functools.cache
def stream_at(pointer: int) -> Any:
    """Return cupy's stream that is one of another library, which keeps it, by CUDA's handle."""
    return cupy().cuda.Stream.from_external(Handle(pointer))


def can_capture(stream: Any) -> bool:
    """Tell if work may be recorded in a stream: it is none of CUDA's own streams, and nobody records in it yet."""
    return stream.ptr not in OWN and not stream.is_capturing()


def new_stream(first: bool = False) -> Any:
    """Return a new stream, which does not wait for the null stream."""
    # first: where the GPU has no room for the blocks of all kernels, those of this stream go first.
    return cupy().cuda.Stream(non_blocking=True, priority=FIRST if first else None)


class StreamEvent:
    """An event that orders the work of streams, without a wait of the host."""

    def __init__(self) -> None:
        self._event = cupy().cuda.Event(disable_timing=True)
        self._set = False

    def __call__(self, first: Any, second: Any) -> None:
        """Make the work that is enqueued in ``second`` from now on wait for the work enqueued in ``first`` so far."""
        if first.ptr != second.ptr:
            self._event.record(first)
            second.wait_event(self._event)

    def record(self) -> None:
        """Record the work enqueued in the current stream so far."""
        stream = current_stream()
        # A graph orders itself.
        if not stream.is_capturing():
            self._event.record(stream)
            self._set = True

    @property
    def done(self) -> bool:
        """Whether the work that ``record`` has seen is complete."""
        return not cupy().cuda.runtime.eventQuery(self._event.ptr)

    def wait(self) -> None:
        """Make the work enqueued in the current stream from now on wait for the work that ``record`` has seen."""
        stream = current_stream()
        if self._set and not stream.is_capturing():
            stream.wait_event(self._event)


class SideStream:
    """A context that enqueues in a stream of its own what comes after the work of the current one so far."""

    def __init__(self) -> None:
        self._stream, self._order = new_stream(), StreamEvent()

    def __enter__(self) -> None:
        self._order(current_stream(), self._stream)
        self._stream.__enter__()

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)

    def wait(self) -> None:
        """Make the current stream's work from now on wait for what this one has so far."""
        self._order(self._stream, current_stream())


def synchronize(stream: Any, poll: Callable[[], None] = lambda: None) -> None:
    """Wait, on the host, for all work enqueued in a stream; ``poll`` may raise to end the wait."""
    event = cupy().cuda.Event(disable_timing=True)
    event.record(stream)
    wait(event, poll)


@contextlib.contextmanager
def polled(poll: Callable[[], None]) -> Iterator[None]:
    """Call ``poll``, which may raise, while this thread waits in this context for a stream whose work may never end."""
    outer, _thread.poll = getattr(_thread, "poll", None), poll
    try:
        yield
    finally:
        _thread.poll = outer


def await_work(stream: Any) -> None:
    """Wait, on the host, for all work enqueued in a stream, if this thread is in a context of ``polled``."""
    poll = getattr(_thread, "poll", None)
    if poll is not None:
        synchronize(stream, poll)


def wait(event: Any, poll: Callable[[], None]) -> None:
    """Wait, on the host, for an event; ``poll`` may raise to end the wait."""
    # If the GPU has failed, `event.done` would never be true.
    started, runtime = time.monotonic(), cupy().cuda.runtime
    while status := runtime.eventQuery(event.ptr):
        if status != NOT_READY:
            raise runtime.CUDARuntimeError(status)
        poll()
        if time.monotonic() - started > 1e-3:
            time.sleep(1e-4)
