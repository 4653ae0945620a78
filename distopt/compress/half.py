"""Half the bytes: every element as a 16-bit number."""

import math

import ml_dtypes
import numpy as np

from distopt import kernels
from distopt.compress.compressor import At
from distopt.tables import Members

LARGEST = {"float16": 65504.0, "bfloat16": float.fromhex("0x1.fep127")}
FORMATS = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class Half:
    """Send every element rounded to float16 or bfloat16; the rounding error stays behind.

    ``predivide`` scales by the largest power of two that is at most 1 / ranks before the cast, and back after the sum,
    so that a sum of finite numbers cannot overflow; without it small numbers keep more bits (in float16 everything
    below 3e-8 x ranks goes to zero with it), and a sum may overflow.  What lies beyond the format's range is sent
    saturated, and the rest stays behind.  Sums are formed as the communicator does (comm/communicator.py).

    Raises ValueError for another dtype.
    """

    summable = True
    ragged = lossless = stateful = False

    def __init__(self, dtype: str = "float16", predivide: bool = True):
        if dtype not in FORMATS:
            raise ValueError(f"dtype must be one of {', '.join(FORMATS)}, got {dtype!r}")
        self.dtype, self.predivide, self.may_overflow = dtype, bool(predivide), not predivide
        self._most, self.stored = LARGEST[dtype], FORMATS[dtype]
        if dtype == "float16":
            self._take, self._copy, self._give = kernels.take_half, kernels.copy_half, kernels.give_half
        else:
            self._take, self._copy, self._give = kernels.take_bfloat16, kernels.copy_bfloat16, kernels.give_bfloat16

    def payload_bytes(self, n: int, itemsize: int = 4, bucket: Members | None = None) -> int:
        """Two bytes an element."""
        return 2 * n

    def compress(
        self, x: np.ndarray, state: dict[str, np.ndarray], at: At, add: np.ndarray | None = None
    ) -> np.ndarray:
        """x as 16-bit numbers; x keeps the rounding errors."""
        if add is not None:
            kernels.accumulate(add, x, at.refused)
        wire: np.ndarray = at.scratch("payload", 2 * x.size).view(self.stored)
        self._take(x, wire, self.scale(at.size), self._most, at.refused)
        return wire

    def copy(self, x: np.ndarray, state: dict[str, np.ndarray], at: At) -> np.ndarray:
        """The same payload, but x stays as it is."""
        wire: np.ndarray = at.scratch("payload", 2 * x.size).view(self.stored)
        self.write(x, wire, at)
        return wire

    def write(self, x: np.ndarray, wire: np.ndarray, at: At) -> None:
        """Overwrite ``wire`` by the payload of x, which stays as it is."""
        self._copy(x, wire, self.scale(at.size), self._most, at.refused)

    def decompress(self, payload: np.ndarray, out: np.ndarray, at: At) -> None:
        """Overwrite ``out`` by the numbers."""
        self._give(payload, out, self.scale(at.size))

    def scale(self, ranks: int) -> float:
        """What x is multiplied by."""
        return 2.0 ** -math.ceil(math.log2(ranks)) if self.predivide else 1.0

    def __repr__(self) -> str:
        return f"Half({self.dtype!r}, predivide={self.predivide})"
