"""The base class of compressors around another one."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from distopt.compress.base import Compressor, at_density, of_sum
from distopt.compress.context import ExchangeContext
from distopt.compress.state import State
from distopt.kernels.breakdown import LazyBreakdown
from distopt.kernels.layout import BucketLayout


class CompressorWrapper(Compressor):
    """A base class of compressors that send the payloads of another one, which decodes them too.

    Args:
        compressor: the other one, whose traits are taken over.

    Raises:
        ValueError: it leaves members in x to be summed as they are, and this class does not say which.
    """

    def __init__(self, compressor: Compressor):
        leaves, here = type(compressor).uncompressed, type(self).uncompressed
        if leaves is not Compressor.uncompressed and here is Compressor.uncompressed:
            text = "compressor must be one that sends all members, as those that it leaves would never be summed"
            raise ValueError(f"{text}, got {compressor!r}")
        self.compressor = compressor
        self.traits = replace(compressor.traits, lossless=False, elementwise=False)

    def around(self, compressor: Compressor) -> "CompressorWrapper":
        """Return the same around another compressor."""
        return type(self)(compressor)

    def at_step(self, k: int) -> "CompressorWrapper":
        inner = self.compressor.at_step(k) if self.traits.changes_with_step else self.compressor
        return self if inner is self.compressor else self.around(inner)

    def at_density(self, density: float) -> "CompressorWrapper":
        """Return the same with another density."""
        return self.around(at_density(self.compressor, density))

    def of_sum(self, ranks: int) -> "CompressorWrapper":
        """Return the same for sums over so many ranks."""
        return self.around(of_sum(self.compressor, ranks))

    def payload_bytes(self, n: int, itemsize: int = 4, layout: BucketLayout | None = None) -> int | None:
        return self.compressor.payload_bytes(n, itemsize, layout)

    def sketch_bytes(self, n: int, itemsize: int = 4, layout: BucketLayout | None = None) -> int:
        return self.compressor.sketch_bytes(n, itemsize, layout)

    def sketch(self, x: np.ndarray, state: State, context: ExchangeContext) -> np.ndarray | None:
        return self.compressor.sketch(x, state, context)

    def breakdown(self, payload: np.ndarray | None, x: np.ndarray, context: ExchangeContext) -> LazyBreakdown:
        return self.compressor.breakdown(payload, x, context)

    def decompress(self, payload: np.ndarray, out: np.ndarray, context: ExchangeContext) -> None:
        self.compressor.decompress(payload, out, context)

    def decompress_all(self, payloads: Sequence[np.ndarray], out: np.ndarray, context: ExchangeContext) -> None:
        self.compressor.decompress_all(payloads, out, context)
