"""A GPU in host memory: what distopt/device uses of cupy's runtime, without a driver.

Arrays are real cupy arrays, whose memory is the host's.  What is enqueued is done when the host waits, or looks at an
event: of several streams that could go on, ``order`` chooses the next one, so that a test can let each of them lag as
far behind as events allow.  Where an event is missing, some order gives other bits, or reads memory that is not
written yet (fresh memory is poisoned).  As in cupy's pool, freed memory is that of the next array of its size that is
made in the stream that was current when it was allocated, whatever other streams, or graphs, still do with it; it is
poisoned when that stream comes to the point where it was freed.

Each thread has a GPU of its own, so that threads can be ranks; streams and events belong to the GPU of the thread that
made them, whichever thread uses them.  ``log`` has what was enqueued, by stream.  Where one GPU waits for others, they
go on although their hosts do something else.
"""

import contextlib
import ctypes
import itertools
import pathlib
import random
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
from distopt.device import cubins, pinned
from doubles import shim

POISON = 0xC3
GREATEST_PRIORITY = -5  # of a stream


class Op(NamedTuple):
    name: str
    stream: int
    details: tuple
    action: object  # a function
    ready: object  # a function: may it be done now?
    outside: bool = False  # does it wait for other GPUs?


class Machine:
    """One GPU: its streams, and what the host did."""

    def __init__(self):
        self.queues: dict[int, deque[Op]] = {}
        self.log: list[Op] = []
        self.host: list[str] = []  # allocations and waits
        self.capture: dict[int, list[Op]] = {}  # by stream: the ops of the capture that it has joined
        self.order = None  # a function of the numbers of streams that could go on; None does everything at once
        self.behind: dict[int, bool] = {}  # streams whose captured work nobody has waited for
        self.current: list[Stream] = [Stream.null]
        self.pool = MemoryPool()
        self.memory = 1 << 40  # bytes beyond which one allocation fails
        self.patience = 4.0  # seconds to wait for other GPUs
        self.lock = threading.RLock()  # other threads let this GPU go on
        self.busy = False
        self.broken = None  # what went wrong meanwhile
        machines.add(self)

    def enqueue(self, name, action, stream=None, details=(), ready=lambda: True, outside=False):
        stream = self.current[-1].ptr if stream is None else stream
        op = Op(name, stream, details, action, ready, outside)
        if stream in self.capture:
            self.capture[stream].append(op)
            self.behind[stream] = True
        else:
            self.push(op)

    def push(self, op):
        with self.lock:
            if op.name != "free":
                self.log.append(op)
            self.queues.setdefault(op.stream, deque()).append(op)
            while self.order is None and self.advance():
                pass

    def forbid(self, what):
        """The host waits, or allocates on the host, which a capture forbids."""
        if self.capture:
            raise RuntimeError(f"{what} while a stream is being captured")
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
        chosen = able[0] if self.order is None else self.order(able)
        try:
            self.queues[chosen].popleft().action()
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
        """A host that waits."""
        started = time.monotonic()
        while not self.look(until):
            assert time.monotonic() - started < self.patience, "a GPU waits for another one for ever"

    def finish(self, stream=None):
        """Go on until a stream, or all of them, have nothing left to do."""
        self.wait(lambda: not (any(self.queues.copy().values()) if stream is None else self.queues.get(stream)))


machines: weakref.WeakSet[Machine] = weakref.WeakSet()  # of this process


def abandon():
    """Leave undone what nobody has waited for: it would go on, driven by others, with memory that is gone by then."""
    for m in list(machines):
        with m.lock:
            m.queues.clear()


class MemoryPool:
    """cupy.cuda.MemoryPool, of poisoned host memory."""

    def __init__(self):
        self.idle: dict[tuple[int, int], list] = {}  # by stream and bytes

    def malloc(self, nbytes):
        m = machine()
        m.host.append("allocate")
        if nbytes > m.memory:
            raise cupy.cuda.memory.OutOfMemoryError(nbytes, 0)
        key = m.current[-1].ptr, -(-nbytes // 512) * 512
        idle = self.idle.get(key)
        raw = idle.pop() if idle else np.full(key[1] + 512, POISON, np.uint8)
        start, block = raw.ctypes.data + -raw.ctypes.data % 512, Block()
        owner = next(owners)
        allocations[owner] = start, nbytes
        weakref.finalize(block, self.free, m, key, raw, owner).atexit = False
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(start, nbytes, block, _local.number), 0)

    def free(self, gpu, key, raw, owner):
        def release():
            del allocations[owner]
            raw.fill(POISON)

        gpu.push(Op("free", key[0], (), release, lambda: True))
        self.idle.setdefault(key, []).append(raw)


class Block:
    """Somebody's piece of memory."""


owners = itertools.count(1)
allocations: dict[int, tuple[int, int]] = {}  # address and bytes by owner, of all GPUs of this process


class Local(threading.local):
    def __init__(self):
        self.machine, self.number = Machine(), 0


def machine() -> Machine:
    """This thread's GPU."""
    return _local.machine


def lagging(*streams):
    """An order in which what is named here comes last, the last one named behind all."""
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


class Stream:
    """cupy.cuda.Stream."""

    _numbers = itertools.count(1)

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        self.ptr = 0 if null else next(self._numbers)
        self.priority = max(GREATEST_PRIORITY, min(0, priority or 0))
        self._machine = None if null else machine()

    @property
    def machine(self):
        """Of the null stream that of the thread."""
        return self._machine or machine()

    def __enter__(self):
        machine().current.append(self)
        return self

    def __exit__(self, *error):
        machine().current.pop()

    def use(self):
        machine().current[-1] = self
        return self

    def wait_event(self, event):
        record, m = event.last, self.machine
        if event.captured is not None and event.captured in m.capture.values():
            m.capture.setdefault(self.ptr, event.captured)  # joins the capture
            m.behind.pop(event.stream if event.stream != self.ptr else None, None)
            return
        assert self.ptr not in m.capture, "a captured stream waits for an event from outside"
        m.enqueue("wait", lambda: None, self.ptr, (id(event),), lambda: record.reached)

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        self.machine.forbid("synchronize")
        self.machine.finish(self.ptr)

    @property
    def done(self):
        return self.machine.look(lambda: not self.machine.queues.get(self.ptr))

    def begin_capture(self, mode=None):
        assert self.ptr, "the null stream cannot be captured"
        self.machine.capture[self.ptr] = []

    def end_capture(self):
        m = self.machine
        ops = m.capture[self.ptr]
        unjoined = [s for s, joined in m.capture.items() if joined is ops and s in m.behind and s != self.ptr]
        m.behind.clear()
        m.capture = {s: o for s, o in m.capture.items() if o is not ops}
        assert not unjoined, f"streams {unjoined} did not come back to the captured one"
        return Graph(ops)

    def is_capturing(self):
        return self.ptr in self.machine.capture


Stream.null = Stream(null=True)
_local = Local()


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
        self.captured = None  # the capture in which it was recorded
        self.stream, self.machine = 0, machine()

    def record(self, stream=None):
        stream = stream or machine().current[-1]
        self.machine = m = stream.machine
        self.captured, self.stream = m.capture.get(stream.ptr), stream.ptr
        if self.captured is not None:
            return
        self.last = record = Record(reached=False)

        def reach():
            record.reached = True

        m.enqueue("record", reach, stream.ptr, (id(self),))

    @property
    def done(self):
        assert self.captured is None, "a captured event cannot be looked at"
        return self.machine.look(lambda: self.last.reached)

    def synchronize(self):
        self.machine.forbid("wait for an event")
        self.machine.wait(lambda: self.last.reached)


class Graph:
    """cupy.cuda.Graph."""

    def __init__(self, ops):
        self.ops = ops

    def launch(self, stream=None):
        for op in self.ops:
            machine().push(op._replace(stream=stream.ptr if stream else machine().current[-1].ptr))


class Pinned:
    """What cupy.cuda.alloc_pinned_memory returns."""

    def __new__(cls, nbytes):
        machine().forbid("allocate pinned memory")
        return np.full(nbytes, POISON, np.uint8)


class Device:
    """cupy.cuda.Device."""

    compute_capability = "90"

    def __init__(self, number=None):
        self.id = _local.number if number is None else number

    def use(self):
        _local.number = self.id


def allocate(nbytes):
    """For cupy.cuda.set_allocator: of this GPU's own pool."""
    return machine().pool.malloc(nbytes)


def allocated(pointer, nbytes):
    """Does a piece of memory lie in something that was allocated and is still in use?"""
    return any(start <= pointer and pointer + nbytes <= start + n for start, n in allocations.copy().values())


def event_query(pointer):
    return 0 if Event.known[pointer].done else 600


def memset(pointer, value, nbytes, stream):
    machine().enqueue("memset", lambda: ctypes.memset(pointer, value, nbytes), stream, (pointer, value, nbytes))


def memcpy(to, source, nbytes, kind, stream):
    machine().enqueue("memcpy", lambda: ctypes.memmove(to, source, nbytes), stream, (to, source, nbytes, kind))


class RawModule:
    """cupy.RawModule of a file: takes machine code, and finds its kernels in the shim's library."""

    def __init__(self, *, path):
        with open(path, "rb") as file:
            assert file.read().startswith(b"kernels of ")

    def get_function(self, name):
        return RawKernel(name)


class RawKernel:
    """cupy.RawKernel; arguments are copied at the call, as the driver does."""

    def __init__(self, name):
        self.name, self.kernel = name, types.SimpleNamespace(ptr=len(name))
        self.launch = getattr(shim.library(name.rsplit("_", 1)[1]), f"launch_{name}")
        self.sizes = [argument_size(p) for p in kernels.KERNELS[name.rsplit("_", 1)[0]].declared]

    def __call__(self, grid, block, args, shared_mem=0):
        shape = (*grid, 1, 1)[:3] + (*block, 1, 1)[:3]
        assert all(isinstance(a, np.ndarray) and a.size == 1 for a in args), "what cupy passes by value"
        assert [a.nbytes for a in args] == self.sizes, self.name
        values = [ctypes.create_string_buffer(a.tobytes(), a.nbytes) for a in args]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        dims = (ctypes.c_uint * 6)(*shape)

        def run(keep=values):
            with _shim:
                self.launch(dims, ctypes.c_size_t(shared_mem), addresses)

        machine().enqueue(self.name, run, None, (shape, *(v.raw for v in values)))


def argument_size(parameter):
    return 8 if parameter.is_array else ctypes.sizeof(kernels.dispatch.SCALARS[parameter.kind])


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
    cuda.set_allocator(allocate)
    for owner, doubles in (
        (cuda, {"Stream": Stream, "Event": Event, "Device": Device, "nvrtc": Nvrtc(), "alloc_pinned_memory": Pinned}),
        (cuda, {"get_current_stream": lambda: machine().current[-1], "MemoryPool": MemoryPool}),
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
    pinned.pool = pinned.Pool()


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
