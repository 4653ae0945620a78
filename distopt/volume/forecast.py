"""The bytes of a step by formula: to the byte what a ledger would count, without gradients and without ranks."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from distopt.checks import check_int
from distopt.comm.byte_counts import DIRECT
from distopt.comm.ledger import Ledger
from distopt.comm.message import MessageTag
from distopt.comm.meter import Meter
from distopt.compress import Compressor, ExchangeContext
from distopt.exchange.breakdown import forecast_breakdown
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
        (80000, 40000, 40000, 4000000)
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
    buckets: Sequence[BucketLayout], mode: Mode, ranks: int, per_node: int = 1, break_even: bool = True
) -> Forecast:
    """Count what ``step(loss, mode.compressor, break_even)`` sends of gradients in these buckets.

    Wire bytes are those of a direct exchange (``cost.wire``).

    Args:
        buckets: the layouts of the buckets, in plan order.
        mode: the compression mode.
        ranks: the number of ranks.
        per_node: ranks on each host; bytes between these do not count as ``between``.
        break_even: whether a bucket is all-reduced as dense where that is less.

    Raises:
        TypeError: a number is no integer.
        ValueError: the bytes depend on the gradients, or a number is out of range.

    Example:
        >>> from distopt.volume import buckets, forecast, mode
        >>> found = forecast(buckets([("weight", (1000, 1000))]), mode("dense"), ranks=4, per_node=2)
        >>> found.payload, found.sent, found.between
        (4000000, 6000000, 4000000)
    """
    ledger = step_ledger(buckets, mode, ranks, per_node, break_even)
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
    summed = {row["bucket"] for row in rows if row["verb"] == "all_reduce" and row["payload"] >= nbytes[row["bucket"]]}
    fallen = [k for k in summed if _summed_elements(mode.compressor, buckets[k])[0] != buckets[k].extent]
    return Forecast(
        **{name: _mean(count, steps) for name, count in total.items()},
        between=_mean(between, steps),
        dense=sum(nbytes),
        fallen=() if mode.compressor.summable else tuple(sorted(fallen)),
    )


def step_ledger(
    buckets: Sequence[BucketLayout], mode: Mode, ranks: int, per_node: int = 1, break_even: bool = True
) -> Ledger:
    """Return the first rank's ledger of one step, without tensors and ideal bits, which depend on the data.

    Args:
        buckets: the layouts of the buckets, in plan order.
        mode: the compression mode.
        ranks: the number of ranks.
        per_node: ranks on each host.
        break_even: whether a bucket is all-reduced as dense where that is less.

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
    for number, bucket in enumerate(buckets):
        breakdown = functools.partial(forecast_breakdown, mode.compressor, bucket.extent, bucket.dtype.itemsize, bucket)
        with meter.tagged(MessageTag("gradients", 0, number)):
            for message in messages(bucket, mode, ranks, break_even):
                message.write(meter, breakdown)
    return ledger


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
        raise ValueError(
            f"mode must send as much whatever the gradients are, got {mode.name}; record some (distopt record) for "
            "distopt volume --gradients, or count those of distopt.simulate"
        )
    summed, elements = _summed_elements(compressor, bucket)
    payloads = [payload - elements * itemsize] * ranks
    return traffic(compressor, bucket.extent, itemsize, payloads, summed, break_even)


def sendings(buckets: Sequence[BucketLayout], mode: Mode, ranks: int, break_even: bool = True) -> list[Sending]:
    """Return the messages that ``forecast`` counts, for predictions of how long they take.

    Args:
        buckets: the layouts of the buckets, in plan order.
        mode: the compression mode.
        ranks: the number of ranks.
        break_even: whether a bucket is all-reduced as dense where that is less.

    Returns:
        One ``Sending`` per bucket.

    Raises:
        ValueError: the bytes depend on the gradients.

    Example:
        >>> from distopt.volume import buckets, mode, sendings
        >>> sendings(buckets([("weight", (1000, 1000))]), mode("dense"), ranks=4)
        [Sending(elements=1000000, decompressed=4000000, collectives=(('all_reduce', 4000000),))]
    """
    sends = []
    for bucket in buckets:
        calls = [_call(message, ranks) for message in messages(bucket, mode, ranks, break_even)]
        sends.append(_sending(bucket, mode, calls))
    return sends


def observed(ledger: Ledger, buckets: Sequence[BucketLayout], mode: Mode, steps: int) -> list[Sending]:
    """Return the messages of the mean step of a ledger, as ``sendings`` does by formula.

    Args:
        ledger: the ledger of one rank.
        buckets: the layouts of the buckets, in plan order.
        mode: the compression mode of the steps.
        steps: the number of steps in the ledger.

    Returns:
        One ``Sending`` per bucket.

    Example:
        >>> from distopt.volume import buckets, mode, observed, sendings, step_ledger
        >>> there, topk = buckets([("weight", (1000, 1000))]), mode("topk=0.01")
        >>> observed(step_ledger(there, topk, ranks=4), there, topk, steps=1) == sendings(there, topk, ranks=4)
        True
    """
    calls: list[list[tuple[str, int]]] = [[] for _ in buckets]
    for row in ledger.by("phase", "bucket", "verb"):
        if row["phase"] == "gradients":
            nbytes = row["payload"] + (0 if row["verb"] == "all_reduce" else row["received"])  # those of all ranks
            calls[row["bucket"]].append((row["verb"], nbytes // steps))
    return [_sending(bucket, mode, sends) for bucket, sends in zip(buckets, calls, strict=True)]


def _sending(bucket: BucketLayout, mode: Mode, calls: Sequence[tuple[str, int]]) -> Sending:
    verb = "all_reduce" if mode.compressor.summable else "all_gather"
    timed = [("all_gather" if name == "lengths" else name, nbytes) for name, nbytes in calls]
    return Sending(bucket.extent, sum(nbytes for name, nbytes in calls if name == verb), tuple(timed))


def _call(message: Message, ranks: int) -> tuple[str, int]:
    match message.verb:
        case "all_reduce":
            return message.verb, message.elements * message.itemsize
        case "all_gather":
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
