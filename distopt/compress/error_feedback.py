"""A compressor with a memory: what was not sent is added to the next gradient."""

import numpy as np

from distopt.compress.base import Lossy, check_compressor
from distopt.compress.context import ExchangeContext, State, state_array
from distopt.compress.shards import ShardCodec
from distopt.compress.wrapper import CompressorWrapper


class ErrorFeedback(CompressorWrapper):
    """Keep what a compressor leaves behind as the state 'residual', and add it to the next gradient.

    Seide et al., "1-bit stochastic gradient descent", 2014.

    All compressors that are used one after the other share this one residual, so a change of density or selector loses
    nothing.

    Args:
        compressor: what is sent of the residual.

    Raises:
        TypeError: ``compressor`` is none.
        ValueError: it leaves nothing behind, has a memory already, or its sum may overflow after the residual was
            changed (``Half(predivide=False)``).

    Example:
        >>> import numpy as np
        >>> from distopt.compress import ExchangeContext, TopK
        >>> state = {"residual": np.array([0, 3, 0, 1], np.float32)}
        >>> payload = ErrorFeedback(TopK(0.5)).compress(np.array([1, 2, 3, -1], np.float32), state, ExchangeContext())
        >>> payload.view(np.float32)[:2]  # the values; their indices are behind them
        array([5., 3.], dtype=float32)
        >>> state["residual"]
        array([1., 0., 0., 0.], dtype=float32)
    """

    stateful = True
    compressor: Lossy

    def __init__(self, compressor: Lossy):
        check_compressor(compressor)
        if compressor.lossless:
            raise ValueError(f"compressor must be one that leaves an error to feed back, got {compressor!r}")
        if compressor.stateful:
            raise ValueError(f"compressor must be one that does not feed its error back already, got {compressor!r}")
        if compressor.may_overflow:
            raise ValueError(
                f"compressor must be one whose sum cannot overflow, which would lose what was sent, got {compressor!r}"
            )
        super().__init__(compressor)

    def compress(self, x: np.ndarray, state: State, context: ExchangeContext) -> np.ndarray:
        """Add x to the residual, and move out of that what is worth sending."""
        return self.compressor.compress(state_array(state, "residual", x), state, context, add=x)

    def sharded(self) -> ShardCodec | None:
        codec = self.compressor.sharded()
        return codec and codec.remembering()

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.compressor!r})"
