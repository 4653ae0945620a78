"""What was enqueued once, to be enqueued again as a whole."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from distopt.device.gpus import cupy, current_gpu
from distopt.device.streams import current_stream


class Graph:
    """What was enqueued in a context, to be enqueued again as a whole (a CUDA graph).

    In the context nothing may be uploaded or waited for, and the current stream must not be the null one.  Memory that
    is allocated in it comes from a pool of the graph's own: every replay writes to it, even if it was freed since.
    """

    def __init__(self) -> None:
        self._graph: Any = None
        self._pool = cupy().cuda.MemoryPool()
        self.gpu = current_gpu()
        _graphs.add(self)

    @property
    def dropped(self) -> bool:
        """Is there nothing to replay?"""
        return self._graph is None

    def drop(self) -> None:
        """Give the graph back."""
        self._graph = None

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Record instead of doing."""
        stream = current_stream()
        stream.begin_capture()
        try:
            with cupy().cuda.using_allocator(self._pool.malloc):
                yield
        except BaseException:
            with contextlib.suppress(Exception):  # of a capture that is broken already
                stream.end_capture()
            raise
        self._graph = stream.end_capture()

    def replay(self) -> None:
        """Enqueue it in the current stream."""
        self._graph.launch(current_stream())


_graphs: weakref.WeakSet[Graph] = weakref.WeakSet()


def drop_graphs(gpu: int) -> None:
    """Give the graphs of a GPU back: NCCL waits for those that use a communicator before it destroys that."""
    for graph in list(_graphs):
        if graph.gpu == gpu:
            graph.drop()
