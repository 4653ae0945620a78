"""The bytes of a step by formula: to the byte what a ledger would count, without gradients and without ranks."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from distopt.buckets import plan
from distopt.checks import check_int
from distopt.comm.byte_counts import DIRECT
from distopt.comm.ledger import Ledger
from distopt.comm.message import MessageTag
from distopt.comm.meter import Meter
from distopt.comm.ranks import placed
from distopt.compress import ExchangeContext
from distopt.engine.outer_loop import cut
from distopt.exchange.hierarchical import adds_inside, node_sizes
from distopt.exchange.step_traffic import Message, node_messages, step_messages
from distopt.kernels.layout import BucketLayout
from distopt.lab.modes import Mode

T = TypeVar("T")
COUNTS = "payload", "values", "indices", "sent", "received", "between"  # fields of a Forecast that add up
MOST_RANKS = 65536  # whose messages are counted one by one


class Sending(NamedTuple):
    """The messages of one bucket, for predictions of how long they take.

    Attributes:
        elements: the elements of the bucket.
        decompressed: bytes of payloads that arrive to be decompressed: their sum, or those of all ranks.
        collectives: verbs and the bytes that they are given, as ``cost.seconds`` wants them.
        inside: those among the ranks of a node, where gradients are added up inside before they are compressed.
        between: those among the nodes, then; each rank of a node has them for a share of the buckets.

    Example:
        >>> from distopt.lab import Sending
        >>> Sending(1000, 4000, (("all_reduce", 4000),)).collectives
        (('all_reduce', 4000),)
    """

    elements: int
    decompressed: int
    collectives: tuple[tuple[str, int], ...]
    inside: tuple[tuple[str, int], ...] = ()
    between: tuple[tuple[str, int], ...] = ()


class Forecast(NamedTuple):
    """The bytes of one rank, the first, in a step; means where there are several steps.

    Attributes:
        payload: bytes that the rank hands to its communicator.
        values: bytes of values in the payload.
        indices: bytes of indices in the payload.
        sent: bytes that the rank sends over the wire.
        received: bytes that it receives.
        between: the part of ``sent`` that goes to other hosts.
        peak: the part of ``sent`` that one step sends at most: with local steps, that of a fragment's exchange.
        dense: the payload of dense gradients.
        fallen: the numbers of the buckets that are all-reduced as dense ones, because that is less, in one step at
            least.

    Example:
        >>> from distopt.lab import buckets, forecast, mode
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
    peak: float
    dense: int
    fallen: tuple[int, ...]


def forecast(
    buckets: Sequence[BucketLayout],
    mode: Mode,
    ranks: int,
    per_node: int = 1,
    break_even: bool = True,
    exchange: str = "auto",
    logical: int | None = None,
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
        exchange: 'gather', 'two_phase', 'nodes' or 'auto'.
        logical: how many ranks live in ``ranks`` processes, of which the first one, which has most, is counted; None
            for one in each.

    Raises:
        TypeError: a number is no integer.
        ValueError: the bytes depend on the gradients, or a number is out of range.

    Example:
        >>> from distopt.lab import buckets, forecast, mode
        >>> found = forecast(buckets([("weight", (1000, 1000))]), mode("dense"), ranks=4, per_node=2)
        >>> found.payload, found.sent, found.between
        (4000000, 6000000, 4000000)
    """
    apart = exchanges(buckets, mode)
    ledgers = [exchange_ledger(those, mode, ranks, per_node, break_even, exchange, logical) for those in apart]
    found = [summary(ledger, those, mode, 1) for ledger, those in zip(ledgers, apart, strict=True)]
    if logical is not None:  # so many ranks send as dense what as many processes do
        found[0] = found[0]._replace(fallen=forecast(buckets, mode, logical, 1, break_even, exchange).fallen)
    every = mode.windows.every
    if every == 1:
        return found[0]
    means = {name: _mean(sum(getattr(f, name) for f in found), every) for name in COUNTS}
    dense = sum(bucket.extent * bucket.dtype.itemsize for bucket in buckets)
    fallen = tuple(sorted({number for f in found for number in f.fallen}))
    return Forecast(**means, peak=max(f.sent for f in found), dense=dense, fallen=fallen)


def exchanges(buckets: Sequence[BucketLayout], mode: Mode) -> list[list[BucketLayout]]:
    """Return the buckets of each exchange of a window: one exchange of all, or those of its fragments.

    A bucket that two fragments share is cut where the second one begins.

    Args:
        buckets: the layouts of the buckets, in plan order.
        mode: the compression mode.

    Example:
        >>> from distopt.lab import buckets, exchanges, mode
        >>> there = buckets([("a", (300,)), ("b", (300,))])
        >>> [[bucket.names for bucket in those] for those in exchanges(there, mode("local=10/2"))]
        [[('a',)], [('b',)]]
    """
    if mode.windows.fragments == 1:
        return [list(buckets)]
    members = [(number, row) for number, bucket in enumerate(buckets) for row in range(len(bucket.names))]
    nbytes = [math.prod(buckets[number].shapes[row]) * buckets[number].stored.itemsize for number, row in members]
    found = []
    for run in cut(nbytes, mode.windows.fragments):
        rows_of: dict[int, list[int]] = {}
        for number, row in (members[k] for k in run):
            rows_of.setdefault(number, []).append(row)
        if run:
            found.append([_part(buckets[number], rows) for number, rows in rows_of.items()])
    return found


def _part(bucket: BucketLayout, rows: Sequence[int]) -> BucketLayout:
    """Return a bucket of some of a bucket's members."""
    names, shapes = [bucket.names[row] for row in rows], [bucket.shapes[row] for row in rows]
    sizes = [math.prod(shape) for shape in shapes]
    (spec,) = plan(names, sizes, [bucket.stored] * len(names), sum(sizes)).buckets
    return BucketLayout(names, shapes, spec.offsets, bucket.stored)


def summary(ledger: Ledger, buckets: Sequence[BucketLayout], mode: Mode, steps: int) -> Forecast:
    """Return the bytes of the mean step of a ledger.

    Args:
        ledger: the ledger of one rank.
        buckets: the layouts of the buckets, in plan order.
        mode: the compression mode of the steps.
        steps: the number of steps in the ledger.

    Example:
        >>> from distopt.lab import buckets, forecast, mode, step_ledger, summary
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
    masks = {k: mode.compressor.uncompressed(buckets[k], ExchangeContext()) for k in summed}
    fallen = [k for k, mask in masks.items() if mask is None or not mask.host.all()]
    return Forecast(
        **{name: _mean(count, steps) for name, count in total.items()},
        between=_mean(between, steps),
        peak=_mean(total["sent"], steps),
        dense=sum(nbytes),
        fallen=() if mode.compressor.traits.summable else tuple(sorted(fallen)),
    )


def step_ledger(
    buckets: Sequence[BucketLayout],
    mode: Mode,
    ranks: int,
    per_node: int = 1,
    break_even: bool = True,
    exchange: str = "auto",
    logical: int | None = None,
) -> Ledger:
    """Return the first rank's ledger of one step, without tensors and ideal bits, which depend on the data.

    With local steps it is that of a window, whose exchanges are all there.

    Args:
        buckets: the layouts of the buckets, in plan order.
        mode: the compression mode.
        ranks: the number of ranks.
        per_node: ranks on each host.
        break_even: whether a bucket is all-reduced as dense where that is less.
        exchange: 'gather', 'two_phase', 'nodes' or 'auto'.
        logical: as of ``forecast``.

    Raises:
        TypeError: a number is no integer.
        ValueError: the bytes depend on the gradients, or a number is out of range.

    Example:
        >>> from distopt.lab import buckets, mode, step_ledger
        >>> step_ledger(buckets([("weight", (1000, 1000))]), mode("dense"), ranks=4).report()
        {'all_reduce': {'calls': 1, 'payload': 4000000, 'wire': 6000000}}
    """
    ledger = Ledger()
    for those in exchanges(buckets, mode):
        exchange_ledger(those, mode, ranks, per_node, break_even, exchange, logical, ledger)
    return ledger


def exchange_ledger(
    buckets: Sequence[BucketLayout],
    mode: Mode,
    ranks: int,
    per_node: int,
    break_even: bool,
    exchange: str,
    logical: int | None,
    ledger: Ledger | None = None,
) -> Ledger:
    """Return the first rank's ledger of one exchange of these buckets, or write it to the one that is given."""
    ledger = Ledger() if ledger is None else ledger
    ranks, per_node = check_int("ranks", ranks, least=1), check_int("per_node", per_node, least=1)
    if ranks > MOST_RANKS:
        raise ValueError(f"ranks must be at most {MOST_RANKS}, got {ranks}")
    hosts = [rank // per_node for rank in range(ranks)]
    if logical is None and adds_inside(exchange, mode.compressor, buckets, hosts):
        sizes = node_sizes(hosts)
        found = _known(node_messages(buckets, mode.compressor, sizes, break_even), mode)
        inside = Meter(0, sizes[0], [0] * sizes[0], DIRECT, ledger)
        between = Meter(0, len(sizes), range(len(sizes)), DIRECT, ledger)
        sent = [(inside, found.sums), (between, found.between[0]), (inside, found.results)]
    else:
        found_by_all = _of_step(buckets, mode, ranks, break_even, exchange, logical)
        sent = [(Meter(0, ranks, hosts, DIRECT, ledger), found_by_all)]
    for meter, those in sent:
        for message in those:
            with meter.tagged(MessageTag("gradients", 0, message.bucket)):
                message.write(meter)
    return ledger


def _of_step(
    buckets: Sequence[BucketLayout], mode: Mode, ranks: int, break_even: bool, exchange: str, logical: int | None
) -> list[Message]:
    """Return the messages of a step that does not go by nodes."""
    if logical is not None:
        if not ranks <= logical <= MOST_RANKS:
            raise ValueError(f"logical must be from {ranks}, the number of processes, to {MOST_RANKS}, got {logical}")
        if mode.windows.every > 1:
            raise ValueError(f"modes must exchange gradients at each step with logical ranks, got {mode.name}")
    there = placed(logical, [[]] * ranks) if logical and logical > ranks else ()
    return _known(step_messages(buckets, mode.compressor, logical or ranks, break_even, exchange, there), mode)


def _known(found: T | None, mode: Mode) -> T:
    """Return the messages of a mode; ValueError for None, if they depend on the gradients."""
    if found is None:
        raise ValueError(
            f"mode must send as much whatever the gradients are, got {mode.name}; record some (distopt record) for "
            "distopt volume --gradients, or count those of distopt.simulate"
        )
    return found


def sendings(
    buckets: Sequence[BucketLayout],
    mode: Mode,
    ranks: int,
    break_even: bool = True,
    exchange: str = "auto",
    per_node: int = 1,
    logical: int | None = None,
) -> list[Sending]:
    """Return the messages that ``forecast`` counts, for predictions of how long they take.

    Args:
        buckets: the layouts of the buckets, in plan order.
        mode: the compression mode.
        ranks: the number of ranks.
        break_even: whether a bucket is all-reduced as dense where that is less.
        exchange: 'gather', 'two_phase', 'nodes' or 'auto'.
        per_node: ranks on each host.
        logical: as of ``forecast``.

    Returns:
        One ``Sending`` per bucket, and a last one of no elements for messages of all buckets, if there are any; with
        local steps those of all exchanges of a window.

    Raises:
        ValueError: the bytes depend on the gradients.

    Example:
        >>> from distopt.lab import buckets, mode, sendings
        >>> [sending.collectives for sending in sendings(buckets([("weight", (1000, 1000))]), mode("dense"), ranks=4)]
        [(('all_reduce', 4000000),)]
    """
    if exchange == "nodes" and per_node == 1:
        exchange = "auto"
    found, hosts = list[Sending](), [rank // per_node for rank in range(ranks)]
    for those in exchanges(buckets, mode):
        calls: dict[int | None, list[tuple[str, int]]] = {number: [] for number in range(len(those))}
        by_nodes = logical is None and adds_inside(exchange, mode.compressor, those, hosts)
        if by_nodes:
            sizes = node_sizes(hosts)
            of_nodes, size = _known(node_messages(those, mode.compressor, sizes, break_even), mode), len(sizes)
            sent = [message for column in of_nodes.between for message in column]
        else:
            sent, size = _of_step(those, mode, ranks, break_even, exchange, logical), ranks
        for message in sent:
            calls.setdefault(message.bucket, []).append(_call(message, size))
        for number, sends in calls.items():
            passes = -(-(logical or ranks) // ranks)  # of the ranks of one process
            sending = _sending(0 if number is None else passes * those[number].extent, mode, sends)
            if by_nodes:
                elements, decompressed, between = (*sending[:2], sending.collectives)
                nbytes = 0 if number is None else elements * those[number].dtype.itemsize
                inside = ("reduce_scatter", nbytes), ("all_gather", nbytes)
                share = min(sizes)  # of a rank, which compresses and decompresses no more
                sending = Sending(elements // share, decompressed // share, (), inside, between)
            found.append(sending)
    return found


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
        >>> from distopt.lab import buckets, mode, observed, sendings, step_ledger
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


def _sending(elements: int, mode: Mode, calls: Sequence[tuple[str, int]]) -> Sending:
    verbs = ("all_reduce", "all_gather") if mode.compressor.traits.summable else ("all_gather", "all_to_all")
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


def _mean(count: int, steps: int) -> float:
    return count // steps if count % steps == 0 else count / steps
