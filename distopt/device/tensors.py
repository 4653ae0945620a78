"""Tensors as arrays on the same memory, and arrays as tensors."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import torch

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def is_dtensor(t: torch.Tensor) -> bool:
    """Tell if a tensor is a ``DTensor``, whose module takes a second to import."""
    return hasattr(t, "to_local")


def order_in_memory(t: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor, the one of the largest stride first.

    Example:
        >>> order_in_memory(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
        (0, 2, 3, 1)
    """
    strides: tuple[int, ...] = t.stride()
    return tuple(sorted(range(len(strides)), key=lambda d: (-strides[d], d)))


def as_array(t: torch.Tensor) -> np.ndarray:
    """Return a tensor's memory as an array, in the order in which it lies there.

    Raises:
        TypeError: it is sparse, not on the CPU, or has gaps.

    Example:
        >>> x = torch.zeros(1, 3, 2, 2).to(memory_format=torch.channels_last)
        >>> as_array(x).shape
        (1, 2, 2, 3)
    """
    if t.layout is not torch.strided:
        raise TypeError(f"a tensor must be dense, got {t.layout}")
    dense = t.detach().permute(order_in_memory(t))
    if not dense.is_contiguous():
        raise TypeError(f"a tensor must have no gaps in memory, got strides {tuple(t.stride())} of {tuple(t.shape)}")
    if t.dtype is torch.bfloat16:
        return dense.view(torch.int16).numpy().view(BFLOAT16)
    return dense.numpy()


def as_tensor(x: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Return an array that ``as_array`` has made, or another one of its shape, as a tensor like this one.

    Example:
        >>> t = torch.zeros(1, 3, 2, 2).to(memory_format=torch.channels_last)
        >>> as_tensor(as_array(t), like=t).shape
        torch.Size([1, 3, 2, 2])
    """
    flat = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BFLOAT16 else torch.from_numpy(x)
    return flat.permute(_inverse(order_in_memory(like)))


def _inverse(order: Sequence[int]) -> list[int]:
    inverse = [0] * len(order)
    for place, dimension in enumerate(order):
        inverse[dimension] = place
    return inverse
