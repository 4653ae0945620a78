"""The bytes of a step by formula: to the byte what a ledger would count, without gradients and without ranks."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from distopt.comm.meter import Meter
from distopt.compress import At, Compressor
from distopt.compress.compressor import forecast as planned
from distopt.cost import DIRECT
from distopt.exchange.traffic import Message, traffic
from distopt.ledger import Ledger, Purpose
from distopt.numbers import whole
from distopt.tables import Members
from distopt.volume.modes import Mode

MOST_RANKS = 65536  # whose messages are counted one by one


class Sending(NamedTuple):
    """What one bucket is on the wire, for who asks how long that takes.

    ``collectives`` are verbs and the bytes that they are given, as ``cost.seconds`` wants them; ``decompressed`` are
    the bytes of payloads that arrive to be decompressed: their sum, or those of all ranks.
    """

    elements: int
    decompressed: int
    collectives: tuple[tuple[str, int], ...]


class Forecast(NamedTuple):
    """A step: bytes of one rank, the first.  ``sent`` of it go over the wire, ``between`` of these to other hosts.

    ``dense`` is the payload of dense gradients; ``fallen`` are the numbers of the buckets that are all-reduced as dense
    ones, because that is less, in one step at least.
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
    buckets: Sequence[Members], mode: Mode, ranks: int, per_node: int = 1, break_even: bool = True
) -> Forecast:
    """What ``step(loss, mode.compressor, break_even)`` sends, of gradients in these buckets.

    Wire bytes are those of a direct exchange (``cost.wire``).  Raises ValueError if they depend on the data.
    """
    ledger = written(buckets, mode, ranks, per_node, break_even)
    return summary(ledger, buckets, mode, 1)


def summary(ledger: Ledger, buckets: Sequence[Members], mode: Mode, steps: int) -> Forecast:
    """A mean step, of a ledger of so many."""
    rows = [row for row in ledger.by("phase", "bucket", "verb") if row["phase"] == "gradients"]
    total = {name: sum(row[name] for row in rows) for name in ("payload", "values", "indices", "sent", "received")}
    between = sum(row["sent_between"] for row in rows)
    nbytes = [bucket.extent * bucket.dtype.itemsize for bucket in buckets]
    summed = {row["bucket"] for row in rows if row["verb"] == "all_reduce" and row["payload"] >= nbytes[row["bucket"]]}
    fallen = [k for k in summed if _whole(mode.compressor, buckets[k])[0] != buckets[k].extent]
    return Forecast(
        **{name: _mean(count, steps) for name, count in total.items()},
        between=_mean(between, steps),
        dense=sum(nbytes),
        fallen=() if mode.compressor.summable else tuple(sorted(fallen)),
    )


def written(buckets: Sequence[Members], mode: Mode, ranks: int, per_node: int = 1, break_even: bool = True) -> Ledger:
    """The ledger of such a step, of the first rank; but for what is in tensors, and ideal, which depend on the data."""
    ledger, ranks, per_node = Ledger(), whole("ranks", ranks, least=1), whole("per_node", per_node, least=1)
    if ranks > MOST_RANKS:
        raise ValueError(f"ranks must be at most {MOST_RANKS}, got {ranks}")
    meter = Meter(0, ranks, [rank // per_node for rank in range(ranks)], DIRECT, ledger)
    for number, bucket in enumerate(buckets):
        look = functools.partial(planned, mode.compressor, bucket.extent, bucket.dtype.itemsize, bucket)
        with meter.on_behalf_of(Purpose("gradients", 0, number)):
            for message in messages(bucket, mode, ranks, break_even):
                message.write(meter, look)
    return ledger


def messages(bucket: Members, mode: Mode, ranks: int, break_even: bool = True) -> list[Message]:
    """Those of a bucket; ValueError, which says what to do, if their lengths depend on the data."""
    compressor, itemsize = mode.compressor, bucket.dtype.itemsize
    payload = compressor.payload_bytes(bucket.extent, itemsize, bucket)
    if payload is None:
        raise ValueError(
            f"how much {mode.name} sends depends on the gradients: record some (distopt record) for "
            "distopt volume --gradients, or count those of distopt.simulate"
        )
    summed, elements = _whole(compressor, bucket)
    payloads = [payload - elements * itemsize] * ranks
    return traffic(compressor, bucket.extent, itemsize, payloads, summed, break_even)


def sendings(buckets: Sequence[Members], mode: Mode, ranks: int, break_even: bool = True) -> list[Sending]:
    """What ``forecast`` counts, for who asks how long it takes."""
    found = []
    for bucket in buckets:
        calls = [_call(message, ranks) for message in messages(bucket, mode, ranks, break_even)]
        found.append(_sending(bucket, mode, calls))
    return found


def observed(ledger: Ledger, buckets: Sequence[Members], mode: Mode, ranks: int, steps: int) -> list[Sending]:
    """The same of the mean step of a ledger of so many."""
    calls: list[list[tuple[str, int]]] = [[] for _ in buckets]
    for row in ledger.by("phase", "bucket", "verb"):
        if row["phase"] == "gradients":
            nbytes = row["payload"] + (0 if row["verb"] == "all_reduce" else row["received"])  # those of all ranks
            calls[row["bucket"]].append((row["verb"], nbytes // steps))
    return [_sending(bucket, mode, found) for bucket, found in zip(buckets, calls, strict=True)]


def _sending(bucket: Members, mode: Mode, calls: Sequence[tuple[str, int]]) -> Sending:
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


def _whole(compressor: Compressor, bucket: Members) -> tuple[int | None, int]:
    """The elements that are summed as they are, as ``traffic`` wants them, and how many of them there are."""
    look = getattr(compressor, "whole", None)
    if look is None:
        return None, 0
    chosen = look(bucket, At()).host != 0
    elements = int(bucket.rows["size"][chosen].sum())
    return (bucket.extent if chosen.all() else elements if chosen.any() else None), elements


def _mean(count: int, steps: int) -> float:
    return count // steps if count % steps == 0 else count / steps
