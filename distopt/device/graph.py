"""CUDA graphs: a sequence of GPU work that is recorded once and enqueued again as a whole."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from distopt.device.gpus import cupy, current_gpu
from distopt.device.streams import current_stream

# cudaErrorStreamCaptureUnsupported to cudaErrorStreamCaptureWrongThread
CAPTURE_ERRORS = range(900, 909)


class Graph:
    """A CUDA graph of the work that is enqueued in the context ``capture()``."""

    # In the context nothing may be uploaded or waited for, and the current stream must not be the null stream.  Memory
    # allocated there comes from a pool of the graph's own: every replay writes to it, even if it was freed since.

    def __init__(self) -> None:
        self._graph: Any = None
        self._pool = cupy().cuda.MemoryPool()
        self.gpu = current_gpu()
        _graphs.add(self)

    @property
    def dropped(self) -> bool:
        """Whether there is nothing to replay: no capture yet, or the graph was freed."""
        return self._graph is None

    def drop(self) -> None:
        """Free the graph."""
        self._graph = None

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Record the work enqueued in this context instead of doing it."""
        stream = current_stream()
        stream.begin_capture()
        try:
            with cupy().cuda.using_allocator(self._pool.malloc):
                yield
        except BaseException:
            # The capture may be broken already.
            with contextlib.suppress(Exception):
                stream.end_capture()
            raise
        self._graph = stream.end_capture()

    def replay(self) -> None:
        """Enqueue the recorded work in the current stream."""
        self._graph.launch(current_stream())


def is_capture_error(error: Exception) -> bool:
    """Tell if work cannot be captured: cupy records no call of cuBLAS and the like, and CUDA no wait of the host."""
    return isinstance(error, NotImplementedError) or getattr(error, "status", 0) in CAPTURE_ERRORS


_graphs: weakref.WeakSet[Graph] = weakref.WeakSet()


def drop_graphs(gpu: int) -> None:
    """Free all graphs of a GPU: before NCCL destroys a communicator, it waits for the graphs that use it."""
    for graph in list(_graphs):
        if graph.gpu == gpu:
            graph.drop()
