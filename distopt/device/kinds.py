"""What may be an array or a tensor, as one of them; torch is not imported for it."""

from typing import Any

import numpy as np

from distopt.device.arrays import is_tensor


def array_of(x: Any) -> Any:
    """Return the memory of a tensor as an array (``tensors.as_array``), and any other object as it is."""
    if not is_tensor(x):
        return x
    from distopt.torch.tensors import as_array

    return as_array(x)


def as_kind(x: np.ndarray, like: Any) -> Any:
    """Return an array as a tensor on the same memory, if ``like`` is a tensor, else as it is."""
    if not is_tensor(like):
        return x
    from distopt.torch.tensors import as_tensor

    return as_tensor(x, like)
