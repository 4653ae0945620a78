"""Send every element as a 16-bit number: half the bytes of float32."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np

from distopt import kernels
from distopt.checks import check_bool
from distopt.compress.base import Lossy
from distopt.compress.context import ExchangeContext
from distopt.compress.state import State
from distopt.compress.traits import Traits
from distopt.kernels.layout import BucketLayout

LARGEST = {"float16": 65504.0, "bfloat16": float.fromhex("0x1.fep127")}
FORMATS = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class Half(Lossy):
    """Send every element rounded to float16 or bfloat16; the rounding error stays behind.

    What lies beyond the format's range is sent saturated, and the rest stays behind.  Sums are formed as the
    communicator does (comm/communicator.py).

    Args:
        dtype: 'float16' or 'bfloat16'.
        predivide: scale by the largest power of two that is at most 1 / ranks before the cast, and back after the sum,
            so that a sum of finite numbers cannot overflow.  Without it small numbers keep more bits (in float16
            everything below 3e-8 x ranks goes to zero with it), and a sum may overflow.

    Raises:
        ValueError: for another dtype.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import ExchangeContext
        >>> x = np.array([2049, 70000], np.float32)
        >>> Half().compress(x, {}, ExchangeContext()).tolist()
        [2048.0, 65504.0]
        >>> x.tolist()  # the rounding errors
        [1.0, 4496.0]
    """

    traits = Traits(summable=True, elementwise=True, of_sums=True)

    def __init__(self, dtype: str = "float16", predivide: bool = True):
        if not isinstance(dtype, str) or dtype not in FORMATS:
            raise ValueError(f"dtype must be one of {', '.join(FORMATS)}, got {dtype!r}")
        self.dtype, self.predivide = dtype, check_bool("predivide", predivide)
        self.traits = replace(self.traits, may_overflow=not predivide)
        self._most, self.stored = LARGEST[dtype], FORMATS[dtype]
        self._ranks = 1  # over which what is sent has been summed up before
        if dtype == "float16":
            self._take, self._copy, self._give = kernels.encode_half, kernels.copy_half, kernels.decode_half
        else:
            self._take, self._copy, self._give = kernels.encode_bfloat16, kernels.copy_bfloat16, kernels.decode_bfloat16

    def payload_bytes(self, n: int, itemsize: int = 4, layout: BucketLayout | None = None) -> int:
        return 2 * n

    def compress(
        self, x: np.ndarray, state: State, context: ExchangeContext, add: np.ndarray | None = None
    ) -> np.ndarray:
        payload: np.ndarray = context.scratch("payload", 2 * x.size).view(self.stored)
        scale, added = self.scale(context.size), x[:0] if add is None else add
        self._take(x, payload, added, scale, self._most, context.skip_flag)
        return payload

    def write(self, x: np.ndarray, payload: np.ndarray, context: ExchangeContext) -> None:
        """Overwrite ``payload``, ``(n,)`` of 16 bits, by that of x, which stays as it is."""
        self._copy(x, payload, self.scale(context.size), self._most, context.skip_flag)

    def decompress(self, payload: np.ndarray, out: np.ndarray, context: ExchangeContext) -> None:
        self._give(payload, out, self.scale(context.size))

    def of_sum(self, ranks: int) -> "Half":
        """Return the same for sums over so many ranks, which are as far from an overflow."""
        found = Half(self.dtype, self.predivide)
        found._ranks = self._ranks * ranks
        return found

    def scale(self, ranks: int) -> float:
        """Return what x is multiplied by before it is rounded, and the sum divided by."""
        return 2.0 ** -math.ceil(math.log2(ranks * self._ranks)) if self.predivide else 1.0

    def __repr__(self) -> str:
        return f"Half({self.dtype!r}, predivide={self.predivide})"
