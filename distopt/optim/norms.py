"""L2 norms of whole tensors."""

from typing import Any

import numpy as np

from distopt import device, kernels
from distopt.kernels.layout import BucketLayout


class Norms:
    """A function that computes L2 norms in float64, with the same bits on every rank, host and GPU.

    Squares are added in a fixed order.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[int, Any], BucketLayout] = {}  # tables of one record, by size and dtype

    def __call__(self, *arrays: np.ndarray) -> list[float]:
        """Return the norms of flat float32 or float64 arrays that are all on the host or all on one GPU.

        On a GPU the host waits for them, once.
        """
        sums = device.empty(len(arrays), np.float64, like=arrays[0])
        for k, x in enumerate(arrays):
            table = self._table(x)
            partial = device.empty(max(1, table.chunks), np.float64, like=x)
            kernels.partial_squares(table, x, partial)
            kernels.fold_partials(table, partial, sums[k : k + 1], 1)
        norms: list[float] = np.sqrt(device.host_copy(sums)).tolist()
        return norms

    def _table(self, x: np.ndarray) -> BucketLayout:
        if (x.size, x.dtype) not in self._tables:
            self._tables[x.size, x.dtype] = BucketLayout(["x"], [x.shape], [0], x.dtype)
        return self._tables[x.size, x.dtype]
