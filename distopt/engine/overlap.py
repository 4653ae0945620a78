"""Overlap: buckets are reduced while the gradients of the next ones are still being computed."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from distopt import device
from distopt.buckets import Bucket, BucketSet
from distopt.comm import Communicator
from distopt.engine.background import Background, Inline
from distopt.engine.bucket_store import BucketStore
from distopt.engine.reducers import CollectiveReducer, EarlyStates, NodeReducer, TwoPhaseReducer

# Seconds between two looks at an exchange, while gradients are being computed: fewer take a core away from them, more
# let the network idle (1 Gbit/s: 77 to 100 % of what can be hidden is, with either MPI).
PATIENCE = 2e-4


class Overlap:
    """Pack and reduce a bucket, in plan order, as soon as its gradients came as they came in the last step."""

    # Every rank sends every bucket, whatever happens in its backward pass, so that no other rank waits for ever; what
    # is wrong comes with the vote after the last bucket.

    def __init__(
        self,
        background: Background | Inline,
        comm: Communicator,
        store: BucketStore,
        buckets: BucketSet,
        reducer: CollectiveReducer | TwoPhaseReducer | NodeReducer | EarlyStates,
        agree: Callable[[], object],
        pack: Callable[[Bucket], None],
    ):
        # buckets: those that leave; agree: votes on the start of the step, before data moves.
        self._background, self._comm, self._pack = background, comm, pack
        self._collector, self.buckets = store.collector, buckets
        self.sent = 0
        comm.set_poll_interval(PATIENCE)
        background.start(agree)
        background.stream(lambda buckets: reducer.stream((b, b.gradient) if b else None for b in buckets))

    def watch(self, pairs: Iterable[Any]) -> Iterable[Any]:
        """Pass on the pairs of a loss as they come; send each bucket after its last one."""
        # If all are there already, a GPU packs them in one launch, after this.
        return pairs if self._comm.gpu is not None and isinstance(pairs, list | tuple) else self._watched(pairs)

    def _watched(self, pairs: Iterable[Any]) -> Iterator[Any]:
        collector, places = self._collector, [p.tolist() for p in self.buckets.places]
        ends = list(itertools.accumulate(map(collector.last_arrival, places), max))
        arrived: list[Any] = []
        as_before = True
        for pair in pairs:
            arrived.append(pair)
            yield pair
            while as_before and self.sent < len(ends) and ends[self.sent] < len(arrived):
                grads = collector.gradients_if_unchanged(arrived, places[self.sent])
                as_before = grads is not None and self.buckets.try_point_to(self.sent, grads)
                if as_before:
                    self._pack(self.buckets[self.sent])
                    self._send()

    def complete(self, failed: bool) -> None:
        """Send what was not sent, zeros if this rank has ``failed``; return when all sums are there.  Collective."""
        for bucket in self.buckets[self.sent :]:
            if failed:
                device.clear(bucket.gradient)
            self._send()
        self._comm.set_poll_interval(0)
        self._background.finish()

    def _send(self) -> None:
        self._background.put(self.buckets[self.sent])
        self.sent += 1
