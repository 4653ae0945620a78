"""The exchange of all buckets of a step by ranks that take turns in one process."""

import functools
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from distopt import device
from distopt.comm import LocalCommunicator
from distopt.comm.byte_counts import DIRECT
from distopt.comm.communicator import sum_in_rank_order
from distopt.comm.message import MessageTag
from distopt.comm.meter import Meter
from distopt.compress import Compressor
from distopt.compress.context import layout_of
from distopt.compress.state import State, pending, settle, state_array
from distopt.engine.hooks import StepHook
from distopt.exchange import TwoPhase
from distopt.exchange.all_gather import gather_program
from distopt.exchange.all_reduce import TravellingBucket, reduce_program
from distopt.exchange.hierarchical import Shares
from distopt.exchange.sharding import ShardBounds
from distopt.exchange.step_traffic import messages_inside
from distopt.exchange.two_phase import Owned, two_phase_program
from distopt.kernels.layout import BucketLayout
from distopt.lab.observe.hook import QualityHook
from distopt.lab.observe.probe import Probe
from distopt.lab.sequential import LockStep, RunningSum

States = Sequence[Sequence[State]]  # by rank and bucket


class SequentialExchange(Protocol):
    """The exchange of all buckets of a step: ``add`` those of each rank, in rank order, then ``finish``."""

    def add(self, buckets: Sequence[TravellingBucket]) -> None:
        """Add the buckets of the next rank, and change what the compressor keeps of them."""

    def finish(self) -> None:
        """Overwrite the buckets by the sums over ranks."""

    def write_messages(self, meter: Meter, tag: MessageTag) -> None:
        """Write the messages by which the first rank would have exchanged the buckets into a ledger.

        Args:
            meter: writes them.
            tag: of messages of all buckets.
        """


class SequentialBuckets:
    """Exchange of some buckets in two phases, and of the others one by one.

    Args:
        compressor: what is sent of them.
        phases: the exchange in two phases; None if no bucket takes part in one.
        owned: of each rank, what it owned of each bucket in the last step.
        bounds: of the shards.
        break_even: a bucket is all-reduced as dense where that is less.
        tag: of messages of all buckets.
        hooks: of the step; some observe what is sent.

    Example:
        >>> from distopt.comm.message import UNTAGGED
        >>> from distopt.compress import ExchangeContext, TopK
        >>> from distopt.exchange.choice import TwoPhase
        >>> from distopt.kernels.layout import BucketLayout
        >>> layout = BucketLayout(["x"], [(2,)], [0], np.float32)
        >>> phases = TwoPhase(TopK(0.5).sharded(), (0,), (layout,))
        >>> exchange = SequentialBuckets(TopK(0.5), phases, [{}, {}], ShardBounds(), True, UNTAGGED)
        >>> x = np.empty(2, np.float32)
        >>> for rank, gradient in enumerate(([1, 2], [-3, 0])):
        ...     x[:] = gradient
        ...     exchange.add([(x, {}, ExchangeContext(rank=rank, size=2), UNTAGGED)])
        >>> exchange.finish()
        >>> x
        array([-3.,  0.], dtype=float32)
    """

    def __init__(
        self,
        compressor: Compressor,
        phases: TwoPhase | None,
        owned: Sequence[Owned],
        bounds: ShardBounds,
        break_even: bool,
        tag: MessageTag,
        hooks: Sequence[StepHook] = (),
    ):
        self._compressor, self._phases, self._owned, self._bounds = compressor, phases, owned, bounds
        self._break_even, self._tag, self._rank = break_even, tag, 0
        self._watches = [watch for hook in hooks if phases and (watch := hook.watch_shards(compressor))]
        self._observers = [hook.observer for hook in hooks if isinstance(hook, QualityHook)]
        self._here = LocalCommunicator()  # of no GPU, so that nobody waits for one
        self._together: LockStep | None = None
        self._alone: list[tuple[LockStep, Compressor, TravellingBucket]] = []  # and what the first rank has brought

    def add(self, buckets: Sequence[TravellingBucket]) -> None:
        """Add the buckets of the next rank, and change what the compressor keeps of them."""
        numbers = self._phases.buckets if self._phases else ()
        alone = [bucket for k, bucket in enumerate(buckets) if k not in numbers] if numbers else buckets
        if self._rank == 0:
            self._together = LockStep(buckets[numbers[0]][2].scratch) if numbers else None
            self._alone = [(LockStep(bucket[2].scratch), self._observed(), bucket) for bucket in alone]
        if self._phases and self._together:
            there, owned = [buckets[k] for k in numbers], self._owned[self._rank]
            arguments = self._phases.codec, self._here, owned, self._bounds, self._tag, self._watches
            self._together.add(two_phase_program(there, self._compressor, *arguments))
        for (turns, compressor, _), (x, state, context, tag) in zip(self._alone, alone, strict=True):
            if compressor.traits.stateful:
                settle(x, state, skip_flag=context.skip_flag)
            if compressor.traits.summable:
                turns.add(reduce_program(x, compressor, state, context))
            else:
                turns.add(gather_program(x, compressor, state, context, tag))
        self._rank += 1

    def finish(self) -> None:
        """Overwrite the buckets by the sums over ranks."""
        if self._together:
            self._together.finish()
        for turns, compressor, (x, _, context, _) in self._alone:
            turns.finish()
            if isinstance(compressor, Probe):
                compressor.compare(x, context)

    def write_messages(self, meter: Meter, tag: MessageTag) -> None:
        """Write the messages by which the first rank would have exchanged the buckets into a ledger."""
        if self._together:
            self._together.write_messages(meter, tag, self._break_even)
        for turns, compressor, (x, _, _, own_tag) in self._alone:
            turns.write_messages(meter, own_tag, self._break_even)
            if isinstance(compressor, Probe):
                with meter.tagged(own_tag._replace(phase="quality")):
                    meter.all_reduce(x.size, x.itemsize)

    def _observed(self) -> Compressor:
        """Return what compresses a bucket on its own, and tells what it sends where that is observed."""
        probes = [probe for observer in self._observers if (probe := observer.probe(self._compressor))]
        return probes[0] if probes else self._compressor


class SequentialNodes:
    """Exchange of sums over nodes: ``add`` the buckets of each rank, in rank order, then ``finish``.

    Args:
        shares: of each rank of the largest node the numbers of its buckets.
        sizes: the ranks of each node.
        columns: the exchange of each share between the nodes.
        states: what compressors keep, by rank and bucket; what is kept of a bucket lies with the rank that has it.

    Example:
        >>> from distopt.comm.message import UNTAGGED
        >>> from distopt.compress import BucketContext, Dense, ExchangeContext
        >>> columns = [SequentialBuckets(Dense(), None, [], ShardBounds(), True, UNTAGGED) for _ in range(2)]
        >>> exchange = SequentialNodes([[0], []], [2, 2], columns, [[{}]] * 4)
        >>> memory, x = {}, np.empty(2, np.float32)
        >>> keep = lambda name, nbytes: memory.setdefault(name, np.empty(nbytes, np.uint8))
        >>> for gradient in ([1, 2], [3, 4], [5, 6], [7, 8]):
        ...     x[:] = gradient
        ...     exchange.add([(x, {}, ExchangeContext(size=4, bucket=BucketContext(scratch=keep)), UNTAGGED)])
        >>> exchange.finish()
        >>> x
        array([16., 20.], dtype=float32)
    """

    def __init__(self, shares: Shares, sizes: Sequence[int], columns: Sequence[SequentialExchange], states: States):
        self._shares, self._sizes, self._columns, self._states = shares, sizes, columns, states
        # The rank whose turn it is, as its node and its number there.
        self._node = self._place = 0
        self._sums: list[RunningSum] = []
        self._plan: list[BucketLayout] = []

    def add(self, buckets: Sequence[TravellingBucket]) -> None:
        """Add the buckets of the next rank; the last one of a node changes what compressors keep of its sums."""
        if not self._sums:
            contexts = [context for _, _, context, _ in buckets]
            self._sums = [RunningSum(functools.partial(context.scratch, "sum over node")) for context in contexts]
            self._plan = [layout_of(x, context) for x, _, context, _ in buckets]
        for running, (x, _, _, _) in zip(self._sums, buckets, strict=True):
            running.add(x, first=self._place == 0)
        self._place += 1
        if self._place < self._sizes[self._node]:
            return
        for running, (x, _, _, _) in zip(self._sums, buckets, strict=True):
            running.write_sum(x)
        for number, column in enumerate(self._columns[: self._place]):
            states, mine = self._states[sum(self._sizes[: self._node]) + number], []
            for k in self._shares[number]:
                x, _, context, tag = buckets[k]
                gradients = context.num_gradients * self._place
                context = context._replace(rank=self._node, size=len(self._sizes), num_gradients=gradients)
                mine.append((x, states[k], context, tag))
            column.add(mine)
        self._node, self._place = self._node + 1, 0

    def finish(self) -> None:
        """Overwrite the buckets by the sums over ranks."""
        for column in self._columns:
            column.finish()

    def write_messages(self, meter: Meter, tag: MessageTag) -> None:
        """Write the messages by which the first rank would have exchanged the buckets into a ledger."""
        per_node, nodes = self._sizes[0], len(self._sizes)
        inside = Meter(0, per_node, [0] * per_node, DIRECT, meter.ledger)
        between = Meter(0, nodes, range(nodes), DIRECT, meter.ledger)
        with inside.tagged(tag):
            for message in messages_inside(self._plan, self._shares[:per_node], "all_to_all"):
                message.write(inside)
        self._columns[0].write_messages(between, tag)
        with inside.tagged(tag):
            for message in messages_inside(self._plan, self._shares[:per_node], "all_gather"):
                message.write(inside)


def move_states(
    states: States, arrays: Sequence[np.ndarray], shares: Shares, sizes: Sequence[int], owned: Sequence[Owned]
) -> None:
    """Move what ranks keep of buckets to the ranks that they belong to, as ``hierarchical.move_states`` does.

    Args:
        states: what compressors keep, by rank and bucket.
        arrays: a flat array of each bucket.
        shares: of each rank of the largest node the numbers of its buckets.
        sizes: the ranks of each node.
        owned: of each rank, what it owned of each bucket in the last step; forgotten where a rank has taken over more.
    """
    for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        first = end - size
        node = states[first:end]
        for place, share in enumerate(shares):
            for number in share:
                if _gather([of_rank[number] for of_rank in node], place, arrays[number]):
                    owned[first + place].clear()


def _gather(states: Sequence[State], place: int, x: np.ndarray) -> bool:
    """Add what the ranks of a node keep of a bucket up at one of them; tell if there was anything."""
    others = [state for rank, state in enumerate(states) if rank != place]
    names = set[str]().union(*map(pending, others))
    for name in sorted(names):
        total = sum_in_rank_order([state_array(state, name, x) for state in states])
        device.copy(states[place][name], total)
        for state in others:
            del state[name]
    return bool(names)
