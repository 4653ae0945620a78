"""Buckets that travel while the gradients of the next ones are still being computed."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from distopt import device
from distopt.buckets import Buffer, Buffers
from distopt.comm import Communicator
from distopt.exchange.background import Background, Inline
from distopt.gradients import Collector

# Seconds between two looks at an exchange, while gradients are being computed: fewer take a core away from them, more
# let the network idle (1 Gbit/s: 77 to 100 % of what can be hidden is, with either MPI).
PATIENCE = 2e-4


class Overlap:
    """One step: a bucket is packed and sent, in plan order, as soon as its gradients came as they came the last time.

    Every rank sends every bucket, whatever happens in its backward pass, so that nobody waits for ever; what is wrong
    comes with the vote behind the last bucket.
    """

    def __init__(
        self,
        background: Background | Inline,
        wire: Communicator,
        buffers: Buffers,
        collector: Collector,
        agree: Callable[[], object],
        pack: Callable[[Buffer], None],
        exchange: Callable[[Iterable[Buffer | None]], Iterable[object]],
    ):
        self._background, self._wire, self._buffers, self._collector = background, wire, list(buffers), collector
        self._pack, self._memory = pack, buffers
        self.sent = 0  # buckets
        wire.be_patient(PATIENCE)
        background.start(agree)  # before data moves, all ranks are in the same step
        background.stream(exchange)

    def watch(self, pairs: Iterable[Any]) -> Iterator[Any]:
        """The pairs of a loss, as they come; behind the last one of a bucket it is sent."""
        places = [p.tolist() for p in self._memory.places]
        ends = list(itertools.accumulate(map(self._collector.arrives_last, places), max))
        given: list[Any] = []
        as_before = True
        for pair in pairs:
            given.append(pair)
            yield pair
            while as_before and self.sent < len(ends) and ends[self.sent] < len(given):
                grads = self._collector.came_as_before(given, places[self.sent])
                as_before = grads is not None and self._memory.take(self.sent, grads)
                if as_before:
                    self._pack(self._buffers[self.sent])
                    self._send()

    def complete(self, failed: bool) -> None:
        """Send what has not been sent, zeros if this rank has failed; return when all sums are there.

        Raises what all ranks raise if they are not in the same step.
        """
        for buffer in self._buffers[self.sent :]:
            if failed:
                device.clear(buffer.gradient)
            self._send()
        self._wire.be_patient(0)
        self._background.finish()

    def _send(self) -> None:
        self._background.put(self._buffers[self.sent])
        self.sent += 1
