"""The bytes of a step by formula: to the byte what a ledger would count, without gradients and without ranks."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from distopt.checks import check_int
from distopt.comm.byte_counts import DIRECT
from distopt.comm.ledger import Ledger
from distopt.comm.message import LazyBreakdown, MessageTag, PayloadBreakdown
from distopt.comm.meter import Meter
from distopt.compress import Compressor, ExchangeContext
from distopt.exchange import TwoPhase, two_phases
from distopt.exchange.breakdown import forecast_breakdown
from distopt.exchange.told import message_bytes
from distopt.exchange.traffic import Message, traffic
from distopt.kernels.layout import BucketLayout
from distopt.volume.modes import Mode

MOST_RANKS = 65536  # whose messages are counted one by one


class Sending(NamedTuple):
    """The messages of one bucket, for predictions of how long they take.

    Attributes:
        elements: the elements of the bucket.
        decompressed: bytes of payloads that arrive to be decompressed: their sum, or those of all ranks.
        collectives: verbs and the bytes that they are given, as ``cost.seconds`` wants them.

    Example:
        >>> from distopt.volume import Sending
        >>> Sending(1000, 4000, (("all_reduce", 4000),)).collectives
        (('all_reduce', 4000),)
    """

    elements: int
    decompressed: int
    collectives: tuple[tuple[str, int], ...]


class Forecast(NamedTuple):
    """The bytes of one rank, the first, in a step; means where there are several steps.

    Attributes:
        payload: bytes that the rank hands to its communicator.
        values: bytes of values in the payload.
        indices: bytes of indices in the payload.
        sent: bytes that the rank sends over the wire.
        received: bytes that it receives.
        between: the part of ``sent`` that goes to other hosts.
        dense: the payload of dense gradients.
        fallen: the numbers of the buckets that are all-reduced as dense ones, because that is less, in one step at
            least.

    Example:
        >>> from distopt.volume import buckets, forecast, mode
        >>> found = forecast(buckets([("weight", (1000, 1000))]), mode("dgc=0.01"), ranks=4)
        >>> found.payload, found.values, found.indices, found.dense
        (63436, 49996, 13420, 4000000)
    """

    payload: float
    values: float
    indices: float
    sent: float
    received: float
    between: float
    dense: int
    fallen: tuple[int, ...]


def forecast(
    buckets: Sequence[BucketLayout],
    mode: Mode,
    ranks: int,
    per_node: int = 1,
    break_even: bool = True,
    exchange: str = "auto",
) -> Forecast:
    """Count what ``step(loss, mode.compressor, break_even, exchange)`` sends of gradients in these buckets.

    Wire bytes are those of a direct exchange (``cost.wire``).  How long the messages of entries are in two phases
    depends on where they are: here they are spread evenly over what they are chosen from.

    Args:
        buckets: the layouts of the buckets, in plan order.
        mode: the compression mode.
        ranks: the number of ranks.
        per_node: ranks on each host; bytes between these do not count as ``between``.
        break_even: whether a bucket is all-reduced as dense where that is less.
        exchange: 'gather', 'two_phase' or 'auto'.

    Raises:
        TypeError: a number is no integer.
        ValueError: the bytes depend on the gradients, or a number is out of range.

    Example:
        >>> from distopt.volume import buckets, forecast, mode
        >>> found = forecast(buckets([("weight", (1000, 1000))]), mode("dense"), ranks=4, per_node=2)
        >>> found.payload, found.sent, found.between
        (4000000, 6000000, 4000000)
    """
    ledger = step_ledger(buckets, mode, ranks, per_node, break_even, exchange)
    return summary(ledger, buckets, mode, 1)


def summary(ledger: Ledger, buckets: Sequence[BucketLayout], mode: Mode, steps: int) -> Forecast:
    """Return the bytes of the mean step of a ledger.

    Args:
        ledger: the ledger of one rank.
        buckets: the layouts of the buckets, in plan order.
        mode: the compression mode of the steps.
        steps: the number of steps in the ledger.

    Example:
        >>> from distopt.volume import buckets, forecast, mode, step_ledger, summary
        >>> there, topk = buckets([("weight", (1000, 1000))]), mode("topk=0.01")
        >>> summary(step_ledger(there, topk, ranks=4), there, topk, steps=1) == forecast(there, topk, ranks=4)
        True
    """
    rows = [row for row in ledger.by("phase", "bucket", "verb") if row["phase"] == "gradients"]
    total = {name: sum(row[name] for row in rows) for name in ("payload", "values", "indices", "sent", "received")}
    between = sum(row["sent_between"] for row in rows)
    nbytes = [bucket.extent * bucket.dtype.itemsize for bucket in buckets]
    reduced = [row for row in rows if row["verb"] == "all_reduce"]
    summed = {row["bucket"] for row in reduced if row["payload"] >= nbytes[row["bucket"]]}
    fallen = [k for k in summed if _summed_elements(mode.compressor, buckets[k])[0] != buckets[k].extent]
    return Forecast(
        **{name: _mean(count, steps) for name, count in total.items()},
        between=_mean(between, steps),
        dense=sum(nbytes),
        fallen=() if mode.compressor.summable else tuple(sorted(fallen)),
    )


def step_ledger(
    buckets: Sequence[BucketLayout],
    mode: Mode,
    ranks: int,
    per_node: int = 1,
    break_even: bool = True,
    exchange: str = "auto",
) -> Ledger:
    """Return the first rank's ledger of one step, without tensors and ideal bits, which depend on the data.

    Args:
        buckets: the layouts of the buckets, in plan order.
        mode: the compression mode.
        ranks: the number of ranks.
        per_node: ranks on each host.
        break_even: whether a bucket is all-reduced as dense where that is less.
        exchange: 'gather', 'two_phase' or 'auto'.

    Raises:
        TypeError: a number is no integer.
        ValueError: the bytes depend on the gradients, or a number is out of range.

    Example:
        >>> from distopt.volume import buckets, mode, step_ledger
        >>> step_ledger(buckets([("weight", (1000, 1000))]), mode("dense"), ranks=4).report()
        {'all_reduce': {'calls': 1, 'payload': 4000000, 'wire': 6000000}}
    """
    ledger, ranks, per_node = Ledger(), check_int("ranks", ranks, least=1), check_int("per_node", per_node, least=1)
    if ranks > MOST_RANKS:
        raise ValueError(f"ranks must be at most {MOST_RANKS}, got {ranks}")
    meter = Meter(0, ranks, [rank // per_node for rank in range(ranks)], DIRECT, ledger)
    phases = two_phases(exchange, mode.compressor, buckets, ranks, break_even)
    for number, bucket in enumerate(buckets):
        breakdown = functools.partial(forecast_breakdown, mode.compressor, bucket.extent, bucket.dtype.itemsize, bucket)
        with meter.tagged(MessageTag("gradients", 0, number)):
            alone = not phases or number not in phases.buckets
            for message in messages(bucket, mode, ranks, break_even) if alone else summed_apart(bucket, mode):
                message.write(meter, breakdown)
    if phases:
        with meter.tagged(MessageTag("gradients")):
            for message, consists in phase_messages(buckets, phases, mode, ranks):
                message.write(meter, consists)
    return ledger


def phase_messages(
    buckets: Sequence[BucketLayout], phases: TwoPhase, mode: Mode, ranks: int
) -> list[tuple[Message, LazyBreakdown]]:
    """Return the messages of all buckets that are exchanged in two phases, and what the first rank's consist of.

    Args:
        buckets: the layouts of the buckets, in plan order.
        phases: the exchange.
        mode: the compression mode.
        ranks: the number of ranks.

    Raises:
        ValueError: the lengths of the messages depend on the gradients.
    """
    shards, codec = phases.shards(buckets, ranks), phases.codec
    found: list[tuple[Message, LazyBreakdown]] = []
    for verb, summed in (("all_to_all", False), ("all_gather", True)):
        to_owner: list[list[int]] = [[] for _ in range(ranks)]
        values = indices = 0
        for number, pieces in zip(phases.buckets, shards.of_bucket, strict=True):
            layout = codec.cut(buckets[number], ExchangeContext(size=ranks))
            expected = codec.expected_bytes(layout, pieces, summed)
            if expected is None:
                raise _depends(mode)
            for piece, nbytes in zip(pieces, expected, strict=True):
                to_owner[piece.owner].append(nbytes.total)
                if piece.owner == 0 or not summed:
                    values, indices = values + nbytes.values, indices + nbytes.indices
        message = Message(verb, sizes=[message_bytes(payloads) for payloads in to_owner])
        found.append((message, functools.partial(PayloadBreakdown, values, indices)))
    return found


def summed_apart(bucket: BucketLayout, mode: Mode) -> list[Message]:
    """Return the message by which members are summed that the compressor leaves as they are, if there are any."""
    summed, _ = _summed_elements(mode.compressor, bucket)
    itemsize = bucket.dtype.itemsize
    return [] if summed is None else [Message("all_reduce", summed, itemsize, uncompressed=summed != bucket.extent)]


def messages(bucket: BucketLayout, mode: Mode, ranks: int, break_even: bool = True) -> list[Message]:
    """Return the messages of a bucket in one step.

    Args:
        bucket: the bucket's layout.
        mode: the compression mode.
        ranks: the number of ranks.
        break_even: whether the bucket is all-reduced as dense where that is less.

    Raises:
        ValueError: the lengths of the messages depend on the gradients; the text has a remedy.
    """
    compressor, itemsize = mode.compressor, bucket.dtype.itemsize
    payload = compressor.payload_bytes(bucket.extent, itemsize, bucket)
    if payload is None:
        raise _depends(mode)
    summed, elements = _summed_elements(compressor, bucket)
    payloads = [payload - elements * itemsize] * ranks
    return traffic(compressor, bucket.extent, itemsize, payloads, summed, break_even)


def sendings(
    buckets: Sequence[BucketLayout], mode: Mode, ranks: int, break_even: bool = True, exchange: str = "auto"
) -> list[Sending]:
    """Return the messages that ``forecast`` counts, for predictions of how long they take.

    Args:
        buckets: the layouts of the buckets, in plan order.
        mode: the compression mode.
        ranks: the number of ranks.
        break_even: whether a bucket is all-reduced as dense where that is less.
        exchange: 'gather', 'two_phase' or 'auto'.

    Returns:
        One ``Sending`` per bucket, and a last one of no elements for messages of all buckets, if there are any.

    Raises:
        ValueError: the bytes depend on the gradients.

    Example:
        >>> from distopt.volume import buckets, mode, sendings
        >>> sendings(buckets([("weight", (1000, 1000))]), mode("dense"), ranks=4)
        [Sending(elements=1000000, decompressed=4000000, collectives=(('all_reduce', 4000000),))]
    """
    phases, sends = two_phases(exchange, mode.compressor, buckets, ranks, break_even), []
    for number, bucket in enumerate(buckets):
        alone = not phases or number not in phases.buckets
        found = messages(bucket, mode, ranks, break_even) if alone else summed_apart(bucket, mode)
        sends.append(_sending(bucket.extent, mode, [_call(message, ranks) for message in found]))
    if phases:
        together = [_call(message, ranks) for message, _ in phase_messages(buckets, phases, mode, ranks)]
        sends.append(_sending(0, mode, together))
    return sends


def observed(ledger: Ledger, buckets: Sequence[BucketLayout], mode: Mode, steps: int) -> list[Sending]:
    """Return the messages of the mean step of a ledger, as ``sendings`` does by formula.

    Args:
        ledger: the ledger of one rank.
        buckets: the layouts of the buckets, in plan order.
        mode: the compression mode of the steps.
        steps: the number of steps in the ledger.

    Returns:
        One ``Sending`` per bucket, and a last one of no elements for messages of all buckets, if there are any.

    Example:
        >>> from distopt.volume import buckets, mode, observed, sendings, step_ledger
        >>> there, topk = buckets([("weight", (1000, 1000))]), mode("topk=0.01")
        >>> observed(step_ledger(there, topk, ranks=2), there, topk, steps=1) == sendings(there, topk, ranks=2)
        True
    """
    calls: dict[int | None, list[tuple[str, int]]] = {number: [] for number in range(len(buckets))}
    for row in ledger.by("phase", "bucket", "verb"):
        if row["phase"] == "gradients":
            more = row["received"] if row["verb"] in ("all_gather", "lengths") else 0  # those of all ranks
            calls.setdefault(row["bucket"], []).append((row["verb"], (row["payload"] + more) // steps))
    return [_sending(0 if k is None else buckets[k].extent, mode, sends) for k, sends in calls.items()]


def _depends(mode: Mode) -> ValueError:
    return ValueError(
        f"mode must send as much whatever the gradients are, got {mode.name}; record some (distopt record) for "
        "distopt volume --gradients, or count those of distopt.simulate"
    )


def _sending(elements: int, mode: Mode, calls: Sequence[tuple[str, int]]) -> Sending:
    verbs = ("all_reduce",) if mode.compressor.summable else ("all_gather", "all_to_all")
    timed = [("all_gather" if name == "lengths" else name, nbytes) for name, nbytes in calls]
    return Sending(elements, sum(nbytes for name, nbytes in calls if name in verbs), tuple(timed))


def _call(message: Message, ranks: int) -> tuple[str, int]:
    match message.verb:
        case "all_reduce":
            return message.verb, message.elements * message.itemsize
        case "all_gather" | "all_to_all":
            return message.verb, sum(message.sizes)
        case _:
            return message.verb, 8 * ranks


def _summed_elements(compressor: Compressor, bucket: BucketLayout) -> tuple[int | None, int]:
    """Return the elements that are summed as they are, as ``traffic`` takes them, and their number."""
    mask = compressor.uncompressed(bucket, ExchangeContext())
    if mask is None:
        return None, 0
    chosen = mask.host != 0
    elements = int(bucket.records["size"][chosen].sum())
    return (bucket.extent if chosen.all() else elements if chosen.any() else None), elements


def _mean(count: int, steps: int) -> float:
    return count // steps if count % steps == 0 else count / steps
