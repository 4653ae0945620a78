"""The exchange of ranks that take turns in one process: their programs, in lock step."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from distopt import device, kernels
from distopt.comm.communicator import BFLOAT16, HALVES
from distopt.comm.message import MessageTag, message_bytes
from distopt.comm.meter import Meter
from distopt.compress.shards import Payload, Piece, parts
from distopt.exchange.all_gather import Gather, SumOfPayloads, sum_payloads
from distopt.exchange.program import Agree, Exchange, Request, Sum
from distopt.exchange.step_traffic import asked, message
from distopt.exchange.two_phase import Sums, ToAll, ToOwners
from distopt.kernels.breakdown import LazyBreakdown

Scratch = Callable[[str, int], np.ndarray]


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


class LockStep:
    """One exchange of all ranks: ``add`` the program of each, in rank order, then ``finish``.

    A rank goes on until it has to wait.  What it sends is added then, so that none of it is kept, and one rank unpacks
    the sum for all: they share the memory of the buckets.

    Args:
        scratch: memory, by name and bytes.

    Example:
        >>> from distopt.comm.message import UNTAGGED
        >>> from distopt.compress import ExchangeContext, TopK
        >>> from distopt.exchange.all_gather import gather_program
        >>> x, exchange = np.empty(2, np.float32), LockStep(lambda name, nbytes: np.empty(nbytes, np.uint8))
        >>> for rank, gradient in enumerate(([1, 2], [-3, 0])):
        ...     x[:] = gradient
        ...     exchange.add(gather_program(x, TopK(0.5), {}, ExchangeContext(rank=rank, size=2), UNTAGGED))
        >>> exchange.finish()
        >>> x
        array([-3.,  2.], dtype=float32)
    """

    def __init__(self, scratch: Scratch):
        self._scratch = scratch
        self._first: Exchange | None = None
        self._agreed: tuple[Agree, RunningSum] | None = None
        self._waiting: list[Exchange] = []  # for what is agreed on
        self._sums: list[tuple[Sum, RunningSum]] = []
        self._gathered: GatheredInTurn | None = None
        self._owned: OwnedInTurn | None = None

    def add(self, exchange: Exchange) -> None:
        """Resume the next rank until it has to wait for others, and add what it sends."""
        first, found = self._first is None, next(exchange)
        self._first = self._first or exchange
        if isinstance(found, Agree):  # on a sum that has a part of each
            self._agreed = self._agreed or (found, RunningSum(partial(self._scratch, "sum that ranks agree on")))
            self._agreed[1].add(found.x, first)
            self._waiting.append(exchange)
        else:
            self._send(exchange, found, first)

    def _send(self, exchange: Exchange, found: Request, first: bool) -> None:
        """Add what a rank sends that has to wait for nothing any more, from its first request on."""
        sums = iter(self._sums)
        while isinstance(found, Sum):
            if first:
                running = RunningSum(partial(self._scratch, f"sum {len(self._sums)} over ranks"))
                self._sums.append((found, running))
            else:
                _, running = next(sums)
            running.add(found.x, first)
            if found.last:
                return
            found = exchange.send(None)
        if isinstance(found, ToOwners):
            self._owned = self._owned or OwnedInTurn(found)
            self._owned.add(found, exchange)
        elif isinstance(found, Gather):
            self._gathered = self._gathered or GatheredInTurn(found)
            self._gathered.add(found)

    def finish(self) -> None:
        """Resume the first rank to the end, so that its buckets are overwritten by the sums."""
        assert self._first is not None
        if self._agreed:
            asked, running = self._agreed
            running.write_sum(asked.x)
            for exchange in self._waiting:
                self._send(exchange, exchange.send(asked.x), first=exchange is self._first)
        sent = self._owned or self._gathered
        answer = sent.answer() if sent else None
        for wanted, running in self._sums:
            running.write_sum(wanted.x)
        with contextlib.suppress(StopIteration):
            self._first.send(answer)

    def write_messages(self, meter: Meter, tag: MessageTag, break_even: bool) -> None:
        """Write the messages by which the first rank would have taken part into a ledger.

        Args:
            meter: writes them.
            tag: of the messages.
            break_even: whether a dense array is all-reduced where that is fewer bytes.
        """
        sums = [wanted for wanted, _ in self._sums]
        if self._gathered:
            self._gathered.write(meter, tag, sums[0] if sums else None, break_even)
            return
        if self._agreed:
            with meter.tagged(tag):
                meter.all_reduce(self._agreed[0].x.size, self._agreed[0].x.itemsize)
        for wanted in sums:
            with meter.tagged(wanted.tag or tag):
                meter.all_reduce(wanted.x.size, wanted.x.itemsize)
        if self._owned:
            self._owned.write(meter, tag)


class GatheredInTurn:
    """The payloads of ranks that take turns, each of which is added when it comes."""

    def __init__(self, first: Gather):
        self._first, x = first, first.x
        self._total = first.context.scratch("sum of entries", x.nbytes).view(x.dtype)
        device.clear(self._total)
        self._kept: list[np.ndarray] = []  # of all ranks, where senders are counted: known when all have sent
        self._sizes: list[int] = []
        self._breakdown = first.compressor.breakdown(first.payload, x, first.context)

    def add(self, found: Gather) -> None:
        """Add the payload of the next rank."""
        self._sizes.append(found.payload.nbytes)
        if found.context.senders:
            self._kept.append(device.copied(found.payload))
        else:
            found.compressor.decompress(found.payload, self._total, found.context)

    def answer(self) -> SumOfPayloads:
        """Return the sum of all."""
        if self._kept:
            self._first.compressor.decompress_all(self._kept, self._total, self._first.context)
        return lambda x: device.copy(x, self._total), ()

    def write(self, meter: Meter, tag: MessageTag, summed: Sum | None, break_even: bool) -> None:
        """Write what the first rank asks for, once it knows the lengths of all, into a ledger."""
        exchange = sum_payloads(self._first, summed, lambda _: None, break_even)
        for request in asked(exchange, self._sizes):
            own = isinstance(request, Sum) and request.tag
            with meter.tagged(own or tag):
                message(request, None, self._sizes, self._breakdown).write(meter)


class OwnedInTurn:
    """The payloads of pieces of ranks that take turns, each of which is added when it comes."""

    def __init__(self, first: ToOwners):
        self._first = first
        self._breakdowns = [_breakdown(first.tag)]  # of the first rank's two messages
        self._ranks: list[Exchange] = []
        self._totals: dict[int, np.ndarray] = {}  # of what has been sent, by bucket
        self._counts: list[np.ndarray] = []  # of entries, by bucket, of each part of its pieces
        self._kept: dict[Piece, list[Payload]] = {}  # of all ranks, where senders are counted
        self._to_first: list[int] = []  # bytes of what each rank sends to the first one
        self._from_first: list[int] = []  # and of what that sends to each
        self._gathered: list[int] = []  # bytes of messages of the second phase, by owner

    def add(self, found: ToOwners, exchange: Exchange) -> None:
        """Add what the next rank sends."""
        shards, first = found.shards, not self._ranks
        self._ranks.append(exchange)
        to_owner: list[list[int]] = [[] for _ in shards.of_owner]
        for piece, payload in found.payloads:
            to_owner[piece.owner].append(payload.data.nbytes)
        self._to_first.append(message_bytes(to_owner[0]))
        self._from_first = self._from_first or list(map(message_bytes, to_owner))
        self._counts = found.counts if first else list(map(np.add, self._counts, found.counts))
        of_pieces = iter(found.payloads)
        for (x, _, context, _), pieces in zip(found.buckets, shards.of_bucket, strict=True):
            if not pieces:
                continue
            payloads = [payload for _, payload in itertools.islice(of_pieces, len(pieces))]
            number = pieces[0].bucket
            part = context.scratch("sum of entries" if first else "entries of a rank", x.nbytes).view(x.dtype)
            self._totals.setdefault(number, part)
            if context.senders:
                for piece, payload in zip(pieces, payloads, strict=True):
                    self._kept.setdefault(piece, []).append(payload._replace(data=device.copied(payload.data)))
                continue
            if not first:
                device.clear(part)
            found.entry_counts.codec.decompress([payloads], [part], [context], [pieces], summed=False)
            if not first:
                kernels.accumulate(part, self._totals[number])

    def answer(self) -> list[tuple[Piece, Payload]]:
        """Resume the owners of shards until each has sent its sums, and return what all have sent."""
        codec, shards, counts = self._first.entry_counts.codec, self._first.shards, dict[Piece, np.ndarray]()
        for pieces, of_bucket in zip(shards.of_bucket, self._counts, strict=True):
            ends = np.cumsum([parts(codec, piece) for piece in pieces])
            counts |= dict(zip(pieces, np.split(of_bucket, ends[:-1]), strict=True)) if pieces else {}
        gathered = list[tuple[Piece, Payload]]()
        for owner, (pieces, exchange) in enumerate(zip(shards.of_owner, self._ranks, strict=True)):
            found = exchange.send(self._sums(pieces, counts))
            assert isinstance(found, ToAll)
            if owner == 0:
                self._breakdowns.append(_breakdown(found.tag))
            self._gathered.append(message_bytes([payload.data.nbytes for _, payload in found.results]))
            gathered += [(piece, p._replace(data=device.copied(p.data))) for piece, p in found.results]
        return gathered

    def _sums(self, pieces: Sequence[Piece], counts: dict[Piece, np.ndarray]) -> Sums:
        """Yield the sums that the owner of these pieces asks for."""
        for piece in pieces:
            here, total = piece.context(self._first.buckets[piece.bucket][2]), self._totals[piece.bucket]
            if self._kept:
                self._first.entry_counts.codec.add(self._kept[piece], piece.of(total), piece, here)
            yield piece, here, piece.of(total), counts[piece]

    def write(self, meter: Meter, tag: MessageTag) -> None:
        """Write the first rank's two messages into a ledger."""
        with meter.tagged(tag._replace(members=self._first.shards.members)):
            meter.all_to_all(self._from_first, self._to_first, self._breakdowns[0])
            meter.all_gather(self._gathered, self._breakdowns[1])


def _breakdown(tag: MessageTag) -> LazyBreakdown:
    """Read what a message consists of, while its payloads are there."""
    assert tag.breakdown is not None
    return tag.breakdown(np.empty(0, np.uint8))
