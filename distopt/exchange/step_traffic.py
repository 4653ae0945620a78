"""The messages of a whole step, as far as they depend on no data; entries as if they were spread evenly."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from distopt.comm import byte_counts
from distopt.compress import Compressor, ExchangeContext
from distopt.exchange.choice import TwoPhase, two_phases
from distopt.exchange.hierarchical import Shares, node_exchange, rounds
from distopt.exchange.told import message_bytes
from distopt.exchange.traffic import Message, traffic
from distopt.kernels.breakdown import LazyBreakdown, PayloadBreakdown
from distopt.kernels.layout import BucketLayout


class StepMessage(NamedTuple):
    """A message of a step.

    Args:
        bucket: the number of the bucket; None for a message of several.
        message: the collective.
        breakdown: returns what the first rank's payload consists of.
    """

    bucket: int | None
    message: Message
    breakdown: LazyBreakdown

    def sent(self, ranks: int) -> float:
        """Return the mean bytes that a rank sends in it."""
        message = self.message
        match message.verb:
            case "all_reduce":
                return byte_counts.all_reduce(message.elements * message.itemsize, ranks)
            case "all_gather":
                return byte_counts.all_gather(sum(message.sizes), ranks)
            case "all_to_all":
                return sum(message.sizes) * (ranks - 1) / ranks
            case _:
                return 8 * (ranks - 1)


def step_messages(
    plan: Sequence[BucketLayout], compressor: Compressor, ranks: int, break_even: bool = True, exchange: str = "auto"
) -> list[StepMessage] | None:
    """Return the messages by which a step exchanges its buckets.

    Args:
        plan: the layout of each bucket.
        compressor: what is sent of them.
        ranks: their number.
        break_even: a bucket is all-reduced as dense where that is less.
        exchange: 'gather', 'two_phase' or 'auto'; by nodes, see ``node_messages``.

    Returns:
        The messages; None if their lengths depend on the gradients.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import Dense
        >>> layout = BucketLayout(["w"], [(1000,)], [0], np.float32)
        >>> [message.sent(4) for message in step_messages([layout], Dense(), 4)]
        [6000]
    """
    phases, found = two_phases(exchange, compressor, plan, ranks, break_even), list[StepMessage]()
    for number, layout in enumerate(plan):
        summed, elements = summed_elements(compressor, layout)
        n, itemsize = layout.extent, layout.dtype.itemsize
        breakdown = functools.partial(compressor.expected_breakdown, n, itemsize, layout)
        if phases and number in phases.buckets:
            if summed is not None:
                message = Message("all_reduce", summed, itemsize, uncompressed=summed != n)
                found.append(StepMessage(number, message, breakdown))
            continue
        payload = compressor.payload_bytes(n, itemsize, layout)
        if payload is None:
            return None
        payloads = [payload - elements * itemsize] * ranks
        messages = traffic(compressor, n, itemsize, payloads, summed, break_even)
        found += [StepMessage(number, message, breakdown) for message in messages]
    of_phases = _phase_messages(plan, phases, ranks) if phases else []
    return None if of_phases is None else [*found, *of_phases]


class NodeMessages(NamedTuple):
    """The messages of a step whose buckets are exchanged by nodes.

    Args:
        sums: inside of a node, before.
        between: of the ranks of each number, between the nodes.
        results: inside of a node, behind them.
    """

    sums: list[StepMessage]
    between: list[list[StepMessage]]
    results: list[StepMessage]


def node_messages(
    plan: Sequence[BucketLayout], compressor: Compressor, nodes: int, per_node: int, break_even: bool = True
) -> NodeMessages | None:
    """Return the messages by which a step exchanges its buckets by nodes; None if their lengths depend on gradients.

    Args:
        plan: the layout of each bucket.
        compressor: what is sent of gradients.
        nodes: their number.
        per_node: ranks of a node.
        break_even: as of ``step_messages``.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import Dense
        >>> layout = BucketLayout(["w"], [(1000,)], [0], np.float32)
        >>> found = node_messages([layout], Dense(), nodes=2, per_node=4)
        >>> [[message.sent(2) for message in column] for column in found.between]
        [[4000], [], [], []]
    """
    shares, of_sums, _ = node_exchange(compressor, plan, nodes, per_node, break_even)
    between = []
    for share in shares:
        column = step_messages([plan[k] for k in share], of_sums, nodes, break_even) if share else []
        if column is None:
            return None
        between.append([m if m.bucket is None else m._replace(bucket=share[m.bucket]) for m in column])
    sums, results = (messages_inside(plan, shares, verb) for verb in ("all_to_all", "all_gather"))
    return NodeMessages(sums, between, results)


def messages_inside(plan: Sequence[BucketLayout], shares: Shares, verb: str) -> list[StepMessage]:
    """Return the messages inside of a node by which sums come to their ranks, or results from there.

    Args:
        plan: the layout of each bucket.
        shares: of each rank of a node the numbers of its buckets.
        verb: 'all_to_all' for sums, 'all_gather' for results.
    """
    found = []
    for numbers in rounds(shares):
        sizes = [0 if k is None else plan[k].extent * plan[k].dtype.itemsize for k in numbers]
        payload = sum(sizes) if verb == "all_to_all" else sizes[0]
        found.append(StepMessage(None, Message(verb, sizes=sizes), functools.partial(PayloadBreakdown, payload)))
    return found


def _phase_messages(plan: Sequence[BucketLayout], phases: TwoPhase, ranks: int) -> list[StepMessage] | None:
    """Return the messages of all buckets that are exchanged in two phases; None if they depend on the gradients."""
    shards, codec, found = phases.shards(plan, ranks), phases.codec, []
    for verb, summed in (("all_to_all", False), ("all_gather", True)):
        to_owner: list[list[int]] = [[] for _ in range(ranks)]
        values = indices = 0
        for number, pieces in zip(phases.buckets, shards.of_bucket, strict=True):
            layout = codec.cut(plan[number], ExchangeContext(size=ranks))
            expected = codec.expected_bytes(layout, pieces, summed)
            if expected is None:
                return None
            for piece, nbytes in zip(pieces, expected, strict=True):
                to_owner[piece.owner].append(nbytes.total)
                if piece.owner == 0 or not summed:
                    values, indices = values + nbytes.values, indices + nbytes.indices
        message = Message(verb, sizes=[message_bytes(payloads) for payloads in to_owner])
        found.append(StepMessage(None, message, functools.partial(PayloadBreakdown, values, indices)))
    return found


def summed_elements(compressor: Compressor, layout: BucketLayout) -> tuple[int | None, int]:
    """Return the elements that are summed as they are, as ``traffic`` takes them, and their number."""
    mask = compressor.uncompressed(layout, ExchangeContext())
    if mask is None:
        return None, 0
    chosen = mask.host != 0
    elements = int(layout.records["size"][chosen].sum())
    return (layout.extent if chosen.all() else elements if chosen.any() else None), elements
