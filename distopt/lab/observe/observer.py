"""Call back with the quality of what is sent, at some steps."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from distopt.checks import check_int
from distopt.comm import Communicator
from distopt.comm.message import MessageTag
from distopt.compress import Compressor
from distopt.exchange import Algorithm
from distopt.exchange.all_reduce import TravellingBucket
from distopt.lab.observe.probe import ObservedShards, Probe, observed
from distopt.lab.observe.quality import Quality

Callback = Callable[[int, Mapping[str, float]], object]


class Observer:
    """A measurement of every ``every``-th step, none for 0, with a call after it."""

    def __init__(self, callback: Callback | None = None, every: int = 0):
        if callback is not None and not callable(callback):
            raise TypeError(f"callback must be callable with a step and its numbers, or None, got {callback!r:.60}")
        self._callback, self.every = callback, check_int("every", every, least=0)
        self._quality: Quality | None = None  # of a step that is measured
        self._shards: ObservedShards | None = None

    def begin(self, step: int, sent: bool, exchanges: int = 1) -> None:
        """Begin step number ``step``, from 1, in which gradients are ``sent`` or not, in so many ``exchanges``."""
        self._quality = Quality(exchanges) if sent and self.every and step % self.every == 0 else None

    @property
    def measures_step(self) -> bool:
        """Whether this step is measured."""
        return self._quality is not None

    def wrap(self, algorithm: Algorithm, compressor: Compressor) -> Algorithm:
        """Return the algorithm that exchanges a bucket in this step, and measures it."""
        if self._quality is None or compressor.traits.lossless:
            return algorithm
        return observed(algorithm, self._quality)

    def watch_shards(self, compressor: Compressor) -> ObservedShards | None:
        """Return what watches an exchange in two phases, if this step is measured."""
        self._shards = None if self._quality is None else ObservedShards(compressor, self._quality)
        return self._shards

    def compare(self, buckets: Sequence[TravellingBucket], add: Callable[[np.ndarray, MessageTag], None]) -> None:
        """Compare the sums that an exchange in two phases has left with those of gradients, which ``add`` adds up."""
        if self._shards:
            self._shards.compare(buckets, add)
            self._shards = None

    def probe(self, compressor: Compressor) -> Probe | None:
        """Return what tells what virtual ranks send of a bucket on its own, if this step is measured."""
        return None if self._quality is None or compressor.traits.lossless else Probe(compressor, self._quality)

    def __repr__(self) -> str:
        return f"observe(every={self.every})"

    def report(self, step: int, comm: Communicator) -> None:
        """Call back, if this step, which was applied, has been measured."""
        quality, self._quality = self._quality, None
        if quality and self._callback:
            counting: Any = comm  # of its wrappers the first one from the outside that has a ledger
            while counting is not None and not hasattr(counting, "ledger"):
                counting = getattr(counting, "comm", None)
            total = counting.ledger.total_of_steps() if counting else {}
            volume = {"payload": total["payload"], "wire": total["sent"]} if counting else {}
            self._callback(step, quality.numbers() | volume)
