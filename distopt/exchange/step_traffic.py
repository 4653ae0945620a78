"""The messages of a whole step, as far as they depend on no data; entries as if they were spread evenly."""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from distopt.comm import byte_counts
from distopt.comm.message import UNTAGGED, message_bytes
from distopt.comm.meter import Meter
from distopt.compress import BucketContext, Compressor, ExchangeContext
from distopt.exchange.all_gather import Gather, sum_payloads
from distopt.exchange.choice import TwoPhase, two_phases
from distopt.exchange.hierarchical import Shares, node_exchange, rounds
from distopt.exchange.program import Exchange, Lengths, Request, Sum
from distopt.exchange.sharding import cut_for
from distopt.kernels.breakdown import LazyBreakdown, PayloadBreakdown, total
from distopt.kernels.layout import BucketLayout

_nothing = functools.partial(PayloadBreakdown, 0)


class Message(NamedTuple):
    """A collective of a step.

    Args:
        verb: 'all_reduce', 'all_gather', 'all_to_all' or 'lengths'.
        bucket: the number of the bucket; None for a message of several.
        elements: that are summed.
        itemsize: bytes of each of them.
        sizes: bytes that are gathered, by rank, or that every rank sends to each.
        breakdown: returns what the first rank's payload consists of, if it is not summed.
        received: bytes that each sends to the first one, if others than ``sizes`` tell.
    """

    verb: str
    bucket: int | None
    elements: int = 0
    itemsize: int = 0
    sizes: Sequence[int] = ()
    breakdown: LazyBreakdown = _nothing
    received: Sequence[int] = ()

    def sent(self, ranks: int) -> float:
        """Return the mean bytes that a rank sends in it."""
        match self.verb:
            case "all_reduce":
                return byte_counts.all_reduce(self.elements * self.itemsize, ranks)
            case "all_gather":
                return byte_counts.all_gather(sum(self.sizes), ranks)
            case "all_to_all":
                return sum(self.sizes) * (ranks - 1) / ranks
            case _:
                return 8 * (ranks - 1)

    def write(self, meter: Meter) -> None:
        """Write it into a ledger."""
        match self.verb:
            case "all_reduce":
                meter.all_reduce(self.elements, self.itemsize)
            case "all_gather":
                meter.all_gather(self.sizes, self.breakdown)
            case "all_to_all":
                received = self.received or [self.sizes[meter.rank]] * meter.size
                meter.all_to_all(self.sizes, received, self.breakdown)
            case "lengths":
                meter.lengths()


def asked(exchange: Exchange, lengths: Sequence[int]) -> list[Request]:
    """Return what a program asks for where ranks' payloads have these lengths.

    Nothing is sent, and nothing is computed, so that its arrays need no data.
    """
    found: list[Request] = []
    while True:
        try:
            found.append(exchange.send(lengths if found else None))
        except StopIteration:
            return found


def message(request: Request, bucket: int | None, lengths: Sequence[int], breakdown: LazyBreakdown) -> Message:
    """Return the message of a request of a bucket's program, whose payloads have these lengths and this make-up."""
    if isinstance(request, Sum):
        return Message("all_reduce", bucket, request.x.size, request.x.itemsize)
    if isinstance(request, Lengths):
        return Message("lengths", bucket)
    return Message("all_gather", bucket, sizes=lengths, breakdown=breakdown)


def step_messages(
    plan: Sequence[BucketLayout],
    compressor: Compressor,
    ranks: int,
    break_even: bool = True,
    exchange: str = "auto",
    by_process: Sequence[Sequence[int]] = (),
) -> list[Message] | None:
    """Return the messages by which a step exchanges its buckets.

    Args:
        plan: the layout of each bucket.
        compressor: what is sent of them.
        ranks: their number.
        break_even: a bucket is all-reduced as dense where that is less.
        exchange: 'gather', 'two_phase' or 'auto'; by nodes, see ``node_messages``.
        by_process: the ranks of each process, whose messages these are; () where each is one rank.

    Returns:
        The messages; None if their lengths depend on the gradients.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import Dense
        >>> layout = BucketLayout(["w"], [(1000,)], [0], np.float32)
        >>> [message.sent(4) for message in step_messages([layout], Dense(), 4)]
        [6000]
    """
    phases, found = two_phases(exchange, compressor, plan, ranks, break_even), list[Message]()
    here = by_process[0] if by_process else (0,)
    for number, layout in enumerate(plan):
        x, itemsize = _array(layout.extent, layout.dtype.itemsize), layout.dtype.itemsize
        mask = compressor.uncompressed(layout, ExchangeContext())
        chosen = np.zeros(len(layout.names), bool) if mask is None else mask.host != 0
        elements = int(layout.records["size"][chosen].sum())
        summed = Sum(x if chosen.all() else _array(elements, itemsize)) if chosen.any() else None
        if phases and number in phases.buckets:
            found += [message(summed, number, (), _nothing)] if summed else []
            continue
        payload = compressor.payload_bytes(layout.extent, itemsize, layout)
        if payload is None:
            return None
        if compressor.traits.summable:
            if sketched := compressor.sketch_bytes(layout.extent, itemsize, layout):
                found.append(Message("all_reduce", number, sketched // itemsize, itemsize))
            # it has all elements in fewer bytes each, or fewer elements of the bucket's dtype
            all_elements = layout.extent and payload % layout.extent == 0
            size = payload // layout.extent if all_elements else itemsize
            found.append(Message("all_reduce", number, payload // size, size))
            continue
        payload -= elements * itemsize
        context = ExchangeContext(size=ranks, bucket=BucketContext(layout))
        gather = Gather(_array(payload, 1), x, compressor, context, UNTAGGED)
        breakdown = functools.partial(_expected_breakdown, compressor, x, context, len(here))
        for request in asked(sum_payloads(gather, summed, lambda _: None, break_even), [payload] * ranks):
            found.append(message(request, number, [payload] * ranks, breakdown))
    of_phases = _phase_messages(phases, ranks, here) if phases else []
    if of_phases is None:
        return None
    return list(_between(by_process, [*found, *of_phases])) if by_process else [*found, *of_phases]


def _between(by_process: Sequence[Sequence[int]], asked: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages of the first process for what each of the ranks that live in processes asks for."""
    counts = [len(there) for there in by_process]
    for m in asked:
        to_each = counts[0] if m.verb == "all_to_all" else 1
        if m.verb == "all_reduce":
            shares = byte_counts.shares(m.elements, m.itemsize, len(counts))
            sent, received = [counts[0] * share for share in shares], [n * shares[0] for n in counts]
            for verb, sizes, payload in (("all_to_all", sent, sum(sent)), ("all_gather", shares, shares[0])):
                values = functools.partial(PayloadBreakdown, payload)
                yield Message(verb, m.bucket, sizes=sizes, breakdown=values, received=received)
        elif m.verb == "lengths" or m.bucket is None:  # how long payloads are is told before
            told = [8 * n * to_each for n in counts]
            yield Message("all_to_all" if m.verb == "all_to_all" else "all_gather", m.bucket, sizes=told, received=told)
        if m.verb in ("all_gather", "all_to_all"):
            sizes = [message_bytes([m.sizes[rank] for rank in there] * to_each) for there in by_process]
            received = [message_bytes([m.sizes[rank] for rank in by_process[0]] * n) for n in counts]
            yield m._replace(sizes=sizes, received=received)


def _expected_breakdown(compressor: Compressor, x: np.ndarray, context: ExchangeContext, n: int) -> PayloadBreakdown:
    return total([compressor.breakdown(None, x, context)()] * n)


def _array(elements: int, itemsize: int) -> np.ndarray:
    """Return an array of a length and no memory."""
    return np.ndarray((elements,), f"V{itemsize}", bytes(itemsize), strides=(0,))


class NodeMessages(NamedTuple):
    """The messages of a step whose buckets are exchanged by nodes.

    Args:
        sums: inside of the first node, before.
        between: of the ranks of each number, between the nodes.
        results: inside of the first node, after them.
    """

    sums: list[Message]
    between: list[list[Message]]
    results: list[Message]


def node_messages(
    plan: Sequence[BucketLayout], compressor: Compressor, sizes: Sequence[int], break_even: bool = True
) -> NodeMessages | None:
    """Return the messages by which a step exchanges its buckets by nodes; None if their lengths depend on gradients.

    Args:
        plan: the layout of each bucket.
        compressor: what is sent of gradients.
        sizes: the ranks of each node.
        break_even: as of ``step_messages``.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import Dense
        >>> layout = BucketLayout(["w"], [(1000,)], [0], np.float32)
        >>> found = node_messages([layout], Dense(), sizes=[4, 4])
        >>> [[message.sent(2) for message in column] for column in found.between]
        [[4000], [], [], []]
    """
    shares, of_sums, _ = node_exchange(compressor, plan, sizes, break_even)
    between = []
    for share in shares:
        column = step_messages([plan[k] for k in share], of_sums, len(sizes), break_even) if share else []
        if column is None:
            return None
        between.append([m if m.bucket is None else m._replace(bucket=share[m.bucket]) for m in column])
    sums, results = (messages_inside(plan, shares[: sizes[0]], verb) for verb in ("all_to_all", "all_gather"))
    return NodeMessages(sums, between, results)


def messages_inside(plan: Sequence[BucketLayout], shares: Shares, verb: str) -> list[Message]:
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
        found.append(Message(verb, None, sizes=sizes, breakdown=functools.partial(PayloadBreakdown, payload)))
    return found


def _phase_messages(phases: TwoPhase, ranks: int, here: Sequence[int]) -> list[Message] | None:
    """Return the messages of all buckets that are exchanged in two phases; None if they depend on the gradients."""
    shards, codec, found = cut_for(phases.codec, phases.members, ranks, ()), phases.codec, []
    for verb, summed in (("all_to_all", False), ("all_gather", True)):
        to_owner: list[list[int]] = [[] for _ in range(ranks)]
        values = indices = 0
        for layout, pieces in zip(phases.members, shards.of_bucket, strict=True):
            expected = codec.expected_bytes(layout, pieces, summed)
            if expected is None:
                return None
            for piece, nbytes in zip(pieces, expected, strict=True):
                to_owner[piece.owner].append(nbytes.total)
                payloads = here.count(piece.owner) if summed else len(here)
                values, indices = values + payloads * nbytes.values, indices + payloads * nbytes.indices
        breakdown = functools.partial(PayloadBreakdown, values, indices)
        found.append(Message(verb, None, sizes=[message_bytes(nbytes) for nbytes in to_owner], breakdown=breakdown))
    return found
