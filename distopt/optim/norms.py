"""L2 norms of whole tensors."""

from typing import Any

import numpy as np

from distopt import device, kernels
from distopt.kernels.layout import BucketLayout


class Norms:
    """A function that computes L2 norms in float64: squares added in a fixed order, so the same bits everywhere."""

    def __init__(self) -> None:
        # tables of one record, by size and dtype
        self._tables: dict[tuple[int, Any], BucketLayout] = {}

    def __call__(self, *arrays: np.ndarray) -> list[float]:
        """Return the norms of flat arrays, all on the host or all on one GPU, for which the host waits once."""
        sums = device.empty(len(arrays), np.float64, like=arrays[0])
        for k, x in enumerate(arrays):
            if (x.size, x.dtype) not in self._tables:
                self._tables[x.size, x.dtype] = BucketLayout(["x"], [x.shape], [0], x.dtype)
            table = self._tables[x.size, x.dtype]
            partial = device.empty(max(1, table.chunks), np.float64, like=x)
            kernels.partial_squares(table, x, partial)
            kernels.fold_partials(table, partial, sums[k : k + 1], 1)
        norms: list[float] = np.sqrt(device.host_copy(sums)).tolist()
        return norms
