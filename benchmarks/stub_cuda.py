"""CUDA and NCCL that do nothing but count: what is left of a step on a GPU is the time of its host.

cupy's arrays are real, over memory of the host that nobody touches; launches, copies, events and NCCL's calls return at
once.  It needs cupy, and no GPU, driver or NCCL.
"""

import collections
import ctypes
import itertools
import types
from typing import ClassVar

import cupy
import numpy as np
from cupy.cuda import nccl

from distopt import device
from distopt.comm import NcclCommunicator
from distopt.comm.local import LocalControl
from distopt.device import pinned
from distopt.device.copies import DEVICE_TO_HOST
from distopt.kernels import cubins

PROPERTIES = {"name": b"a stub", "uuid": bytes(16), "pciDomainID": 0, "pciBusID": 0, "pciDeviceID": 0}
counts: collections.Counter[str] = collections.Counter()


def counted(name, result=None):
    """A function that returns ``result``, and is counted."""

    def call(*args, **kwargs):
        counts[name] += 1
        return result

    return call


class Stream:
    """cupy.cuda.Stream."""

    numbers = itertools.count(16)
    current: ClassVar[list] = []

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        self.ptr, self.capturing = 0 if null else next(self.numbers), False

    def __enter__(self):
        self.current.append(self)
        return self

    def __exit__(self, *error):
        self.current.pop()

    @classmethod
    def from_external(cls, other):
        return cls(null=True)

    def use(self):
        self.current[-1:] = [self]

    def record(self, event=None):
        counts["event operations"] += 1

    def wait_event(self, event):
        counts["event operations"] += 1

    def begin_capture(self):
        self.capturing = True

    def end_capture(self):
        self.capturing = False
        return Graph()

    def is_capturing(self):
        return self.capturing

    def synchronize(self):
        counts["waits"] += 1


class Graph:
    """cupy.cuda.Graph."""

    launch = staticmethod(counted("graphs"))


class Event:
    """cupy.cuda.Event, which has always been reached."""

    ptr, done = 0, True

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        pass

    def record(self, stream=None):
        counts["event operations"] += 1

    def synchronize(self):
        counts["waits"] += 1


class Device:
    """cupy.cuda.Device."""

    compute_capability = "90"

    def __init__(self, number=0):
        self.id = 0

    def use(self):
        pass


class RawModule:
    """cupy.RawModule, of a file that nobody reads; a real RawKernel takes 1 to 2 us more to pass its arguments on."""

    def __init__(self, path):
        pass

    def get_function(self, name):
        kernel = counted("kernels")
        kernel.kernel = types.SimpleNamespace(ptr=1)  # type: ignore[attr-defined]
        return kernel


class Nvrtc:
    """cupy.cuda.nvrtc, which compiles nothing."""

    class NVRTCError(RuntimeError):
        pass

    getVersion = staticmethod(lambda: (13, 0))
    getSupportedArchs = staticmethod(lambda: [90])
    createProgram = compileProgram = destroyProgram = staticmethod(lambda *args: None)
    getCUBIN = staticmethod(lambda program: b"")


class Nccl:
    """cupy.cuda.nccl's communicator."""

    def __init__(self, size, unique_id, rank):
        pass

    allReduce = allGather = broadcast = bcast = reduce = send = recv = staticmethod(counted("NCCL calls"))
    check_async_error = abort = destroy = staticmethod(lambda: None)


class Control(LocalControl):
    """The votes of a rank with whom all others agree."""

    def __init__(self, size):
        super().__init__()
        self.size, self.speakers = size, 1  # while a communicator is made, of which each rank has another GPU

    def gather_strings(self, text):
        """The text of every rank: all have the same."""
        return [text] * self.speakers


def memcpy(to, source, nbytes, kind, stream):
    """What comes from the GPU: one number is 0, since nothing was refused; several ascend, as places of entries do."""
    counts["copies"] += 1
    if kind == DEVICE_TO_HOST:
        (ctypes.c_int64 * (nbytes // 8)).from_address(to)[:] = range(0, nbytes, 8)


def allocate(nbytes):
    """Memory of the host, of which no page is touched."""
    raw = np.empty(nbytes + 512, np.uint8)
    start = raw.ctypes.data
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(start - start % -512, nbytes, raw, 0), 0)


def install():
    """Let cupy be this in this process."""
    cuda, runtime = cupy.cuda, cupy.cuda.runtime
    Stream.current.append(Stream(null=True))
    cuda.set_allocator(allocate)
    for owner, stubs in (
        (cuda, {"Stream": Stream, "Event": Event, "Device": Device, "nvrtc": Nvrtc()}),
        (cuda, {"alloc_pinned_memory": lambda nbytes: np.zeros(nbytes, np.uint8)}),
        (cuda, {"get_current_stream": lambda number=0: Stream.current[-1]}),
        (cupy, {"RawModule": RawModule}),
        (cubins, {"cached": lambda *args: ""}),
        (cuda.driver, {"occupancyMaxActiveBlocksPerMultiprocessor": lambda function, threads, shared: 4}),
        (runtime, {"memsetAsync": counted("memsets"), "memcpyAsync": memcpy, "eventQuery": lambda event: 0}),
        (runtime, {"getDeviceCount": lambda: 1, "getDevice": lambda: 0}),
        (runtime, {"deviceGetAttribute": lambda *a: 132, "getDeviceProperties": lambda number: PROPERTIES}),
        (nccl, {"NcclCommunicator": Nccl, "get_unique_id": lambda: (0,) * 128, "get_version": lambda: 22809}),
        (nccl, {"groupStart": counted("NCCL groups"), "groupEnd": lambda: None}),
    ):
        for name, stub in stubs.items():
            setattr(owner, name, stub)
    pinned.pool = pinned.Pool()


def install_torch():
    """Let torch have this GPU, with all its tensors."""
    import torch

    def dlpack(x, **options):
        raw = (ctypes.c_char * max(x.nbytes, 1)).from_address(x.data.ptr)
        raw.owner = x
        return np.frombuffer(raw, x.dtype, x.size).reshape(x.shape).__dlpack__()

    stream = types.SimpleNamespace(cuda_stream=0)
    for owner, stubs in (
        (torch.Tensor, {"is_cuda": property(lambda t: True), "get_device": lambda t: 0}),
        (torch.cuda, {"current_stream": lambda gpu=0: stream}),
        (cupy.ndarray, {"__dlpack__": dlpack, "__dlpack_device__": lambda x: (2, 0)}),
    ):
        for name, stub in stubs.items():
            setattr(owner, name, stub)


def communicator(size):
    """One of ``size`` ranks on GPUs, of which the others do the same."""
    comm = NcclCommunicator(Control(size), gpu=0)
    comm.control.speakers = size
    return comm


def array(shape, dtype=np.float32):
    """An array on the GPU that is none."""
    return device.array_module().empty(shape, dtype)
