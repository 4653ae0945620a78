"""A device that runs on the CPU, in the place of the host library (``signatures.library``)."""

import contextlib
import ctypes
import re
import unittest.mock

from distopt.kernels import dispatch
from distopt.kernels.dispatch import KERNELS

HOST = dispatch.library()


class Device:
    """A call of a kernel launches it with a small grid; what no device has (``topk_host.cu``) is the host's."""

    def __init__(self, libraries, blocks, threads, seed=0):
        self.array_addresses, self.libraries, self.dims = HOST.array_addresses, libraries, (blocks, threads)
        self.launched = []  # names, in order
        for library in libraries.values():
            library.simt_seed(ctypes.c_ulonglong(seed))

    def __getattr__(self, name):
        real = re.search("_(float|double)$", name)[1]
        launch = getattr(self.libraries[real], f"launch_{name}", None)
        return Launch(self, name, launch) if launch else getattr(HOST, name)


class Launch:
    """A host function's call form, around cuLaunchKernel's."""

    argtypes = restype = None

    def __init__(self, device, name, launch):
        self.device, self.name, self.launch = device, name, launch

    def __call__(self, *values):
        given = [
            v if isinstance(v, ctypes.Structure | ctypes.Array) else kind(v)
            for kind, v in zip(self.argtypes, values, strict=True)
        ]
        # a list of arrays is passed as a pointer to their addresses
        held = [ctypes.c_void_p(ctypes.addressof(v)) if isinstance(v, ctypes.Array) else v for v in given]
        places = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        blocks, threads = self.device.dims
        self.device.launched.append(self.name)
        self.launch((ctypes.c_uint * 6)(blocks, 1, 1, threads, 1, 1), ctypes.c_size_t(0), places)


@contextlib.contextmanager
def on(libraries, blocks, threads, seed=0):
    """Kernels run on such a device in this block."""
    device = Device(libraries, blocks, threads, seed)
    with unittest.mock.patch.object(dispatch, "library", return_value=device), contextlib.ExitStack() as stack:
        for kernel in KERNELS.values():
            stack.enter_context(unittest.mock.patch.object(kernel, "_functions", {}))
        yield device
