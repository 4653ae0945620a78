"""Memory, and a GPU: the only module that touches cupy's runtime.

An array is numpy's, or cupy's on one GPU; what is done with one on a GPU is *enqueued*: it happens when the current
stream comes to it, and the host goes on.
"""

import contextlib
import ctypes
import functools
import importlib.util
import mmap
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

HUGE_PAGE = 2 << 20
PINNED = 1 << 20  # bytes up to which an upload goes through pinned memory, and does not wait
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3  # cudaMemcpyKind
NOT_READY = 600  # cudaErrorNotReady
MULTIPROCESSORS = 16  # cudaDevAttrMultiProcessorCount
NO_CUPY = "cupy is not installed: pip install 'distopt[cuda13]' (or [cuda12])"


_thread = threading.local()


@functools.cache
def _cupy() -> Any:
    import cupy

    return cupy


# ----------------------------------------------------------------------------------------------------- arrays


def array_module() -> ModuleType:
    """cupy, imported when it is first asked for."""
    module: ModuleType = _cupy()
    return module


def on_gpu(x: Any) -> bool:
    """Is it an array on a GPU?"""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def is_array(x: Any) -> bool:
    """Is it an array that this library knows?"""
    return isinstance(x, np.ndarray) or on_gpu(x)


def place(x: Any) -> int | None:
    """The number of the GPU on which an array lives, None for the host."""
    return int(x.data.device_id) if on_gpu(x) else None


def address(x: Any) -> int:
    """Where an array keeps its elements."""
    return int(x.data.ptr if on_gpu(x) else x.ctypes.data)


def writable(x: Any) -> bool:
    """May an array be written to?"""
    return on_gpu(x) or bool(x.flags.writeable)


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


def empty(n: int, dtype: Any, like: Any = None) -> np.ndarray:
    """Flat memory for ``n`` elements with anything in it, on the GPU if ``like`` is there, else on the host."""
    found: np.ndarray = _cupy().empty(n, dtype) if on_gpu(like) else np.empty(n, dtype)
    return found


def copied(x: Any) -> np.ndarray:
    """A copy of a contiguous array, where x is."""
    found = empty(x.size, x.dtype, like=x).reshape(x.shape)
    copy(found, x)
    return found


@contextlib.contextmanager
def owned_by(stream: Any) -> Iterator[None]:
    """What ``lasting_zeros`` makes in this context is given back to a stream: the pool hands it out again in its order.

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
    found = _lasting(n, dtype)
    clear(found)
    return found


def _lasting(n: int, dtype: Any) -> np.ndarray:
    with getattr(_thread, "owner", None) or contextlib.nullcontext():
        found: np.ndarray = _cupy().empty(n, dtype)
    return found


def gpu_zeros(n: int, dtype: Any) -> Any:
    """Zeroed flat memory on the current GPU.  Raises MemoryError if there is not enough."""
    x = _cupy().empty(n, dtype)
    clear(x)
    return x


def clear(x: Any) -> None:
    """Set all elements of a contiguous array to zero."""
    if not on_gpu(x):
        x.fill(0)
    elif x.nbytes:
        _cupy().cuda.runtime.memsetAsync(x.data.ptr, 0, x.nbytes, current_stream().ptr)


def copy(to: Any, source: Any) -> None:
    """Copy between contiguous arrays of one dtype and size, wherever they live; waits only if ``to`` is on the host."""
    if not on_gpu(to):
        to[...] = (host_copy(source) if on_gpu(source) else source).reshape(to.shape)
    elif (to.dtype, to.size) != (source.dtype, source.size):
        raise TypeError(f"cannot copy {describe(source)} to {describe(to)}")
    elif not on_gpu(source):
        _upload(to, np.ascontiguousarray(source))
    elif to.nbytes:
        runtime = _cupy().cuda.runtime
        runtime.memcpyAsync(to.data.ptr, source.data.ptr, to.nbytes, DEVICE_TO_DEVICE, current_stream().ptr)


def contiguous(x: Any) -> Any:
    """x, or a copy of it in C order if it is not."""
    return _cupy().ascontiguousarray(x) if on_gpu(x) else np.asarray(x, order="C")


def host_copy(x: Any) -> np.ndarray:
    """A numpy array with the elements that x has when the current stream comes to it; the host waits for that."""
    if not on_gpu(x):
        return np.array(x)
    found = np.empty(x.shape, x.dtype)
    if x.nbytes:
        stream = current_stream()
        _cupy().cuda.runtime.memcpyAsync(found.ctypes.data, x.data.ptr, x.nbytes, DEVICE_TO_HOST, stream.ptr)
        stream.synchronize()
    return found


def last_read(x: Any, look: Callable[[], None] = lambda: None) -> None:
    """Return when the current stream is done with x, which may be freed then, in the order of any other stream.

    ``look`` is called meanwhile, and may raise.
    """
    if on_gpu(x):
        finish(current_stream(), look)


def describe(x: Any) -> str:
    """What an argument is, for the text of an error."""
    if not is_array(x):
        return f"{type(x).__name__}: {x!r:.60}"
    flaws = ", not contiguous" * (not x.flags.c_contiguous) + ", read-only" * (not writable(x))
    gpu = f" on GPU {place(x)}" if on_gpu(x) else ""
    return f"an array {x.shape} {x.dtype if x.dtype.isnative else x.dtype.str}{gpu}{flaws}"


class _Pinned:
    """A piece of host memory that the GPU reads and writes itself, and the event behind its last use."""

    def __init__(self, nbytes: int):
        self.memory = _cupy().cuda.alloc_pinned_memory(max(1, nbytes))
        self.bytes = np.frombuffer(self.memory, np.uint8, max(1, nbytes))
        self.event = _cupy().cuda.Event(disable_timing=True)


class _Pool:
    """Pinned memory that nobody uses; a piece is taken again when the GPU is done with it, and never freed.

    cupy's own pool would hand a piece out again while a copy to it is still on its way.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[_Pinned]] = {}  # by GPU, whose events they have
        self._lock = threading.RLock()  # a collection may give a piece back in the middle of taking one

    def take(self, nbytes: int) -> _Pinned:
        """A piece of at least so many bytes."""
        with self._lock:
            idle = self._idle.setdefault(current_gpu(), [])
            found = next((p for p in idle if p.bytes.size >= nbytes and p.event.done), None)
            if found:
                idle.remove(found)
        return found or _Pinned(1 << max(0, nbytes - 1).bit_length())

    def give(self, piece: _Pinned, gpu: int) -> None:
        """Others may have it when what was enqueued is done."""
        with self._lock:
            self._idle[gpu].append(piece)


_pool = _Pool()


def _upload(to: Any, source: np.ndarray) -> None:
    """Enqueue a copy from the host; ``source`` may change as soon as this returns."""
    stream, raw = current_stream(), source.reshape(-1).view(np.uint8)
    if stream.is_capturing():
        raise RuntimeError(f"a captured step cannot upload {describe(source)}: its arrays must stay the same ones")
    runtime = _cupy().cuda.runtime
    if raw.size > PINNED:
        runtime.memcpyAsync(to.data.ptr, raw.ctypes.data, raw.size, HOST_TO_DEVICE, stream.ptr)
        stream.synchronize()
    elif raw.size:
        piece = _pool.take(raw.size)
        piece.bytes[: raw.size] = raw
        runtime.memcpyAsync(to.data.ptr, piece.bytes.ctypes.data, raw.size, HOST_TO_DEVICE, stream.ptr)
        piece.event.record(stream)
        _pool.give(piece, current_gpu())


class Mirror:
    """A small host array, and its copy on a GPU, which follows when a kernel asks for it and the array has changed.

    ``lasting``: it outlives the context in which it is asked for first (``owned_by``).
    """

    def __init__(self, host: np.ndarray, lasting: bool = False):
        self.host, self._lasting = host, lasting
        self._raw = host.reshape(-1).view(np.uint8)
        self._sent = np.empty(0, np.uint8)
        self._copy: Any = None

    @property
    def size(self) -> int:
        """Elements."""
        return self.host.size

    def address(self, gpu: int | None) -> int:
        """Where the numbers are, on the host or on the current GPU."""
        if gpu is None:
            return int(self.host.ctypes.data)
        if not np.array_equal(self._raw, self._sent):
            if self._copy is None:
                self._copy = (_lasting if self._lasting else _cupy().empty)(self._raw.size, np.uint8)
            copy(self._copy, self._raw)
            self._sent = self._raw.copy()
        return address(self._copy)


class Readback:
    """A few int64 numbers on their way from a GPU to the host, which looks at them later."""

    def __init__(self, n: int):
        self._pinned, self._n = _pool.take(8 * n), n
        weakref.finalize(self, _pool.give, self._pinned, current_gpu()).atexit = False
        self.pending = False

    def fetch(self, x: Any) -> None:
        """Enqueue a copy of x, which has ``n`` elements."""
        stream, to = current_stream(), self._pinned.bytes.ctypes.data
        _cupy().cuda.runtime.memcpyAsync(to, x.data.ptr, x.nbytes, DEVICE_TO_HOST, stream.ptr)
        if not stream.is_capturing():  # a captured copy is not on its way
            self.expect()

    def expect(self) -> None:
        """A copy was enqueued."""
        self._pinned.event.record(current_stream())
        self.pending = True

    def result(self, look: Callable[[], None] = lambda: None) -> np.ndarray:
        """What was fetched, when it is there; ``look`` is called meanwhile, and may raise."""
        _wait(self._pinned.event, look)
        self.pending = False
        return self._pinned.bytes[: 8 * self._n].view(np.int64).copy()


# ----------------------------------------------------------------------------------------------------- GPUs


def has_cupy() -> bool:
    """Is it installed?  Does not import it."""
    return "cupy" in sys.modules or importlib.util.find_spec("cupy") is not None


def gpu_state() -> str:
    """'ok', or in one line why this process cannot use a GPU and what would help; imports cupy if it is installed."""
    if not has_cupy():
        return NO_CUPY
    try:
        count = gpu_count()
    except ImportError as error:
        return f"cupy is broken: {error}"
    except Exception as error:  # cupy's own CUDARuntimeError; its class lives in the module that may have failed
        name = str(error).partition(":")[0]
        return f"no CUDA driver ({name}): it takes a machine with an NVIDIA GPU and its driver"
    return "ok" if count else "the CUDA driver sees no device: check CUDA_VISIBLE_DEVICES"


def gpu_count() -> int:
    """GPUs that this process sees."""
    return int(_cupy().cuda.runtime.getDeviceCount())


def use_gpu(number: int) -> None:
    """Let this thread's arrays and kernels live on a GPU."""
    _cupy().cuda.Device(number).use()


def bus_id(number: int) -> str:
    """What tells a GPU apart from all others of this host."""
    return str(_cupy().cuda.runtime.deviceGetPCIBusId(number))


@functools.cache
def multiprocessors(number: int) -> int:
    """How many of them a GPU has."""
    return int(_cupy().cuda.runtime.deviceGetAttribute(MULTIPROCESSORS, number))


def current_gpu() -> int:
    """The GPU of this thread."""
    return int(_cupy().cuda.runtime.getDevice())


def gpu_name(number: int) -> str:
    """What a GPU is called."""
    return str(_cupy().cuda.runtime.getDeviceProperties(number)["name"].decode())


def driver_version() -> int:
    """The newest CUDA that the driver knows, as 13000 for 13.0; 0 without a driver."""
    return int(_cupy().cuda.runtime.driverGetVersion())


def nvrtc_version() -> tuple[int, int]:
    """The version of the compiler for GPUs.  Raises what cupy raises if there is none."""
    major, minor = _cupy().cuda.nvrtc.getVersion()
    return int(major), int(minor)


# ----------------------------------------------------------------------------------------------------- streams


def current_stream() -> Any:
    """The stream in which this thread enqueues: cupy's, so that ``with stream:`` chooses it."""
    return _cupy().cuda.get_current_stream()


def new_stream() -> Any:
    """A stream that waits for no other one of itself."""
    return _cupy().cuda.Stream(non_blocking=True)


class Order:
    """An event, to order streams with; the host waits for none."""

    def __init__(self) -> None:
        self._event = _cupy().cuda.Event(disable_timing=True)
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
    event = _cupy().cuda.Event(disable_timing=True)
    event.record(stream)
    _wait(event, look)


def _wait(event: Any, look: Callable[[], None]) -> None:
    """Raises cupy's CUDARuntimeError if the GPU has failed: ``event.done`` would just never be true."""
    started, runtime = time.monotonic(), _cupy().cuda.runtime
    while status := runtime.eventQuery(event.ptr):
        if status != NOT_READY:
            raise runtime.CUDARuntimeError(status)
        look()
        if time.monotonic() - started > 1e-3:
            time.sleep(1e-4)


class Graph:
    """What was enqueued in a context, to be enqueued again as a whole (a CUDA graph).

    In the context nothing may be allocated, uploaded or waited for, and the current stream must not be the null one.
    """

    def __init__(self) -> None:
        self._graph: Any = None
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


# ----------------------------------------------------------------------------------------------------- kernels


def compile_text(name: str, text: str, headers: Mapping[str, str], options: Sequence[str]) -> Any:
    """Compile CUDA C++ for the current GPU and load it; cupy's Module.

    cupy's own RawModule would add --ftz=true, with which a GPU rounds otherwise than a host.  For a GPU that is newer
    than this NVRTC the driver translates PTX.  Raises RuntimeError with the compiler's log.
    """
    cupy = _cupy()
    nvrtc, own = cupy.cuda.nvrtc, int(cupy.cuda.Device().compute_capability)
    known = [a for a in nvrtc.getSupportedArchs() if a <= own]
    if not known:
        raise RuntimeError(f"NVRTC {nvrtc.getVersion()} does not compile for this GPU's compute capability {own}")
    architecture = f"sm_{own}" if own in known else f"compute_{max(known)}"
    names, bodies = zip(*((h.encode(), body.encode()) for h, body in headers.items()), strict=True)
    program = nvrtc.createProgram(text, name, bodies, names)
    try:
        nvrtc.compileProgram(program, (*options, f"--gpu-architecture={architecture}"))
        binary = nvrtc.getCUBIN(program) if own in known else nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{name} does not compile for {architecture}:\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    module = cupy.cuda.function.Module()
    module.load(binary)
    return module


def launch(function: Any, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
    """Enqueue a kernel of a module; the arguments are ctypes objects, structures by value among them."""
    if not hasattr(_thread, "has_context"):
        _cupy().cuda.Device().use()  # the driver, unlike the runtime, does not make one current by itself
        _thread.has_context = True
    values = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    stream, shape = current_stream().ptr, (blocks, 1, 1, threads, 1, 1)
    _cupy().cuda.driver.launchKernel(function.ptr, *shape, 0, stream, ctypes.addressof(values), 0)
