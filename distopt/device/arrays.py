"""What an array is, and where."""

import sys
from typing import Any

import numpy as np

# What to write for the arrays of other libraries, by the root of the module and the name of one of their classes.
REMEDIES = {
    ("torch", "Tensor"): (
        "torch: distopt.Parameter(name, p.detach().numpy()) shares the memory of p, and its gradient is p.grad.numpy()"
    ),
    ("jaxlib", "ArrayImpl"): (
        "jax, whose arrays cannot be changed in place: distopt.Parameter(name, np.array(p)) keeps a copy, "
        "jnp.asarray(parameter.data) is the next step's p, and a gradient is np.asarray(g)"
    ),
    ("numpy", "MaskedArray"): "the mask would be lost: x.filled(0) is an array without one",
}


def on_gpu(x: Any) -> bool:
    """Is it an array on a GPU?"""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def is_array(x: Any) -> bool:
    """Is it an array that this library knows?"""
    return (isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray)) or on_gpu(x)


def remedy(x: Any) -> str:
    """What to write in the place of an array that this library does not know; '' for what is none."""
    classes = ((c.__module__.partition(".")[0], c.__name__) for c in type(x).__mro__)
    return next((REMEDIES[c] for c in classes if c in REMEDIES), "")


def place(x: Any) -> int | None:
    """The number of the GPU on which an array lives, None for the host."""
    return int(x.data.device_id) if on_gpu(x) else None


def address(x: Any) -> int:
    """Where an array keeps its elements."""
    return int(x.data.ptr if on_gpu(x) else x.ctypes.data)


def writable(x: Any) -> bool:
    """May an array be written to?"""
    return on_gpu(x) or bool(x.flags.writeable)


def describe(x: Any) -> str:
    """What an argument is, for the text of an error."""
    if not is_array(x):
        advice = f" ({remedy(x)})" if remedy(x) else ""
        return f"{type(x).__name__}: {' '.join(repr(x).split()):.60}{advice}"
    flaws = ", not contiguous" * (not x.flags.c_contiguous) + ", read-only" * (not writable(x))
    gpu = f" on GPU {place(x)}" if on_gpu(x) else ""
    return f"an array {x.shape} {x.dtype if x.dtype.isnative else x.dtype.str}{gpu}{flaws}"


def check_place(what: str, x: Any, gpu: int | None) -> None:
    """TypeError unless an array is where it must be, on a GPU or on the host (None); ValueError if on another GPU."""
    if place(x) == gpu:
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
