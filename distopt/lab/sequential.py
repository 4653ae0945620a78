"""The exchange of ranks that take turns in one process: their payloads are added up in rank order."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

import numpy as np

from distopt import device, kernels
from distopt.comm.communicator import BFLOAT16, HALVES
from distopt.comm.message import MessageTag
from distopt.comm.meter import Meter
from distopt.compress import Compressor, ExchangeContext
from distopt.compress.context import State, layout_of
from distopt.compress.shards import Payload, Piece, ShardCodec, settle
from distopt.exchange.all_reduce import TravellingBucket
from distopt.exchange.cut import Borders, Cut
from distopt.exchange.mixed import UncompressedMembers
from distopt.exchange.payload import check_payload
from distopt.exchange.told import message_bytes
from distopt.exchange.traffic import traffic
from distopt.exchange.two_phase import (
    Owned,
    Watch,
    compress_bucket,
    owned_piece,
    settle_moved,
    shards_of,
    sum_and_compress,
)
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
    """Exchange of all buckets of a step in two phases: ``add`` those of each rank, in rank order, then ``write_sums``.

    Args:
        compressor: what is sent of the buckets.
        codec: the same, as it takes part.
        owned: of each rank, what it owned of each bucket in the last step; empty at first.
        borders: of the shards, the same at every step.
        watches: are shown what each rank sends.

    Example:
        >>> import numpy as np
        >>> from distopt.comm.message import UNTAGGED
        >>> from distopt.compress import ExchangeContext, TopK
        >>> from distopt.exchange.cut import Borders
        >>> exchange = SequentialTwoPhase(TopK(0.5), TopK(0.5).sharded(), [{}, {}], Borders())
        >>> for rank, x in enumerate(np.array([[1, 2], [-3, 0]], np.float32)):
        ...     context = ExchangeContext(rank=rank, size=2)
        ...     exchange.add([(x, {}, context, UNTAGGED)])
        >>> exchange.write_sums([(x, {}, context, UNTAGGED)], [[{}], [{}]])
        >>> x
        array([-3.,  0.], dtype=float32)
    """

    def __init__(
        self,
        compressor: Compressor,
        codec: ShardCodec,
        owned: Sequence[Owned],
        borders: Borders,
        watches: Sequence[Watch] = (),
    ):
        self._compressor, self._codec, self._owned, self._rank = compressor, codec, owned, 0
        self._borders, self._watches = borders, watches
        self._flats: dict[int, tuple[UncompressedMembers, RunningSum]] = {}  # by bucket
        self._totals: list[np.ndarray] = []
        self._counts: dict[int, np.ndarray] = {}  # of entries, by bucket, of each part of its pieces in order
        self._kept: dict[Piece, list[Payload]] = {}  # of all ranks, where senders are counted
        self._breakdowns: list[LazyBreakdown] = []  # of the first rank's two messages
        self.sent: list[list[int]] = []  # bytes of messages of the first phase, by sender and owner
        self.gathered: list[int] = []  # bytes of messages of the second phase, by owner

    def add(self, buckets: Sequence[TravellingBucket]) -> None:
        """Add the buckets of the next rank, and change what the compressor keeps of them."""
        codec, rank, first, size = self._codec, self._rank, self._rank == 0, buckets[0][2].size
        shards, sent = shards_of(buckets, codec, self._borders, size), list[tuple[Piece, Payload]]()
        for number, bucket in enumerate(buckets):
            x, _, context, _ = bucket
            pieces = shards.of_bucket[number]
            if codec.remembers:
                settle_moved(bucket, owned_piece(pieces, rank), self._owned[rank])
            if first:
                self._totals.append(context.scratch("sum of entries", x.nbytes).view(x.dtype))
            for watch in self._watches:
                watch.before(bucket)
            payloads, counts = compress_bucket(bucket, codec, pieces)
            for watch in self._watches:
                watch.after(bucket, codec, pieces, payloads)
            sent += zip(pieces, payloads, strict=True)
            self._add(number, bucket, payloads, pieces)
            self._counts[number] = self._counts.get(number, 0) + counts
            self._add_uncompressed(number, x, context, first)
        if first:
            self._breakdowns.append(codec.breakdown(sent, shards.members))
        to_owner: list[list[int]] = [[] for _ in range(size)]
        for piece, payload in sent:
            to_owner[piece.owner].append(payload.data.nbytes)
        self.sent.append([message_bytes(nbytes) for nbytes in to_owner])
        self._rank += 1

    def _add(self, number: int, bucket: TravellingBucket, payloads: Sequence[Payload], pieces: Sequence[Piece]) -> None:
        """Add what the payloads of a rank stand for, which is 0 where they have no entries."""
        x, _, context, _ = bucket
        if not pieces:
            return
        if context.senders:
            for piece, payload in zip(pieces, payloads, strict=True):
                self._kept.setdefault(piece, []).append(payload._replace(data=device.copied(payload.data)))
            return
        if self._rank == 0:
            self._codec.decompress(payloads, self._totals[number], context, pieces, summed=False)
            return
        carried = context.scratch("entries of a rank", x.nbytes).view(x.dtype)
        device.clear(carried)
        self._codec.decompress(payloads, carried, context, pieces, summed=False)
        kernels.accumulate(carried, self._totals[number])

    def _add_uncompressed(self, number: int, x: np.ndarray, context: ExchangeContext, first: bool) -> None:
        mask = self._compressor.uncompressed(layout_of(x, context), context)
        if mask is None:
            return
        members = UncompressedMembers(x, mask, context)
        if members.none:
            return
        if first:
            running = RunningSum(lambda nbytes: context.scratch("sum over ranks", nbytes))
        else:
            _, running = self._flats[number]
        running.add(members.flat, first)
        self._flats[number] = members, running

    def write_sums(self, buckets: Sequence[TravellingBucket], states: Sequence[Sequence[State]]) -> None:
        """Overwrite the last rank's buckets by the sums that owners send.

        Args:
            buckets: as of ``add``, of the last rank.
            states: what compressors keep, by rank and bucket.
        """
        codec, size = self._codec, buckets[0][2].size
        shards = shards_of(buckets, codec, self._borders, size)
        payloads: list[list[Payload]] = [[] for _ in buckets]
        entries: list[int] = []
        counts = self._counts_by_piece(shards)
        for owner, pieces in enumerate(shards.of_owner):
            results = [
                self._result(piece, buckets[piece.bucket], states[owner][piece.bucket], counts[piece])
                for piece in pieces
            ]
            entries += [result.entries for result in results]
            for piece, result in zip(pieces, results, strict=True):
                payloads[piece.bucket].append(result._replace(data=device.copied(result.data)))
            if owner == 0:
                of_rank = list(zip(pieces, results, strict=True))
                self._breakdowns.append(codec.breakdown(of_rank, shards.members))
            self.gathered.append(message_bytes([result.data.nbytes for result in results]))
        if codec.ragged:
            self._borders.see(shards, entries, buckets[0][2].step)
        for number, (x, _, context, _) in enumerate(buckets):
            if shards.of_bucket[number]:
                codec.decompress(payloads[number], x, context, shards.of_bucket[number])
            if number in self._flats:
                members, running = self._flats[number]
                running.write_sum(members.flat)
                if not members.all:
                    members.put_back()

    def _counts_by_piece(self, shards: Cut) -> dict[Piece, np.ndarray]:
        """Return how many entries of each part of each piece all ranks have sent together."""
        found: dict[Piece, np.ndarray] = {}
        for number, pieces in enumerate(shards.of_bucket):
            ends = np.cumsum([self._codec.parts(piece) for piece in pieces])
            found |= dict(zip(pieces, np.split(self._counts[number], ends[:-1]), strict=True)) if pieces else {}
        return found

    def _result(self, piece: Piece, bucket: TravellingBucket, state: State, counts: np.ndarray) -> Payload:
        x, _, context, tag = bucket
        if self._kept:
            return sum_and_compress(piece, self._kept[piece], self._codec, (x, state, context, tag), counts)
        total, here = piece.of(self._totals[piece.bucket]), piece.context(context)
        memory = self._codec.owed(x, state, piece, here) if self._codec.remembers else None
        return self._codec.compress_sum(total, memory, counts, piece, here)

    def write_messages(self, meter: Meter, buckets: Sequence[TravellingBucket], tag: MessageTag) -> None:
        """Write the messages by which rank 0 would have taken part into a ledger."""
        for number, (members, _) in sorted(self._flats.items()):
            x, _, _, bucket_tag = buckets[number]
            with meter.tagged(bucket_tag if members.all else bucket_tag._replace(members=members.members)):
                meter.all_reduce(members.flat.size, x.itemsize)
        with meter.tagged(tag._replace(members=shards_of(buckets, self._codec, self._borders, meter.size).members)):
            meter.all_to_all(self.sent[0], [row[0] for row in self.sent], self._breakdowns[0])
            meter.all_gather(self.gathered, self._breakdowns[1])


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
