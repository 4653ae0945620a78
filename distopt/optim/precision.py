"""Arrays of 16-bit numbers, which are only stored: whatever is computed with them is computed in float32."""

from typing import Any

import ml_dtypes
import numpy as np

from distopt import device, kernels

HALF, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
WIDE = np.dtype(np.float32), np.dtype(np.float64)
FLOATS = (*WIDE, HALF, BFLOAT16)


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What numbers of this dtype are computed in: float32, or float64 for float64."""
    return np.dtype(np.float32) if dtype in (HALF, BFLOAT16) else dtype


def wide(x: np.ndarray) -> np.ndarray:
    """The elements of x, flat, as float32 or float64: x itself if it is contiguous and has them, else a copy."""
    flat: np.ndarray = device.contiguous(x).reshape(-1)
    if flat.dtype not in (HALF, BFLOAT16):
        return flat
    found = device.empty(flat.size, np.float32, like=flat)
    cast = kernels.from_half if flat.dtype == HALF else kernels.from_bfloat16
    cast(flat, found)
    return found


def narrow(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    """The same elements in the shape and the dtype of another array, rounded to a copy if that has 16 bits."""
    if like.dtype not in (HALF, BFLOAT16):
        return x.reshape(like.shape)
    found = device.empty(x.size, like.dtype, like=x)
    cast = kernels.to_half if like.dtype == HALF else kernels.to_bfloat16
    cast(x, found)
    return found.reshape(like.shape)
