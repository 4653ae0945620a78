"""The exchange by nodes of ranks that take turns in one process."""

import functools
from collections.abc import Collection, Sequence

import numpy as np

from distopt import device
from distopt.comm.byte_counts import DIRECT
from distopt.comm.communicator import sum_in_rank_order
from distopt.comm.message import MessageTag
from distopt.comm.meter import Meter
from distopt.compress.context import State, layout_of, state_array
from distopt.exchange.all_reduce import TravellingBucket
from distopt.exchange.hierarchical import Shares
from distopt.exchange.step_traffic import messages_inside
from distopt.exchange.two_phase import Owned
from distopt.lab.sequential import RunningSum, SequentialExchange

States = Sequence[Sequence[State]]  # by rank and bucket


class SequentialNodes:
    """Exchange of sums over nodes: ``add`` the buckets of each rank, in rank order, then ``write_sums``.

    Args:
        shares: of each rank of a node the numbers of its buckets.
        nodes: their number.
        columns: the exchange of each share between the nodes.
        states: what compressors keep, by rank and bucket; what is kept of a bucket lies with the rank that has it.

    Example:
        >>> import numpy as np
        >>> from distopt.comm.message import UNTAGGED
        >>> from distopt.compress import Dense, ExchangeContext
        >>> from distopt.lab.sequential import SequentialBuckets, SequentialReduce
        >>> memory = {}
        >>> context = ExchangeContext(size=4)
        >>> scratch = lambda name, nbytes: memory.setdefault(name, np.empty(nbytes, np.uint8))
        >>> turns = [SequentialReduce(Dense(), scratch)], []
        >>> columns = [SequentialBuckets(Dense(), of_rank, break_even=True) for of_rank in turns]
        >>> exchange = SequentialNodes([[0], []], 2, columns, [[{}]] * 4)
        >>> for x in np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32):
        ...     exchange.add([(x, {}, context, UNTAGGED)])
        >>> exchange.write_sums([(x, {}, context, UNTAGGED)], [[{}]] * 4)
        >>> x
        array([16., 20.], dtype=float32)
    """

    def __init__(self, shares: Shares, nodes: int, columns: Sequence[SequentialExchange], states: States):
        self._shares, self._nodes, self._columns, self._states = shares, nodes, columns, states
        self._per_node, self._rank = len(shares), 0
        self._sums: list[RunningSum] = []

    def add(self, buckets: Sequence[TravellingBucket]) -> None:
        """Add the buckets of the next rank; the last one of a node changes what compressors keep of its sums."""
        node, place = divmod(self._rank, self._per_node)
        if not self._sums:
            contexts = [context for _, _, context, _ in buckets]
            self._sums = [RunningSum(functools.partial(context.scratch, "sum over node")) for context in contexts]
        for running, (x, _, _, _) in zip(self._sums, buckets, strict=True):
            running.add(x, first=place == 0)
        self._rank += 1
        if self._rank % self._per_node:
            return
        for running, (x, _, _, _) in zip(self._sums, buckets, strict=True):
            running.write_sum(x)
        for place, column in enumerate(self._columns):
            column.add(self._column(place, node, buckets))

    def _column(self, place: int, node: int, buckets: Sequence[TravellingBucket]) -> list[TravellingBucket]:
        """Return the buckets of the rank with a number in its node, as the ranks of that number exchange them."""
        states = self._states[node * self._per_node + place]
        found = []
        for number in self._shares[place]:
            x, _, context, tag = buckets[number]
            gradients = context.num_gradients * self._per_node
            context = context._replace(rank=node, size=self._nodes, num_gradients=gradients)
            found.append((x, states[number], context, tag))
        return found

    def write_sums(self, buckets: Sequence[TravellingBucket], states: States) -> None:
        """Overwrite the buckets by the sums over ranks."""
        for place, (column, share) in enumerate(zip(self._columns, self._shares, strict=True)):
            kept = [[states[node * self._per_node + place][k] for k in share] for node in range(self._nodes)]
            column.write_sums(self._column(place, 0, buckets), kept)

    def write_messages(self, meter: Meter, buckets: Sequence[TravellingBucket], tag: MessageTag) -> None:
        """Write the messages by which the first rank would have exchanged the buckets into a ledger."""
        plan = [layout_of(x, context) for x, _, context, _ in buckets]
        inside = Meter(0, self._per_node, [0] * self._per_node, DIRECT, meter.ledger)
        between = Meter(0, self._nodes, range(self._nodes), DIRECT, meter.ledger)
        with inside.tagged(tag):
            for _, message, breakdown in messages_inside(plan, self._shares, "all_to_all"):
                message.write(inside, breakdown)
        self._columns[0].write_messages(between, self._column(0, 0, buckets), tag)
        with inside.tagged(tag):
            for _, message, breakdown in messages_inside(plan, self._shares, "all_gather"):
                message.write(inside, breakdown)


def move_states(
    states: States, arrays: Sequence[np.ndarray], shares: Shares, stay: Collection[str], owned: Sequence[Owned]
) -> None:
    """Move what ranks keep of buckets to the ranks that they belong to, as ``hierarchical.move_states`` does.

    Args:
        states: what compressors keep, by rank and bucket.
        arrays: a flat array of each bucket.
        shares: of each rank of a node the numbers of its buckets.
        stay: names of states that are no part of what was not sent.
        owned: of each rank, what it owned of each bucket in the last step; forgotten where a rank has taken over more.
    """
    per_node = len(shares)
    for first in range(0, len(states), per_node):
        node = states[first : first + per_node]
        for place, share in enumerate(shares):
            for number in share:
                if _gather([of_rank[number] for of_rank in node], place, arrays[number], stay):
                    owned[first + place].clear()


def _gather(states: Sequence[State], place: int, x: np.ndarray, stay: Collection[str]) -> bool:
    """Add what the ranks of a node keep of a bucket up at one of them; tell if there was anything."""
    others = [state for rank, state in enumerate(states) if rank != place]
    names = set[str]().union(*others) - set(stay)
    for name in sorted(names):
        total = sum_in_rank_order([state_array(state, name, x) for state in states])
        device.copy(states[place][name], total)
        for state in others:
            del state[name]
    return bool(names)
