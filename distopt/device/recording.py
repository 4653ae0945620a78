"""Work that is enqueued on a GPU at every step alike: recorded once as a CUDA graph, and enqueued by one call then."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

from distopt.device.arrays import address
from distopt.device.graph import Graph
from distopt.device.messages import DeviceMirror, mirrors_used
from distopt.device.streams import can_capture, current_stream

T = TypeVar("T")


class Recording:
    """The launches of one piece of work: enqueued as they are the first time, recorded the next time, then replayed."""

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self._key: Hashable = None
        self._mirrors: dict[DeviceMirror, None] = {}
        self._result: Any = None

    def run(self, key: Hashable, work: Callable[[], T], gpu: int) -> T:
        """Enqueue the work in the current stream, and return what it has returned when it was recorded."""
        # key: equal keys promise equal launches: of the same kernels, on the same memory, with the same numbers but for
        # those in mirrors, which are brought up to date before each replay.
        # work: enqueues launches, and neither waits nor asks what is in memory.
        if key != self._key:
            self._key, self.graph = None, None
            with mirrors_used() as self._mirrors:
                # It compiles, allocates and uploads what it needs.
                result = work()
            self._key = key
            return result
        for mirror in self._mirrors:
            mirror.address(gpu)
        if self.graph is None or self.graph.dropped:
            self._key, graph = None, Graph()
            with graph.capture():
                self._result = work()
            self._key, self.graph = key, graph
        self.graph.replay()
        return self._result  # type: ignore[no-any-return]


class Recorder(NamedTuple):
    """The recordings of a bucket in one step."""

    recordings: dict[str, Recording]  # by name of the work, from step to step
    key: tuple[Hashable, ...]  # all that launches depend on besides arrays
    gpu: int

    def run(self, name: str, work: Callable[[], T], arrays: Sequence[Any]) -> T:
        """Enqueue the work of this name, which reads and writes these arrays; return what it returns."""
        stream = current_stream()
        if not can_capture(stream):
            return work()
        if name not in self.recordings:
            self.recordings[name] = Recording()
        return self.recordings[name].run((*self.key, stream.ptr, *map(address, arrays)), work, self.gpu)
