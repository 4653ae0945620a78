"""A GPU in host memory: what distopt/device uses of cupy's runtime, without a driver.

Arrays are real cupy arrays, whose memory is the host's.  What is enqueued is done when the host waits, or looks at an
event: of several streams that could go on, ``order`` chooses the next one, so that a test can let each of them lag as
far behind as events allow.  Where an event is missing, some order gives other bits, or reads memory that is not
written yet (fresh memory is poisoned).  As in cupy's pool, freed memory is that of the next array of its size that is
made in the stream that was current when it was allocated, whatever other streams, or graphs, still do with it; it is
poisoned when that stream comes to the point where it was freed.  ``told`` says what GPUs did last, in their order, and
what memory they poisoned: a test that fails prints it.

A captured graph has only the edges that streams and events gave it: the nodes of a replay are done in any order that
these allow, another one each time.

A rank of ``run_ranks`` is a process here: with all threads that it starts it has GPUs, streams and pinned memory of its
own (``Process``).  Streams and events belong to one GPU, and are refused on another one as CUDA refuses them.  ``log``
has what was enqueued, by stream.  Where one GPU waits for others, they go on although their hosts do something else.
"""

import contextlib
import ctypes
import itertools
import pathlib
import random
import sys
import tempfile
import threading
import time
import types
import weakref
from collections import deque
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cupy
import numpy as np

from distopt import kernels
from distopt.comm.threads import current_rank
from distopt.device import pinned
from distopt.kernels import cubins
from doubles import shim

POISON = 0xC3
TOLD = 2000  # operations of each GPU that are told
GREATEST_PRIORITY = -5  # of a stream


class Op(NamedTuple):
    name: str
    stream: int
    details: tuple
    action: object  # a function
    ready: object = lambda: True  # a function: may it be done now?
    outside: bool = False  # does it wait for other GPUs?


class Machine:
    """One GPU of a process: its streams, and what the host did."""

    def __init__(self, number):
        self.number = number
        self.queues: dict[int, deque[Op]] = {}  # by stream; the nodes of a replay have one each, below 0
        self.log: list[Op] = []
        self.did: deque[tuple] = deque(maxlen=TOLD)  # stream, name and details of what was done last
        did.append((number, self.did))
        self.host: list[str] = []  # allocations and waits
        self.captures: dict[int, Capture] = {}  # by stream: the capture that it has joined
        self.order = None  # a function of the numbers of streams that could go on; None does everything at once
        self.random = random.Random(number)  # chooses where there is no order
        self.pool = MemoryPool()
        self.memory = 1 << 40  # bytes beyond which one allocation fails
        self.done = 0  # operations
        self.patience = 40_000  # looks of a host that waits, in a row, at which no GPU does anything: some seconds
        self.lock = threading.RLock()  # other threads let this GPU go on
        self.busy = False
        self.broken = None  # what went wrong meanwhile
        machines.add(self)

    def enqueue(self, name, action, stream=None, details=(), **conditions):
        stream = current()[-1].ptr if stream is None else stream
        op = Op(name, stream, details, action, **conditions)
        if stream in self.captures:
            self.captures[stream].add(op)
        else:
            self.push(op)

    def push(self, op, log=True):
        with self.lock:
            if log:
                self.log.append(op)
            self.queues.setdefault(op.stream, deque()).append(op)
            while self.order is None and self.advance():
                pass

    def note(self, what, forbidding=()):
        """The host waits, or allocates pinned memory; captures that forbid it are broken by it."""
        for capture in forbidding:
            capture.valid = False
        if forbidding:
            refuse(UNSUPPORTED)
        self.host.append(what)

    def advance(self):
        """Do one thing; False if there is nothing to do, or other GPUs must do something first."""
        with self.lock:
            if self.busy:  # a collection in the middle of an operation frees memory, which is enqueued like all else
                return False
            self.busy = True
            try:
                return self.do_one()
            finally:
                self.busy = False

    def do_one(self):
        heads = [queue[0] for queue in self.queues.copy().values() if queue]
        able = [op.stream for op in heads if op.ready()]
        if not able:
            assert not heads or any(op.outside for op in heads), "every stream waits for another one"
            return False
        chosen = self.random.choice(able) if self.order is None else self.order(able)
        try:
            op = self.queues[chosen].popleft()
            if chosen < 0:
                del self.queues[chosen]
            self.done += 1
            self.did.append((op.stream, op.name, op.details))
            op.action()
        except BaseException as error:
            self.broken = error
            raise
        return True

    def look(self, until):
        """What a host does that wants something to be done: True at once, or after one step more."""
        if self.broken:
            raise self.broken
        with self.lock:  # what another thread does for this GPU is done when it has been done
            if until():
                return True
            moved = self.advance()
        if not moved:
            for other in list(machines):
                if other is not self:
                    other.go_on()
            time.sleep(1e-5)
        with self.lock:
            return bool(until())

    def go_on(self):
        """Do one thing if that is possible; errors wait for this GPU's own host."""
        with contextlib.suppress(BaseException):
            self.advance()

    def wait(self, until):
        """A host that waits.

        What it has patience for is looks, and no seconds: where other work leaves this process no core, or a rank that
        is at work leaves this one no turn, there are no looks either.  A rank that is another process may have no core
        while this one has: after a tenth of the looks they become rare, 36 seconds for the rest.
        """
        idle = done = 0
        while not self.look(until):
            before, done = done, sum(m.done for m in list(machines))
            idle = idle + 1 if done == before else 0
            if idle > self.patience // 10 and any(queue[0].outside for queue in self.queues.copy().values() if queue):
                time.sleep(1e-3)
            assert idle < self.patience, f"a GPU waits for another one for ever: {self.heads()}"

    def heads(self):
        """What each stream has to do next."""
        return {stream: queue[0].name for stream, queue in self.queues.copy().items() if queue}

    def finish(self, stream=None):
        """Go on until a stream, or all of them, have nothing left to do."""
        self.wait(lambda: not (any(self.queues.copy().values()) if stream is None else self.queues.get(stream)))


machines: weakref.WeakSet[Machine] = weakref.WeakSet()  # of all ranks that are threads here
did: list[tuple[int, deque]] = []  # of each GPU since ``install``, its number and what it did


def told():
    """What each GPU did last, a line for each: the stream, the name, shapes, numbers and addresses."""
    lines = []
    for number, done in did:
        lines.append(f"GPU {number}, the last {len(done)} operations in their order, after their streams:")
        lines += [f"  {stream:4} {name} {' '.join(map(shown, details))}" for stream, name, details in list(done)]
    return "\n".join(lines)


def shown(detail):
    if isinstance(detail, bytes):  # an argument of a kernel
        detail = int.from_bytes(detail, "little")
    return hex(detail) if isinstance(detail, int) and detail > 1 << 20 else str(detail)


def abandon():
    """Leave undone what nobody has waited for: it would go on, driven by others, with memory that is gone by then."""
    for m in list(machines):
        with m.lock:
            m.queues.clear()


# ----------------------------------------------------------------------------------------------------- processes


class Process:
    """A rank: its GPUs, which its threads share."""

    def __init__(self):
        self.gpus, self.lock = {}, threading.Lock()

    def gpu(self, number):
        if number not in self.gpus:
            with self.lock:
                self.gpus.setdefault(number, Machine(number))
        return self.gpus[number]


class Local(threading.local):
    """What CUDA and cupy keep for each thread."""

    def __init__(self):
        self.process = None  # that of the thread, once it is asked for
        self.number, self.chosen = 0, False  # the current GPU, and whether this thread has made it that
        self.streams: dict[int, list[Stream]] = {}  # the current one of each GPU, above those to come back to
        self.torchs = {}  # torch's current stream of each GPU


_local = Local()


def process() -> Process:
    """This rank's, which the threads that it starts inherit."""
    if _local.process is None:
        starter = getattr(threading.current_thread(), "starter", None)
        _local.process = Process() if starter is None or current_rank() else starter
    return _local.process


def machine() -> Machine:
    """This thread's current GPU; one that distopt has started must have chosen it."""
    here = process()
    helper = not _local.chosen and getattr(threading.current_thread(), "helper", False) and not current_rank()
    assert not helper, f"the thread {threading.current_thread().name} is on GPU 0 by chance; see device.in_thread"
    return here.gpu(_local.number)


def current():
    """This thread's streams on its current GPU, the current one last."""
    return _local.streams.setdefault(_local.number, [Stream.null])


def current_stream(number=-1):
    """cupy.cuda.get_current_stream."""
    return _local.streams.setdefault(_local.number if number < 0 else number, [Stream.null])[-1]


def inheriting(start):
    """threading.Thread.start, which tells the new thread what process it belongs to."""

    def begin(thread):
        thread.starter = process()
        thread.helper = sys._getframe(1).f_globals["__name__"].startswith("distopt.")
        start(thread)

    return begin


class EachRank:
    """What distopt has one of in a process: one for each rank, although these are threads."""

    def __init__(self, make):
        self._make, self._made = make, weakref.WeakKeyDictionary()

    @property
    def own(self):
        """That of this thread's rank."""
        return self._made.get(process()) or self._made.setdefault(process(), self._make())

    def __getattr__(self, name):
        return getattr(self.own, name)

    def __getitem__(self, key):
        return self.own[key]

    def __contains__(self, x):
        return x in self.own


# ----------------------------------------------------------------------------------------------------- memory


class MemoryPool:
    """cupy.cuda.MemoryPool, of poisoned host memory."""

    def __init__(self):
        self.idle: dict[tuple[int, int], list] = {}  # by stream and bytes

    def malloc(self, nbytes):
        m = machine()
        m.host.append("allocate")
        if nbytes > m.memory:
            raise cupy.cuda.memory.OutOfMemoryError(nbytes, 0)
        if not nbytes:
            return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 0, None, m.number), 0)
        key = current()[-1].ptr, -(-nbytes // 512) * 512
        with m.lock:
            idle = self.idle.get(key)
            raw = idle.pop() if idle else np.full(key[1] + 512, POISON, np.uint8)
        start, block = raw.ctypes.data + -raw.ctypes.data % 512, Block()
        owner = next(owners)
        allocations[owner] = start, nbytes
        weakref.finalize(block, self.free, m, key, raw, owner).atexit = False
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(start, nbytes, block, m.number), 0)

    def free(self, gpu, key, raw, owner):
        """At once for the host, as cupy's; the stream poisons it when it comes to it, unless somebody has it again.

        A collection of garbage may free it when another stream has waited for this one already, and may use it.  In
        any thread, and in one step: what its next owner enqueues comes after.
        """
        idle, place = self.idle.setdefault(key, []), allocations[owner]

        def release():
            del allocations[owner]
            if any(x is raw for x in idle):
                raw.fill(POISON)
                gpu.did.append((key[0], "poison", place))

        with gpu.lock:
            idle.append(raw)
            gpu.push(Op("free", key[0], place, release), log=False)


class Block:
    """Somebody's piece of memory."""


owners = itertools.count(1)
allocations: dict[int, tuple[int, int]] = {}  # address and bytes by owner, of all GPUs of this process


# ----------------------------------------------------------------------------------------------------- order


def lagging(*streams):
    """An order in which what is named here comes last, the last one named after all."""
    return lambda able: min(able, key=lambda s: streams.index(s) if s in streams else -1)


def shuffled(seed):
    """Any order."""
    return random.Random(seed).choice


@contextlib.contextmanager
def lazily(order):
    """Nothing is done before the host waits for it."""
    machine().order = order
    try:
        yield machine()
    finally:
        machine().finish()
        machine().order = None


# ----------------------------------------------------------------------------------------------------- streams

INVALID = 400  # cudaErrorInvalidResourceHandle; the others are cudaErrorStreamCapture... and cudaErrorCapturedEvent
UNSUPPORTED, INVALIDATED, MERGE, UNJOINED, ISOLATION, IMPLICIT, CAPTURED = 900, 901, 902, 904, 905, 906, 907


def refuse(status):
    raise cupy.cuda.runtime.CUDARuntimeError(status)


class Stream:
    """cupy.cuda.Stream."""

    known: ClassVar = weakref.WeakValueDictionary()
    _numbers = itertools.count(3)  # the null stream has three names

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        self.ptr = 0 if null else next(self._numbers)
        self.priority = max(GREATEST_PRIORITY, min(0, priority or 0))
        self._machine = None if null else machine()
        self.known[self.ptr] = self

    @classmethod
    def from_external(cls, other):
        version, pointer = other.__cuda_stream__()
        assert version == 0
        return cls.known[pointer]

    @property
    def machine(self):
        """Of the null stream the current one."""
        return self._machine or machine()

    def _check_device(self):
        if self.machine is not machine():
            raise RuntimeError(
                f"The device that the stream is created on ({self.machine.number}) does not match with the current "
                f"device ({_local.number})"
            )

    def __enter__(self):
        self._check_device()
        current().append(self)
        return self

    def __exit__(self, *error):
        _local.streams[self.machine.number].pop()

    def use(self):
        self._check_device()
        current()[-1] = self
        return self

    def wait_event(self, event):
        record, captures = event.last, self.machine.captures
        if event.captured:
            capture, nodes = event.captured
            if capture not in captures.values():
                refuse(CAPTURED)
            if not self.ptr:
                refuse(IMPLICIT)
            if captures.setdefault(self.ptr, capture) is not capture:
                refuse(MERGE)
            capture.join(self.ptr, nodes)
            return
        if self.ptr in captures:
            refuse(ISOLATION)
        self.machine.enqueue("wait", lambda: None, self.ptr, (id(event),), ready=lambda: record.reached)

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        m = self.machine
        m.note("synchronize", [c for stream, c in m.captures.items() if stream == self.ptr])
        m.finish(self.ptr)

    @property
    def done(self):
        return self.machine.look(lambda: not self.machine.queues.get(self.ptr))

    def begin_capture(self, mode=None):
        if not self.ptr:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        self.machine.captures[self.ptr] = Capture(self.ptr)

    def end_capture(self):
        m, capture = self.machine, self.machine.captures[self.ptr]
        m.captures = {s: c for s, c in m.captures.items() if c is not capture}
        if not capture.valid:
            refuse(INVALIDATED)
        if capture.unjoined(self.ptr):
            refuse(UNJOINED)
        return Graph(capture)

    def is_capturing(self):
        return self.ptr in self.machine.captures


Stream.null = Stream(null=True)


def gpu_of_stream(pointer):
    return Stream.known[pointer].machine if pointer else machine()


def check_launch(pointer):
    """Kernels are launched in a stream of the current GPU; copies in one of any."""
    if gpu_of_stream(pointer) is not machine():
        refuse(INVALID)
    return machine()


@dataclass
class Record:
    """One of an event: whoever waits waits for the last one before, whichever stream it and later ones are in."""

    reached: bool


class Event:
    """cupy.cuda.Event; each look at it lets the GPU do one thing."""

    known: ClassVar = weakref.WeakValueDictionary()

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.ptr = id(self)
        self.known[self.ptr] = self
        self.last = Record(reached=True)
        self.captured = None  # the capture in which it was recorded, and the nodes that its stream had last
        self.machine = machine()

    def record(self, stream=None):
        stream, m = stream or current()[-1], self.machine
        if stream.machine is not m:
            refuse(INVALID)
        capture = m.captures.get(stream.ptr)
        self.captured = capture and (capture, capture.last[stream.ptr])
        if capture:
            return
        self.last = record = Record(reached=False)

        def reach():
            record.reached = True

        m.enqueue("record", reach, stream.ptr, (id(self),))

    def _check_uncaptured(self):
        if self.captured:
            refuse(CAPTURED)

    @property
    def done(self):
        self._check_uncaptured()
        return self.machine.look(lambda: self.last.reached)

    def synchronize(self):
        self._check_uncaptured()
        self.machine.note("wait for an event")
        self.machine.wait(lambda: self.last.reached)


# ----------------------------------------------------------------------------------------------------- graphs


class Capture:
    """What streams enqueue while they are captured: nodes, each after those that its stream had to wait for."""

    def __init__(self, origin):
        self.nodes: list[tuple[Op, frozenset[int]]] = []  # and the numbers of those before it
        self.last: dict[int, frozenset[int]] = {origin: frozenset()}  # by stream: what its next node is behind
        self.valid = True

    def add(self, op):
        self.nodes.append((op, self.last[op.stream]))
        self.last[op.stream] = frozenset([len(self.nodes) - 1])

    def join(self, stream, nodes):
        self.last[stream] = self.last.get(stream, frozenset()) | nodes

    def unjoined(self, origin):
        """The nodes that the captured stream does not wait for."""
        seen, ahead = set(), set(self.last[origin])
        while ahead:
            node = ahead.pop()
            seen.add(node)
            ahead |= self.nodes[node][1] - seen
        return set(range(len(self.nodes))) - seen


class Graph:
    """cupy.cuda.Graph: a replay does its nodes in any order that its edges allow."""

    def __init__(self, capture):
        self.nodes = capture.nodes
        self.behind = [[k for k, (_, before) in enumerate(self.nodes) if n in before] for n in range(len(self.nodes))]

    def launch(self, stream=None):
        stream = stream or current()[-1]
        Replay(self, stream.machine, stream.ptr)


class Replay:
    """A launch of a graph: after what its stream has so far, and before what comes."""

    _numbers = itertools.count(-1, -1)  # of the nodes' queues

    def __init__(self, graph, gpu, stream):
        self.graph, self.gpu, self.left = graph, gpu, len(graph.nodes)
        self.missing = [len(before) for _, before in graph.nodes]
        with gpu.lock:
            gpu.log += [op._replace(stream=stream) for op, _ in graph.nodes]
        gpu.push(Op("a replay begins", stream, (), self.begin), log=False)
        gpu.push(Op("a replay ends", stream, (), lambda: None, lambda: not self.left), log=False)

    def begin(self):
        for node, missing in enumerate(self.missing):
            if not missing:
                self.release(node)

    def release(self, node):
        op, _ = self.graph.nodes[node]

        def run():
            op.action()
            self.left -= 1
            for following in self.graph.behind[node]:
                self.missing[following] -= 1
                if not self.missing[following]:
                    self.release(following)

        self.gpu.push(op._replace(stream=next(self._numbers), action=run), log=False)


# ----------------------------------------------------------------------------------------------------- the runtime


class Pinned:
    """What cupy.cuda.alloc_pinned_memory returns."""

    def __new__(cls, nbytes):
        m = machine()
        m.note("allocate pinned memory", m.captures.values())
        return np.full(nbytes, POISON, np.uint8)


class Device:
    """cupy.cuda.Device."""

    compute_capability = "90"

    def __init__(self, number=None):
        self.id = _local.number if number is None else number

    def use(self):
        _local.number, _local.chosen = self.id, True


def allocate(nbytes):
    """For cupy.cuda.set_allocator: of this GPU's own pool."""
    return machine().pool.malloc(nbytes)


def allocated(pointer, nbytes):
    """Does a piece of memory lie in something that was allocated and is still in use?"""
    return any(start <= pointer and pointer + nbytes <= start + n for start, n in allocations.copy().values())


def event_query(pointer):
    return 0 if Event.known[pointer].done else 600


def memset(pointer, value, nbytes, stream):
    m = gpu_of_stream(stream)
    m.enqueue("memset", lambda: ctypes.memset(pointer, value, nbytes), stream, (pointer, value, nbytes))


def memcpy(to, source, nbytes, kind, stream):
    m = gpu_of_stream(stream)
    m.enqueue("memcpy", lambda: ctypes.memmove(to, source, nbytes), stream, (to, source, nbytes, kind))


class RawModule:
    """cupy.RawModule of a file: takes machine code, and finds its kernels in the shim's library."""

    def __init__(self, *, path):
        with open(path, "rb") as file:
            assert file.read().startswith(b"kernels of ")

    def get_function(self, name):
        return RawKernel(name)


class RawKernel:
    """cupy.RawKernel; arguments are packed as cupy does it, and copied at the call, as the driver does."""

    def __init__(self, name):
        self.name, self.kernel = name, types.SimpleNamespace(ptr=len(name))
        self.launch = getattr(shim.library(name.rsplit("_", 1)[1]), f"launch_{name}")
        self.launch.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        self.sizes = argument_sizes(name.rsplit("_", 1)[0])

    def __call__(self, grid, block, args, shared_mem=0):
        shape = (*grid, 1, 1)[:3] + (*block, 1, 1)[:3]
        assert all(isinstance(a, np.ndarray) and a.size == 1 for a in args), "what cupy passes by value"
        assert [a.nbytes for a in args] == self.sizes, self.name
        held = [cupy.cuda.function.CNumpyArray(a.copy()) for a in args]
        addresses = (ctypes.c_void_p * len(held))(*(argument.ptr for argument in held))
        dims = (ctypes.c_uint * 6)(*shape)

        def run(keep=held):
            with _shim:
                self.launch(dims, shared_mem, addresses)

        stream = current()[-1].ptr
        check_launch(stream).enqueue(self.name, run, stream, (shape, *(a.tobytes() for a in args)))


def argument_sizes(kernel):
    """The bytes of each argument that a kernel of this name is launched with."""
    scalars, declared = kernels.dispatch.SCALARS, kernels.KERNELS[kernel].declared
    return [8 if p.is_array else ctypes.sizeof(scalars[p.kind]) for p in declared]


_folder = tempfile.TemporaryDirectory(prefix="distopt-doubles-")  # what is compiled here is nothing for a real GPU
_shim = threading.Lock()  # which runs one kernel at a time


def occupancy(function, threads, shared):
    """cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor; kernels differ, so that grids do."""
    return 1 + function % 4


class Nvrtc:
    """cupy.cuda.nvrtc; the real one is at work in test_nvrtc.py."""

    class NVRTCError(RuntimeError):
        pass

    def getVersion(self):
        return 13, 0

    def getSupportedArchs(self):
        return 75, 80, 90

    def createProgram(self, text, name, headers, names):
        assert all(isinstance(h, bytes) for h in (*headers, *names))
        return name

    def compileProgram(self, program, options):
        assert {"--fmad=false", "--ftz=false", "--gpu-architecture=sm_90"} <= set(options)

    def getCUBIN(self, program):
        return f"kernels of {program}".encode()

    def destroyProgram(self, program):
        pass


GPUS = 4  # per host


def properties(number):
    """cupy.cuda.runtime.getDeviceProperties."""
    place = {"pciDomainID": 0, "pciBusID": number, "pciDeviceID": 0}
    return {"name": b"a double", "uuid": bytes([number] * 16), "computeMode": 0, **place}


def install(patch=setattr):
    """Let cupy be this from now on, in this process; with a monkeypatch's ``setattr`` until that is undone."""
    cuda, runtime = cupy.cuda, cupy.cuda.runtime
    abandon()
    did.clear()
    _local.__init__()  # this thread begins anew
    cuda.set_allocator(allocate)
    for owner, doubles in (
        (cuda, {"Stream": Stream, "Event": Event, "Device": Device, "nvrtc": Nvrtc(), "alloc_pinned_memory": Pinned}),
        (cuda, {"get_current_stream": current_stream, "MemoryPool": MemoryPool}),
        (cupy, {"RawModule": RawModule}),
        (cubins, {"folder": lambda: pathlib.Path(_folder.name)}),
        (cuda.driver, {"occupancyMaxActiveBlocksPerMultiprocessor": occupancy}),
        (runtime, {"memsetAsync": memset, "memcpyAsync": memcpy, "eventQuery": event_query}),
        (runtime, {"getDeviceCount": lambda: GPUS, "getDevice": lambda: _local.number}),
        (runtime, {"deviceSynchronize": lambda: machine().finish(), "deviceCanAccessPeer": lambda a, b: 1}),
        (runtime, {"deviceGetAttribute": lambda attribute, number: 2}),  # multiprocessors
        (runtime, {"getDeviceProperties": properties, "driverGetVersion": lambda: 13000}),
    ):
        for name, double in doubles.items():
            patch(owner, name, double)
    patch(pinned, "pool", EachRank(pinned.Pool))
    patch(threading.Thread, "start", inheriting(threading.Thread.start))


def numpy_view(x):
    """The memory of a cupy array of the double, as it is now."""
    raw = (ctypes.c_char * x.nbytes).from_address(x.data.ptr) if x.nbytes else bytearray()
    return np.frombuffer(raw, x.dtype).reshape(x.shape)


def array(values, dtype=None):
    """A cupy array with these values."""
    values = np.array(values, dtype, order="C")
    x = cupy.empty(values.shape, values.dtype)
    pointer = x.data.ptr
    machine().enqueue("array", lambda: ctypes.memmove(pointer, values.ctypes.data, values.nbytes))
    return x
