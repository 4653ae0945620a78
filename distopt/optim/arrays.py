"""The arrays of one parameter: do they fit, and 16-bit numbers as what is computed with, float32."""

from typing import Any

import numpy as np

from distopt import device, kernels
from distopt.tables import FORMATS, HALF, wide

WIDE = np.dtype(np.float32), np.dtype(np.float64)


def check(name: str, value: Any, grad: Any) -> None:
    """Is this a parameter that can be updated, and a gradient of it, like it or float32 for one of 16 bits?

    Raises TypeError for what is no array of float16, bfloat16, float32 or float64, or not on the host or GPU of the
    other; ValueError for a gradient of another shape or dtype, or a parameter that cannot be written.
    """
    for what, x in (("parameter", value), ("gradient", grad)):
        if not device.is_array(x) or x.dtype not in (*WIDE, *FORMATS):
            raise TypeError(f"{name}: a {what} must be an array of floats, got {device.describe(x)}")
    device.check_place(f"{name}: the gradient", grad, device.place(value))
    fits = grad.shape == value.shape and grad.dtype in (value.dtype, wide(value.dtype))
    if not fits or not device.writable(value):
        wanted = f"a gradient like the parameter, {value.shape} {value.dtype}"
        flaw = "" if device.writable(value) else "; the parameter is read-only"
        raise ValueError(f"{name}: wants {wanted}, got {grad.shape} {grad.dtype}{flaw}")


def check_states(what: str, given: Any) -> None:
    """ValueError for what is no dict of numpy's float32 or float64 arrays, by parameter name."""
    arrays = given.values() if isinstance(given, dict) else [None]
    if not all(isinstance(a, np.ndarray) and a.dtype in WIDE for a in arrays):
        raise ValueError(f"{what} must be float32 or float64 arrays by parameter name, got {given!r:.200}")


def widened(x: np.ndarray) -> np.ndarray:
    """The elements of x, flat, as float32 or float64: x itself if it is contiguous and has them, else a copy."""
    flat: np.ndarray = device.contiguous(x).reshape(-1)
    if flat.dtype not in FORMATS:
        return flat
    found = device.empty(flat.size, np.float32, like=flat)
    cast = kernels.from_half if FORMATS[flat.dtype] == HALF else kernels.from_bfloat16
    cast(flat, found)
    return found
