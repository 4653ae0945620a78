"""The exchange of ranks that take turns in one process: their payloads are added up in rank order."""

import contextlib
import itertools
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from distopt import device, kernels
from distopt.comm import LocalCommunicator
from distopt.comm.communicator import BFLOAT16, HALVES
from distopt.comm.message import MessageTag
from distopt.comm.meter import Meter
from distopt.compress import Compressor, ExchangeContext
from distopt.compress.context import State, layout_of
from distopt.compress.shards import Payload, Piece, ShardCodec, settle
from distopt.exchange.all_reduce import TravellingBucket
from distopt.exchange.cut import Borders
from distopt.exchange.mixed import UncompressedMembers
from distopt.exchange.payload import check_payload
from distopt.exchange.told import message_bytes
from distopt.exchange.traffic import traffic
from distopt.exchange.two_phase import Exchange, Owned, Sum, Sums, ToAll, ToOwners, Watch, program, shards_of
from distopt.kernels.breakdown import LazyBreakdown, PayloadBreakdown

T = TypeVar("T")


class RunningSum:
    """Sum of flat arrays in their order, ((x0 + x1) + x2) + ...; 16-bit numbers are added in float32, rounded once.

    Args:
        alloc: returns memory of so many bytes for the sum.

    Example:
        >>> import numpy as np
        >>> running, x = RunningSum(lambda nbytes: np.empty(nbytes, np.uint8)), np.ones(2, np.float32)
        >>> running.add(x, first=True)
        >>> running.add(2 * x, first=False)
        >>> running.total
        array([3., 3.], dtype=float32)
    """

    def __init__(self, alloc: Callable[[int], np.ndarray]):
        self._alloc, self.total = alloc, np.empty(0)

    def add(self, x: np.ndarray, first: bool) -> None:
        """Add the next rank's array, or begin with the first one's."""
        half = x.dtype in HALVES
        if first:
            dtype = np.dtype(np.float32) if half else x.dtype
            self.total = self._alloc(x.size * dtype.itemsize).view(dtype)
        if half:
            kind, verb = "bfloat16" if x.dtype == BFLOAT16 else "half", "from" if first else "add"
            getattr(kernels, f"{verb}_{kind}")(x, self.total)
        elif first:
            device.copy(self.total, x)
        else:
            kernels.accumulate(x, self.total)

    def write_sum(self, x: np.ndarray) -> None:
        """Overwrite x, of the dtype of what was added, by the sum."""
        if x.dtype in HALVES:
            getattr(kernels, "to_bfloat16" if x.dtype == BFLOAT16 else "to_half")(self.total, x)
        else:
            device.copy(x, self.total)


class SequentialReduce:
    """Exchange of one bucket in one step: ``add`` what each rank sends, in rank order, then ``write_sum``.

    Args:
        compressor: what is sent of the bucket.
        scratch: memory of the bucket, by name and bytes.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import ExchangeContext, TopK
        >>> memory = {}
        >>> scratch = lambda name, nbytes: memory.setdefault(name, np.empty(nbytes, np.uint8))
        >>> turns = SequentialReduce(TopK(0.5), scratch)
        >>> for rank, x in enumerate(np.array([[1, 2], [-3, 0]], np.float32)):
        ...     turns.add(x, {}, ExchangeContext(rank=rank, size=2))
        >>> turns.write_sum(x, ExchangeContext(size=2))
        >>> x
        array([-3.,  2.], dtype=float32)
    """

    def __init__(self, compressor: Compressor, scratch: Callable[[str, int], np.ndarray]):
        self._compressor, self._scratch = compressor, scratch
        self._sum = RunningSum(lambda nbytes: scratch("sum over ranks", nbytes))
        self._sizes: list[int] = []  # of each rank's payload
        self._breakdown: LazyBreakdown = lambda: PayloadBreakdown(0)  # of the first one's
        self._kept: list[np.ndarray] = []  # the payloads of all ranks, where senders are counted
        self._summed: np.ndarray | None = None  # what the last rank brought to be summed
        self._uncompressed: UncompressedMembers | None = None

    def add(self, x: np.ndarray, state: State, context: ExchangeContext) -> None:
        """Add the bucket of one rank, and change what the compressor keeps of it.

        Args:
            x: the rank's bucket, ``(n,)``.
            state: what the compressor keeps of this rank.
            context: the place of the exchange; ``context.rank`` is the rank.
        """
        compressor, first = self._compressor, not self._sizes
        payload = compressor.compress(x, state, context)
        check_payload(payload, compressor, context)
        self._sizes.append(payload.nbytes)
        if compressor.summable:
            self._summed = payload
        elif (mask := compressor.uncompressed(layout_of(x, context), context)) is not None:
            self._uncompressed = UncompressedMembers(x, mask, context)
            self._summed = None if self._uncompressed.none else self._uncompressed.flat
        if self._summed is not None:
            self._sum.add(self._summed, first)
        if self._gathers:
            total = self._entries(x)
            if first:
                device.clear(total)
                self._breakdown = compressor.breakdown(payload, x, context)
            if context.senders:  # who has sent an entry is known when all have
                self._kept.append(device.copied(payload))
            else:
                compressor.decompress(payload, total, context)

    def write_sum(self, x: np.ndarray, context: ExchangeContext) -> None:
        """Overwrite x, the last rank's bucket, by the sum."""
        if self._summed is not None:
            self._sum.write_sum(self._summed)
        if self._compressor.summable:
            assert self._summed is not None
            self._compressor.decompress(self._summed, x, context)
        if self._kept:
            self._compressor.decompress_all(self._kept, self._entries(x), context)
        if self._gathers:
            device.copy(x, self._entries(x))
        if self._gathers and self._uncompressed and not self._uncompressed.none:
            self._uncompressed.put_back()

    def write_messages(self, meter: Meter, x: np.ndarray, tag: MessageTag, break_even: bool) -> None:
        """Write the messages by which ranks would have exchanged this bucket into a ledger."""
        uncompressed = self._uncompressed
        elements = uncompressed.flat.size if uncompressed and not uncompressed.none else None
        for message in traffic(self._compressor, x.size, x.itemsize, self._sizes, elements, break_even):
            members = uncompressed.members if uncompressed and message.uncompressed else tag.members
            with meter.tagged(tag._replace(members=members)):
                message.write(meter, self._breakdown)

    @property
    def _gathers(self) -> bool:
        return not self._compressor.summable and not (self._uncompressed and self._uncompressed.all)

    def _entries(self, x: np.ndarray) -> np.ndarray:
        return self._scratch("sum of entries", x.nbytes).view(x.dtype)


class SequentialExchange(Protocol):
    """The exchange of all buckets of a step: ``add`` those of each rank, in rank order, then ``write_sums``."""

    def add(self, buckets: Sequence[TravellingBucket]) -> None:
        """Add the buckets of the next rank, and change what the compressor keeps of them."""

    def write_sums(self, buckets: Sequence[TravellingBucket], states: Sequence[Sequence[State]]) -> None:
        """Overwrite the buckets by the sums over ranks.

        Args:
            buckets: the arrays as the last rank has left them, with the contexts of the first one.
            states: what compressors keep, by rank and bucket.
        """

    def write_messages(self, meter: Meter, buckets: Sequence[TravellingBucket], tag: MessageTag) -> None:
        """Write the messages by which ranks would have exchanged the buckets into a ledger.

        Args:
            meter: writes them.
            buckets: as of ``write_sums``.
            tag: of messages of all buckets.
        """


class SequentialBuckets:
    """Exchange of one bucket after the other.

    Args:
        compressor: what is sent of them.
        turns: the exchange of each bucket.
        break_even: a bucket is all-reduced as dense where that is less.
    """

    def __init__(self, compressor: Compressor, turns: Sequence[SequentialReduce], break_even: bool):
        self._compressor, self._turns, self._break_even = compressor, turns, break_even

    def add(self, buckets: Sequence[TravellingBucket]) -> None:
        """Add the buckets of the next rank, and change what the compressor keeps of them."""
        for (x, state, context, _), turn in zip(buckets, self._turns, strict=True):
            if self._compressor.stateful:
                settle(x, state, skip_flag=context.skip_flag)
            turn.add(x, state, context)

    def write_sums(self, buckets: Sequence[TravellingBucket], states: Sequence[Sequence[State]]) -> None:
        """Overwrite the buckets by the sums over ranks."""
        for (x, _, context, _), turn in zip(buckets, self._turns, strict=True):
            turn.write_sum(x, context)

    def write_messages(self, meter: Meter, buckets: Sequence[TravellingBucket], tag: MessageTag) -> None:
        """Write the messages of each bucket into a ledger."""
        for (x, _, _, bucket_tag), turn in zip(buckets, self._turns, strict=True):
            turn.write_messages(meter, x, bucket_tag, self._break_even)


class SequentialTwoPhase:
    """``two_phase.program`` of all ranks in lock step: ``add`` the buckets of each, in rank order, then ``write_sums``.

    A rank's payloads are added when it sends them, so that none is kept, and one rank unpacks the sum for all.

    Args:
        compressor: what is sent of the buckets.
        codec: the same, as it takes part.
        owned: of each rank, what it owned of each bucket in the last step; empty at first.
        borders: of the shards, the same at every step.
        tag: of messages of all buckets.
        watches: are shown what each rank sends.

    Example:
        >>> from distopt.comm.message import UNTAGGED
        >>> from distopt.compress import ExchangeContext, TopK
        >>> from distopt.exchange.cut import Borders
        >>> exchange = SequentialTwoPhase(TopK(0.5), TopK(0.5).sharded(), [{}, {}], Borders(), UNTAGGED)
        >>> x, memory = np.empty(2, np.float32), {}
        >>> for rank, gradient in enumerate(([1, 2], [-3, 0])):
        ...     x[:] = gradient
        ...     exchange.add([(x, {}, ExchangeContext(rank=rank, size=2), UNTAGGED)])
        >>> exchange.write_sums([], [])
        >>> x
        array([-3.,  0.], dtype=float32)
    """

    def __init__(
        self,
        compressor: Compressor,
        codec: ShardCodec,
        owned: Sequence[Owned],
        borders: Borders,
        tag: MessageTag,
        watches: Sequence[Watch] = (),
    ):
        self._compressor, self._codec, self._owned = compressor, codec, owned
        self._borders, self._tag, self._watches = borders, tag, watches
        self._alone = LocalCommunicator()  # of no GPU, so that nobody waits for one
        self._ranks: list[Exchange] = []
        self._buckets: Sequence[TravellingBucket] = ()  # of the first rank
        self._sums: list[tuple[Sum, RunningSum]] = []
        self._totals: dict[int, np.ndarray] = {}  # of what has been sent, by bucket
        self._counts: list[np.ndarray] = []  # of entries, by bucket, of each part of its pieces
        self._kept: dict[Piece, list[Payload]] = {}  # of all ranks, where senders are counted
        self._breakdowns: list[LazyBreakdown] = []  # of the first rank's two messages
        self._to_first: list[int] = []  # bytes of what each rank sends to the first one
        self._from_first: list[int] = []  # and of what that sends to each
        self._gathered: list[int] = []  # bytes of messages of the second phase, by owner

    def add(self, buckets: Sequence[TravellingBucket]) -> None:
        """Add the buckets of the next rank, and change what the compressor keeps of them."""
        rank, (_, _, context, _) = len(self._ranks), buckets[0]
        shards = shards_of(buckets, self._codec, self._borders, context.size)
        exchange = program(
            buckets,
            self._compressor,
            self._codec,
            shards,
            self._alone,
            self._owned[rank],
            self._borders,
            self._tag,
            self._watches,
        )
        sums = iter(self._sums)
        asked = next(exchange)
        while isinstance(asked, Sum):  # which it reads at the end, so that it may go on
            if rank == 0:
                self._sums.append((asked, RunningSum(partial(device.empty, dtype=np.uint8, like=asked.x))))
            _, running = self._sums[-1] if rank == 0 else next(sums)
            running.add(asked.x, first=rank == 0)
            asked = exchange.send(None)
        assert isinstance(asked, ToOwners)
        self._ranks.append(exchange)
        to_owner: list[list[int]] = [[] for _ in range(context.size)]
        for piece, payload in asked.payloads:
            to_owner[piece.owner].append(payload.data.nbytes)
        self._to_first.append(message_bytes(to_owner[0]))
        if rank == 0:
            self._buckets, self._shards = buckets, shards
            self._from_first = list(map(message_bytes, to_owner))
            self._breakdowns.append(_breakdown(asked.tag))
        self._counts = list(map(np.add, self._counts, asked.counts)) if rank else asked.counts
        of_pieces = iter(asked.payloads)
        for bucket, pieces in zip(buckets, shards.of_bucket, strict=True):
            if pieces:
                self._add(bucket, pieces, [payload for _, payload in itertools.islice(of_pieces, len(pieces))])

    def _add(self, bucket: TravellingBucket, pieces: Sequence[Piece], payloads: Sequence[Payload]) -> None:
        """Add what the payloads of a rank stand for, which is 0 where they have no entries."""
        x, _, context, _ = bucket
        first, number = len(self._ranks) == 1, pieces[0].bucket
        part = context.scratch("sum of entries" if first else "entries of a rank", x.nbytes).view(x.dtype)
        if first:
            self._totals[number] = part
        if context.senders:
            for piece, payload in zip(pieces, payloads, strict=True):
                self._kept.setdefault(piece, []).append(payload._replace(data=device.copied(payload.data)))
            return
        if not first:
            device.clear(part)
        self._codec.decompress(payloads, part, context, pieces, summed=False)
        if not first:
            kernels.accumulate(part, self._totals[number])

    def write_sums(self, buckets: Sequence[TravellingBucket], states: Sequence[Sequence[State]]) -> None:
        """Overwrite the buckets by the sums that owners send."""
        counts: dict[Piece, np.ndarray] = {}
        for pieces, of_bucket in zip(self._shards.of_bucket, self._counts, strict=True):
            ends = np.cumsum([self._codec.parts(piece) for piece in pieces])
            counts |= dict(zip(pieces, np.split(of_bucket, ends[:-1]), strict=True)) if pieces else {}
        gathered = list[tuple[Piece, Payload]]()
        for pieces, exchange in zip(self._shards.of_owner, self._ranks, strict=True):
            asked = exchange.send(self._sums_of(pieces, counts))
            assert isinstance(asked, ToAll)
            if exchange is self._ranks[0]:
                self._breakdowns.append(_breakdown(asked.tag))
            self._gathered.append(message_bytes([payload.data.nbytes for _, payload in asked.results]))
            gathered += [(piece, p._replace(data=device.copied(p.data))) for piece, p in asked.results]
        for of_members, running in self._sums:
            running.write_sum(of_members.x)
        with contextlib.suppress(StopIteration):
            self._ranks[0].send(gathered)

    def _sums_of(self, pieces: Sequence[Piece], counts: dict[Piece, np.ndarray]) -> Sums:
        """Yield the sums that the owner of these pieces asks for."""
        for piece in pieces:
            here, total = piece.context(self._buckets[piece.bucket][2]), self._totals[piece.bucket]
            if self._kept:
                self._codec.add(self._kept[piece], piece.of(total), piece, here)
            yield piece, here, piece.of(total), counts[piece]

    def write_messages(self, meter: Meter, buckets: Sequence[TravellingBucket], tag: MessageTag) -> None:
        """Write the messages by which rank 0 would have taken part into a ledger."""
        for asked, _ in self._sums:
            with meter.tagged(asked.tag):
                meter.all_reduce(asked.x.size, asked.x.itemsize)
        with meter.tagged(self._tag._replace(members=self._shards.members)):
            meter.all_to_all(self._from_first, self._to_first, self._breakdowns[0])
            meter.all_gather(self._gathered, self._breakdowns[1])


def _breakdown(tag: MessageTag) -> LazyBreakdown:
    """Read what a message consists of, while its payloads are there."""
    assert tag.breakdown is not None
    return tag.breakdown(np.empty(0, np.uint8))


class SequentialChoice:
    """Exchange of some buckets of a step in two phases, and of the others one by one.

    Args:
        phases: the exchange in two phases.
        buckets: the others' exchange, of as many buckets.
        numbers: which buckets take part in the first.
    """

    def __init__(self, phases: SequentialTwoPhase, buckets: SequentialBuckets, numbers: Collection[int]):
        self._phases, self._buckets, self._numbers = phases, buckets, numbers

    def _split(self, buckets: Sequence[T]) -> tuple[list[T], list[T]]:
        together = [bucket for k, bucket in enumerate(buckets) if k in self._numbers]
        return together, [bucket for k, bucket in enumerate(buckets) if k not in self._numbers]

    def add(self, buckets: Sequence[TravellingBucket]) -> None:
        """Add the buckets of the next rank, and change what the compressor keeps of them."""
        together, alone = self._split(buckets)
        self._phases.add(together)
        self._buckets.add(alone)

    def write_sums(self, buckets: Sequence[TravellingBucket], states: Sequence[Sequence[State]]) -> None:
        """Overwrite the buckets by the sums over ranks."""
        together, alone = self._split(buckets)
        self._phases.write_sums(together, [self._split(of_rank)[0] for of_rank in states])
        self._buckets.write_sums(alone, [self._split(of_rank)[1] for of_rank in states])

    def write_messages(self, meter: Meter, buckets: Sequence[TravellingBucket], tag: MessageTag) -> None:
        """Write the messages of all buckets into a ledger."""
        together, alone = self._split(buckets)
        self._phases.write_messages(meter, together, tag)
        self._buckets.write_messages(meter, alone, tag)
