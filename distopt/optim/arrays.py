"""The arrays of one parameter: checks of value and gradient, and conversion of 16-bit elements to float32."""

from typing import Any

import numpy as np

from distopt import device, kernels
from distopt.kernels.layout import FORMATS, HALF, compute_dtype

WIDE = np.dtype(np.float32), np.dtype(np.float64)


def check(name: str, value: Any, grad: Any) -> None:
    """Check that an optimizer can update a parameter by a gradient."""
    for role, array in (("parameter", value), ("gradient", grad)):
        if not device.is_array(array) or array.dtype not in (*WIDE, *FORMATS):
            raise TypeError(f"{name}: a {role} must be an array of floats, got {device.describe(array)}")
    device.check_gpu(f"{name}: the gradient", grad, device.gpu_of(value))
    fits = grad.shape == value.shape and grad.dtype in (value.dtype, compute_dtype(value.dtype))
    if not fits or not device.writable(value):
        expected = f"like the parameter, {value.shape} {value.dtype}"
        flaw = "" if device.writable(value) else "; the parameter is read-only"
        raise ValueError(f"{name}: the gradient must be {expected}, got {grad.shape} {grad.dtype}{flaw}")


def check_states(what: str, states: Any) -> None:
    """Check that loaded states are a dict of numpy arrays of float32 or float64, by parameter name."""
    arrays = states.values() if isinstance(states, dict) else [None]
    if not all(isinstance(a, np.ndarray) and a.dtype in WIDE for a in arrays):
        raise ValueError(f"{what} must be float32 or float64 arrays by parameter name, got {states!r:.200}")


def widened(x: np.ndarray) -> np.ndarray:
    """Return an array's elements, flat, as float32 or float64."""
    flat: np.ndarray = device.contiguous(x).reshape(-1)
    if flat.dtype not in FORMATS:
        return flat
    converted = device.empty(flat.size, np.float32, like=flat)
    cast = kernels.from_half if FORMATS[flat.dtype] == HALF else kernels.from_bfloat16
    cast(flat, converted)
    return converted
