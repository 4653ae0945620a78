"""A compressor with a memory: what was not sent is added to the next gradient."""

import numpy as np

from distopt.compress.compressor import At, Lossy, decompress_all, forecast, look, memory
from distopt.ledger import Anatomy, Look
from distopt.tables import Members


class ErrorFeedback:
    """Keep what a compressor leaves behind as the state 'residual', and add it to the next gradient.

    Seide et al., "1-bit stochastic gradient descent", 2014.

    All compressors that are used one after the other share this one residual, so a change of density or selector loses
    nothing.

    Raises ValueError for a compressor that leaves nothing behind, that has a memory already, or whose sum may overflow
    after the residual was changed (``Half(predivide=False)``).
    """

    lossless, may_overflow, stateful = False, False, True

    def __init__(self, compressor: Lossy):
        if compressor.lossless:
            raise ValueError(f"{compressor!r} leaves no error to feed back")
        if compressor.stateful:
            raise ValueError(f"{compressor!r} feeds its error back already")
        if compressor.may_overflow:
            raise ValueError(f"the sum of {compressor!r} may overflow, and what was sent would be lost")
        self.compressor, self.summable, self.ragged = compressor, compressor.summable, compressor.ragged
        self.capped = getattr(compressor, "capped", False)  # does it send what there is room for?

    def payload_bytes(self, n: int, itemsize: int = 4, bucket: Members | None = None) -> int | None:
        """That of the compressor."""
        return self.compressor.payload_bytes(n, itemsize, bucket)

    def compress(self, x: np.ndarray, state: dict[str, np.ndarray], at: At) -> np.ndarray:
        """Add x to the residual, and move out of that what is worth sending."""
        return self.compressor.compress(memory(state, "residual", x), state, at, add=x)

    def look(self, payload: np.ndarray, x: np.ndarray, at: At) -> Look:
        """That of the compressor."""
        return look(self.compressor, payload, x, at)

    def forecast(self, n: int, itemsize: int, bucket: Members) -> Anatomy:
        """That of the compressor."""
        return forecast(self.compressor, n, itemsize, bucket)

    def decompress_all(self, payloads: list[np.ndarray], out: np.ndarray, at: At) -> None:
        """As the compressor."""
        decompress_all(self.compressor, payloads, out, at)

    def decompress(self, payload: np.ndarray, out: np.ndarray, at: At) -> None:
        """As the compressor."""
        self.compressor.decompress(payload, out, at)

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.compressor!r})"
