"""torch.cuda on the GPUs of ``doubles.gpu``.

A rank's tensors are on the GPU that it has named first by ``torch.cuda.set_device``, and on the host if it names none:
``is_cuda`` and ``get_device`` say so, and ``device`` says the host, where torch has them.

torch computes at once: what ``IN_ORDER`` names when its current stream has come there, for which the host waits, and
all else whatever streams do; a script synchronizes before that.  ``late`` lets values come in their stream's time.

Streams and the current device are those of threads, as torch's are, and the device is cupy's too.  Arrays of cupy
become tensors by torch's own code, which takes what ``__dlpack__`` gives.
"""

import contextlib
import ctypes

import cupy
import numpy as np
import torch

from doubles import gpu

IN_ORDER = "to copy_ clone fill_ zero_ tolist item".split()  # methods of tensors
recorded: list[tuple[int, int]] = []  # the memory and the stream of each call of record_stream


def home():
    """The GPU of this rank's tensors; None for the host."""
    return getattr(gpu.process(), "home", None)


def number_of(device=None):
    """The GPU that an argument of torch.cuda names; the current one for None."""
    if isinstance(device, int):
        return device
    device = torch.device(device) if isinstance(device, str) else device
    if device is None or (device.type == "cuda" and device.index is None):
        return current_device()
    return home() if device.type == "cpu" else device.index


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, device=None, priority=0, *, stream=None):
        with device_of(number_of(device)):
            self._stream = stream or gpu.Stream(non_blocking=True, priority=priority)
        self.device_index = number_of(device)

    @property
    def device(self):
        return torch.device("cuda", self.device_index)

    @property
    def cuda_stream(self):
        return self._stream.ptr

    def __eq__(self, other):
        return (self.cuda_stream, self.device_index) == (other.cuda_stream, other.device_index)

    def __hash__(self):
        return hash((self.cuda_stream, self.device_index))

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        with device_of(self.device_index):
            self._stream.wait_event(event.event)

    def synchronize(self):
        with device_of(self.device_index):
            self._stream.synchronize()


class Event:
    """torch.cuda.Event, which belongs to the GPU where it is recorded."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.event = None

    def record(self, stream=None):
        stream = stream or current_stream()
        with device_of(stream.device_index):
            self.event = self.event or gpu.Event()
            self.event.record(stream._stream)

    def wait(self, stream=None):
        (stream or current_stream()).wait_event(self)

    def synchronize(self):
        self.event.synchronize()


def current_device():
    return gpu._local.number


def set_device(device):
    number = gpu._local.number = number_of(device)
    gpu._local.chosen = True
    if home() is None:
        gpu.process().home = number


@contextlib.contextmanager
def device_of(device):
    before, gpu._local.number = gpu._local.number, number_of(device)
    try:
        yield
    finally:
        gpu._local.number = before


def default_stream(device=None):
    return Stream(number_of(device), stream=gpu.Stream.null)


def current_stream(device=None):
    number = number_of(device)
    return gpu._local.torchs.get(number) or default_stream(number)


def set_stream(stream):
    if stream is not None:
        gpu._local.number, gpu._local.chosen = stream.device_index, True
        gpu._local.torchs[stream.device_index] = stream


@contextlib.contextmanager
def stream(stream):
    number, there = current_device(), current_stream(stream.device_index)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(there)
        gpu._local.number = number


def record_stream(tensor, stream):
    """Tensor.record_stream."""
    recorded.append((tensor.data_ptr(), stream.cuda_stream))


def get_device(tensor):
    """Tensor.get_device; the tensor's memory may be that of kernels and collectives from now on."""
    if home() is None:
        return -1
    gpu.allocations["torch", tensor.data_ptr()] = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    return home()


def in_order(method):
    def call(tensor, *args, **options):
        if home() is not None:
            gpu.process().gpu(home()).finish(current_stream(home()).cuda_stream)
        return method(tensor, *args, **options)

    return call


def make_future(future, *, devices=(), make=torch.futures.Future.__init__):
    """torch.futures.Future.__init__; it knows no GPU here."""
    make(future)


def dlpack(x, *, stream=None, max_version=None, dl_device=None, copy=None):
    """cupy.ndarray.__dlpack__: the consumer's stream, 1 for the null one, waits for the current one."""
    if x.dtype.kind not in "iufb" or x.dtype.itemsize > 8:
        raise BufferError(f"unsupported dtype {x.dtype}")
    if stream is not None:
        consumer, event = gpu.Stream.known[0 if stream == 1 else stream], gpu.Event()
        event.record()
        consumer.wait_event(event)
    raw = (ctypes.c_char * max(x.nbytes, 1)).from_address(x.data.ptr)
    raw.owner = x
    return np.frombuffer(raw, x.dtype, x.size).reshape(x.shape).__dlpack__()


def install(patch=setattr):
    """Let torch have the GPUs that ``gpu.install`` has given to cupy; with a monkeypatch's ``setattr`` until undone."""
    recorded.clear()
    for owner, doubles in (
        (torch.cuda, {"is_initialized": lambda: home() is not None, "is_available": lambda: True}),
        (torch.cuda, {"device_count": lambda: gpu.GPUS, "current_device": current_device, "set_device": set_device}),
        (torch.cuda, {"device": device_of, "Stream": Stream, "Event": Event, "stream": stream}),
        (torch.cuda, {"current_stream": current_stream, "default_stream": default_stream, "set_stream": set_stream}),
        (torch.cuda, {"synchronize": lambda device=None: gpu.process().gpu(number_of(device)).finish()}),
        (torch.Tensor, {"is_cuda": property(lambda t: home() is not None), "get_device": get_device}),
        (torch.Tensor, {"record_stream": record_stream}),
        (torch.Tensor, {name: in_order(getattr(torch.Tensor, name)) for name in IN_ORDER}),
        (torch.futures.Future, {"__init__": make_future}),
        (cupy.ndarray, {"__dlpack__": dlpack, "__dlpack_device__": lambda x: (2, x.data.device_id)}),
    ):
        for name, double in doubles.items():
            patch(owner, name, double)


# ----------------------------------------------------------------------------------------------------- torch's work


def enqueue(name, action):
    """Enqueue what a kernel of torch does, in torch's current stream of the tensors' GPU."""
    there = current_stream(home())
    with device_of(home()):
        gpu.machine().enqueue(name, action, there.cuda_stream)


def late(tensor):
    """Let the values of a tensor come when torch's current stream comes to them; before, it is poisoned."""
    values, pointer, nbytes = tensor.clone(), tensor.data_ptr(), tensor.nbytes
    ctypes.memset(pointer, gpu.POISON, nbytes)
    enqueue("late", lambda: ctypes.memmove(pointer, values.data_ptr(), nbytes))


def read(tensor):
    """A list that has the tensor's values when torch's current stream has come to this."""
    found, values = [], tensor.numpy()
    enqueue("read", lambda: found.extend(values.tolist()))
    return found


def free(tensor):
    """Let torch's allocator give a tensor's memory to others, after the current stream's work so far.

    And behind that of the streams that ``record_stream`` has named for it.
    """
    before = [Stream(home(), stream=gpu.Stream.known[ptr]) for at, ptr in recorded if at == tensor.data_ptr()]
    user = Stream(home())
    for there in [current_stream(home()), *before]:
        user.wait_stream(there)
    with stream(user):
        enqueue("reuse", lambda: ctypes.memset(tensor.data_ptr(), gpu.POISON, tensor.nbytes))
