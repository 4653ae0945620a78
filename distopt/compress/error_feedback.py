"""A compressor with a memory: what was not sent is added to the next gradient."""

from dataclasses import replace
from typing import cast

import numpy as np

from distopt.checks import check_float
from distopt.compress.base import Compressor, Lossy, check_compressor
from distopt.compress.context import ExchangeContext, decayed
from distopt.compress.shards import ShardCodec, remembering
from distopt.compress.state import RESIDUAL, State, state_array
from distopt.compress.wrapper import CompressorWrapper


class ErrorFeedback(CompressorWrapper):
    """Keep what a compressor leaves behind as the state 'residual', and add it to the next gradient.

    Seide et al., "1-bit stochastic gradient descent", 2014.

    All compressors that are used one after the other share this one residual, so a change of density or selector loses
    nothing.

    With a ``decay`` the residual is ``e = decay e + x`` before something is sent of it (Sarfi et al., "Communication
    efficient LLM pre-training with SparseLoCo", 2025; the momentum of Peng et al., "DeMo: decoupled momentum
    optimization", 2024), so that what waits grows old: afterwards ``e == decay e_before + x - sent``.  In a two-phase
    exchange what an owner has not sent of earlier sums decays in the same way: the sum of all that waits, with ranks
    and owners, becomes ``decay`` times what it was, plus all gradients, minus what is applied, as it does in a gather.

    Args:
        compressor: what is sent of the residual.
        decay: how much of the residual outlives a step, 0 to 1; below 1 costs the host a pass of its own.

    Raises:
        TypeError: ``compressor`` is none, or ``decay`` is no number.
        ValueError: ``decay`` is below 0 or above 1; the compressor leaves nothing behind, has a memory already, leaves
            members to be summed as they are, or its sum may overflow after the residual was changed
            (``Half(predivide=False)``).

    Example:
        >>> import numpy as np
        >>> from distopt.compress import ExchangeContext, TopK
        >>> state = {"residual": np.array([0, 3, 0, 1], np.float32)}
        >>> payload = ErrorFeedback(TopK(0.5)).compress(np.array([1, 2, 3, -1], np.float32), state, ExchangeContext())
        >>> payload.view(np.float32)[:2]  # the values; their indices follow them
        array([5., 3.], dtype=float32)
        >>> state["residual"]
        array([1., 0., 0., 0.], dtype=float32)
        >>> _ = ErrorFeedback(TopK(0.5), decay=0.5).compress(np.zeros(4, np.float32), state, ExchangeContext())
        >>> state["residual"]
        array([0., 0., 0., 0.], dtype=float32)
    """

    compressor: Lossy

    def __init__(self, compressor: Lossy, decay: float = 1.0):
        check_compressor(compressor)
        if compressor.traits.lossless:
            raise ValueError(f"compressor must be one that leaves an error to feed back, got {compressor!r}")
        if compressor.traits.stateful:
            raise ValueError(f"compressor must be one that does not feed its error back already, got {compressor!r}")
        if compressor.traits.has_hooks:
            raise ValueError(f"compressor must be one without hooks; write DCT(ErrorFeedback(...)), got {compressor!r}")
        if compressor.traits.may_overflow:
            raise ValueError(
                f"compressor must be one whose sum cannot overflow, which would lose what was sent, got {compressor!r}"
            )
        super().__init__(compressor)
        self.traits = replace(self.traits, stateful=True)
        self.decay: float = check_float("decay", decay, most=1.0)

    def around(self, compressor: Compressor) -> "ErrorFeedback":
        return ErrorFeedback(cast(Lossy, compressor), self.decay)

    def compress(self, x: np.ndarray, state: State, context: ExchangeContext) -> np.ndarray:
        """Add x to the residual, and move out of that what is worth sending."""
        residual = decayed(state_array(state, RESIDUAL, x), self.decay, context)
        return self.compressor.compress(residual, state, context, add=x)

    def sharded(self) -> ShardCodec | None:
        codec = self.compressor.sharded()
        return codec and remembering(codec, self.decay)

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.compressor!r}{f', decay={self.decay}' * (self.decay != 1)})"
