"""Arrays of numpy and cupy: their kind, place, address and description."""

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

# Advice for the arrays of other libraries, by the root of the module and the name of one of their classes.
REMEDIES = {
    ("torch", "Tensor"): (
        "torch: DistOpt(optimizer, params=model) takes a loss that is a tensor; pairs of tensors need no params"
    ),
    ("jaxlib", "ArrayImpl"): (
        "jax, whose arrays cannot be changed in place: distopt.Parameter(name, np.array(p)) keeps a copy, "
        "jnp.asarray(parameter.data) is the next step's p, and a gradient is np.asarray(g)"
    ),
    ("numpy", "MaskedArray"): "the mask would be lost: x.filled(0) is an array without one",
}

# Where numpy keeps the address of an array's elements: after the head of the object (ndarraytypes.h), whose address is
# CPython's id.  0 for another Python.  Reading it there takes a fifth of the time of ``x.ctypes.data``.
DATA = object.__basicsize__ if sys.implementation.name == "cpython" else 0
pointer = ctypes.c_void_p.from_address


def on_gpu(x: Any) -> bool:
    """Tell if an object is an array on a GPU, which is cupy's."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def is_array(x: Any) -> bool:
    """Tell if an object is an array that distopt can work on: numpy's, without a mask, or cupy's."""
    return type(x) is np.ndarray or (isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray)) or on_gpu(x)


def is_tensor(x: Any) -> bool:
    """Tell if an object is a tensor of PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def remedy(x: Any) -> str:
    """Return advice for an array of another library, such as a torch tensor; '' for any other object."""
    classes = ((c.__module__.partition(".")[0], c.__name__) for c in type(x).__mro__)
    return next((REMEDIES[c] for c in classes if c in REMEDIES), "")


def gpu_of(x: Any) -> int | None:
    """Return the number of the GPU on which an array lives, None for the host."""
    return None if type(x) is np.ndarray or not on_gpu(x) else int(x.data.device_id)


def address(x: Any) -> int:
    """Return the address of an array's first element, in host or GPU memory."""
    if type(x) is np.ndarray and DATA:
        return pointer(id(x) + DATA).value or 0
    return int(x.data.ptr if on_gpu(x) else x.ctypes.data)


def matching_address(x: Any, dtype: np.dtype, gpu: int) -> int | None:
    """Return the address of a contiguous array on a GPU, in one look, as a step asks for dozens; None for others."""
    if not isinstance(x, sys.modules["cupy"].ndarray) or x.dtype is not dtype or not x.flags.c_contiguous:
        return None
    memory = x.data
    return int(memory.ptr) if memory.device_id == gpu else None


def matching_addresses(
    arrays: Sequence[Any], dtypes: Sequence[np.dtype], shapes: Sequence[tuple[int, ...]], gpu: int | None
) -> list[int] | None:
    """Return the addresses of contiguous arrays on a GPU, in one pass, as a step asks for hundreds of them."""
    cupy, addresses = sys.modules["cupy"], list[int]()
    for x, dtype, shape in zip(arrays, dtypes, shapes, strict=True):
        if not isinstance(x, cupy.ndarray) or x.dtype != dtype or x.shape != shape or not x.flags.c_contiguous:
            return None
        memory = x.data
        if memory.device_id != gpu:
            return None
        addresses.append(memory.ptr)
    return addresses


def writable(x: Any) -> bool:
    """Tell if an array may be written to."""
    return on_gpu(x) or bool(x.flags.writeable)


def describe(x: Any) -> str:
    """Return a description of an object for an error's text: an array's shape, dtype and place, or type and value."""
    if not is_array(x):
        advice = f" ({remedy(x)})" if remedy(x) else ""
        return f"{type(x).__name__}: {' '.join(repr(x).split()):.60}{advice}"
    flaws = ", not contiguous" * (not x.flags.c_contiguous) + ", read-only" * (not writable(x))
    gpu = f" on GPU {gpu_of(x)}" if on_gpu(x) else ""
    return f"an array {x.shape} {x.dtype if x.dtype.isnative else x.dtype.str}{gpu}{flaws}"


def check_gpu(what: str, x: Any, gpu: int | None) -> None:
    """Check that an array is on a given GPU, or on the host."""
    if gpu_of(x) == gpu:
        return
    if gpu is None:
        raise TypeError(
            f"{what} must be on the host, got {describe(x)}: cupy.asnumpy(x) copies it, and distopt.world('cuda') "
            "gives a communicator for GPUs"
        )
    if not on_gpu(x):
        raise TypeError(
            f"{what} must be on GPU {gpu}, got {describe(x)}, on the host: cupy.asarray(x) copies it, and "
            "distopt.world('cpu') gives a communicator for numpy"
        )
    raise ValueError(
        f"{what} must be on GPU {gpu}, got {describe(x)}: allocate after cupy.cuda.Device({gpu}).use(), or copy it "
        "there"
    )
