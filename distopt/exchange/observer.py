"""Who wants to know how good what is sent is, and when."""

from collections.abc import Callable, Mapping

import numpy as np

from distopt.comm import Communicator
from distopt.compress import Compressor
from distopt.exchange.probe import Algorithm, ObservedTurns, observed
from distopt.exchange.quality import Quality
from distopt.exchange.walk import Turns
from distopt.ledger import Ledger
from distopt.numbers import whole

Callback = Callable[[int, Mapping[str, float]], object]


class Observer:
    """Looks at every ``every``-th step, 0: at none, and calls back behind it.

    Raises TypeError for what cannot be called, and TypeError or ValueError for what is no number of steps.
    """

    def __init__(self, callback: Callback | None = None, every: int = 0):
        if callback is not None and not callable(callback):
            raise TypeError(f"callback must be callable with a step and its numbers, or None, got {callback!r:.60}")
        self._callback, self.every = callback, whole("every", every, least=0)
        self._quality: Quality | None = None  # of a step that is looked at

    def begin(self, step: int, sent: bool, exchanges: int = 1) -> None:
        """Step number ``step``, from 1, begins; are gradients ``sent`` in it, and how often?"""
        self._quality = Quality(exchanges) if sent and self.every and step % self.every == 0 else None

    @property
    def looks(self) -> bool:
        """Is this step looked at?"""
        return self._quality is not None

    def around(self, algorithm: Algorithm, compressor: Compressor) -> Algorithm:
        """How a bucket is exchanged in this step."""
        if self._quality is None or compressor.lossless:
            return algorithm
        return observed(algorithm, self._quality)

    def turns(self, compressor: Compressor, scratch: Callable[[str, int], np.ndarray]) -> Turns:
        """The same for ranks that take their turns in one process."""
        if self._quality is None or compressor.lossless:
            return Turns(compressor, scratch)
        return ObservedTurns(compressor, scratch, self._quality)

    def __repr__(self) -> str:
        return f"observe(every={self.every})"

    def tell(self, step: int, wire: Communicator) -> None:
        """The step was applied: call back, if it was looked at."""
        quality, self._quality = self._quality, None
        if quality and self._callback:
            self._callback(step, quality.numbers() | _volume(wire))


def _volume(wire: Communicator) -> dict[str, float]:
    """Bytes of this rank's steps since the start, if somebody counts."""
    ledger = _ledger(wire)
    if ledger is None:
        return {}
    total = ledger.total_of_steps()
    return {"payload": total["payload"], "wire": total["sent"]}


def _ledger(wire: Communicator | None) -> Ledger | None:
    """The ledger of the first communicator that has one, from the outside."""
    while wire is not None and not hasattr(wire, "ledger"):
        wire = getattr(wire, "comm", None)
    return getattr(wire, "ledger", None)
