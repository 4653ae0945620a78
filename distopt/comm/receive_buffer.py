"""Memory for received data."""

import numpy as np


class ReceiveBuffer:
    """Memory for received data, which is used again for every message."""

    def __init__(self) -> None:
        self._raw = np.empty(0, np.uint8)

    def view(self, dtype: np.dtype, n: int) -> np.ndarray:
        """Return memory for n elements, ``(n,)``, uninitialized; it overlaps every earlier view."""
        nbytes = n * dtype.itemsize
        if self._raw.nbytes < nbytes:
            self._raw = np.empty(nbytes, np.uint8)
        return self._raw[:nbytes].view(dtype)
