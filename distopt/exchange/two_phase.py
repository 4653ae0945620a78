"""Payloads that cannot be added on the wire, at 2 (P - 1) / P of a payload's bytes for any number P of ranks.

Every rank owns a shard of the plan.  In the first phase it gets of its shard what each rank has compressed, and adds;
in the second it compresses the sum again, and sends that to all.  All buckets of a step share the two messages to each
other rank.  One rank alone forms each sum, in rank order, so all have the same bits on any transport.

Li and Hoefler, "Near-optimal sparse allreduce for distributed deep learning", 2022 (Ok-Topk), and Wang et al., "ZEN:
empowering distributed training with sparsity-driven data synchronization", 2025, do so for entries; Tang et al., "1-bit
Adam", 2021, for codes.
"""

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from distopt import device
from distopt.comm import Communicator
from distopt.comm.communicator import Phases
from distopt.comm.logical import exchange_of_ranks, gather_of_ranks
from distopt.comm.message import ALIGNED, MessageTag, of_several
from distopt.compress import Compressor, ExchangeContext
from distopt.compress.base import compressed_members
from distopt.compress.context import decayed, layout_of
from distopt.compress.shards import Payload, Piece, ShardCodec
from distopt.compress.state import OWED, settle, state_array
from distopt.exchange.all_reduce import TravellingBucket
from distopt.exchange.entry_counts import DeviceCounts, HostCounts, PlaceCounts
from distopt.exchange.program import Exchange, Sum
from distopt.exchange.sharding import ShardBounds, Sharding, cut_for
from distopt.exchange.uncompressed import UncompressedMembers

# by bucket: the state OWED, the part of it that the rank owns, and the updates that were applied when that began
Owned = dict[int | None, tuple[np.ndarray, int, int, int]]


class Watch(Protocol):
    """Is shown what a rank sends in the first phase."""

    def before(self, bucket: TravellingBucket) -> None:
        """See a bucket before it is compressed."""

    def after(
        self, bucket: TravellingBucket, codec: ShardCodec, pieces: Sequence[Piece], payloads: Sequence[Payload]
    ) -> None:
        """See it afterwards, and what is sent of its pieces."""


class ToOwners(NamedTuple):
    """Asks to send payloads of pieces to their owners.

    It is answered by ``Sums``.  Later, nobody reads the payloads, whose memory may be another rank's then.

    Args:
        payloads: of all pieces of all buckets, in order.
        counts: by bucket, the entries of each part of its pieces.
        buckets: of the exchange.
        shards: of these buckets.
        entry_counts: how many entries payloads have.
        tag: of the messages.
    """

    payloads: list[tuple[Piece, Payload]]
    counts: list[np.ndarray]
    buckets: Sequence[TravellingBucket]
    shards: Sharding
    entry_counts: HostCounts
    tag: MessageTag

    def over(self, comm: Communicator) -> "Sums":
        self.entry_counts.tell(np.concatenate(self.counts))
        with comm.tagged(self.tag):
            inbox = comm.all_to_all(self._messages(), ragged=self.entry_counts.lengths)
        return self._sums(inbox, comm.rank)

    @staticmethod
    def of_ranks(asked: Sequence["ToOwners"], comm: Communicator) -> list["Sums"]:
        with comm.tagged(of_several([request.tag for request in asked])):
            inboxes = exchange_of_ranks(comm, [request._messages() for request in asked])
        owners = zip(asked, inboxes, comm.ranks.here, strict=True)
        return [request._sums(inbox, owner) for request, inbox, owner in owners]

    def phases(self, comm: Communicator, turn: int) -> Phases:
        nbytes = self.entry_counts.known_bytes(self.shards.of_owner[comm.rank])
        inbox = [np.empty(nbytes, np.uint8) for _ in range(comm.size)]
        return self._sums((yield from comm.exchange_in_phases("all_to_all", self._messages(), inbox, turn)), comm.rank)

    def _messages(self) -> list[np.ndarray]:
        """Return the message to each owner."""
        sent = {piece: payload.data for piece, payload in self.payloads}
        return [_message([sent[piece] for piece in pieces], self.buckets) for pieces in self.shards.of_owner]

    def _sums(self, inbox: Sequence[np.ndarray], owner: int) -> "Sums":
        for piece, payloads in self.entry_counts.by_piece(inbox, [self.shards.of_owner[owner]] * len(inbox)):
            x, _, context, _ = self.buckets[piece.bucket]
            total, here = context.bucket.scratch("shard sum", piece.size * x.itemsize), piece.context(context)
            total = total.view(x.dtype)
            found, counts = self.entry_counts.codec.add(payloads, total, piece, here), self.entry_counts.counts(piece)
            yield piece, here, total, found if counts is None else counts


class ToAll(NamedTuple):
    """Asks to send what a rank has made of its pieces to all; it is answered by what all have sent, in their order.

    Args:
        results: the pieces, and the payload of each.
        buckets: of the exchange.
        shards: of these buckets.
        entry_counts: how many entries payloads have.
        tag: of the messages.
    """

    results: list[tuple[Piece, Payload]]
    buckets: Sequence[TravellingBucket]
    shards: Sharding
    entry_counts: HostCounts
    tag: MessageTag

    def over(self, comm: Communicator) -> list[tuple[Piece, Payload]]:
        self.entry_counts.tell_sums([payload.entries for _, payload in self.results])
        with comm.tagged(self.tag):
            message = _message([payload.data for _, payload in self.results], self.buckets)
            return self._of_all(comm.all_gather(message, ragged=self.entry_counts.lengths))

    @staticmethod
    def of_ranks(asked: Sequence["ToAll"], comm: Communicator) -> list[list[tuple[Piece, Payload]]]:
        last = asked[-1]
        last.entry_counts.tell_sums([])
        sent = [_message([payload.data for _, payload in request.results], last.buckets) for request in asked]
        with comm.tagged(of_several([request.tag for request in asked])):
            return [last._of_all(gather_of_ranks(comm, sent))]

    def phases(self, comm: Communicator, turn: int) -> Phases:
        self.entry_counts.tell_sums([])
        gathered = [np.empty(self.entry_counts.known_bytes(pieces), np.uint8) for pieces in self.shards.of_owner]
        message = _message([payload.data for _, payload in self.results], self.buckets)
        return self._of_all((yield from comm.exchange_in_phases("all_gather", [message] * comm.size, gathered, turn)))

    def _of_all(self, gathered: Sequence[np.ndarray]) -> list[tuple[Piece, Payload]]:
        return [(piece, payload) for piece, (payload,) in self.entry_counts.by_piece(gathered, self.shards.of_owner)]


# of each piece that a rank owns, when it asks for the next: a call for it, the sum, and the entries of each part
Sums = Iterator[tuple[Piece, ExchangeContext, np.ndarray, np.ndarray]]


def two_phase_program(
    buckets: Sequence[TravellingBucket],
    compressor: Compressor,
    codec: ShardCodec,
    comm: Communicator,
    owned: Owned,
    bounds: ShardBounds,
    tag: MessageTag,
    watches: Sequence[Watch] = (),
) -> Exchange:
    """What one rank does to replace arrays by what the owners of their shards send of the sums over ranks.

    On a GPU the host waits once for the numbers of entries, which it tells the other ranks' hosts, if they depend on
    the data.

    Args:
        buckets: of each the array, the state, the context and the tag.
        compressor: what is sent of them.
        codec: the same, as it takes part.
        comm: the ranks; here it only waits for a GPU, and tells other hosts what that has counted.
        owned: empty at first; the same at every step.
        bounds: of the shards; the same at every step.
        tag: of the messages of all buckets.
        watches: are shown what this rank sends.

    Example:
        >>> import numpy as np
        >>> from distopt import run_ranks
        >>> from distopt.comm.message import UNTAGGED
        >>> from distopt.compress import ExchangeContext, TopK
        >>> from distopt.exchange.sharding import ShardBounds
        >>> from distopt.exchange.program import run
        >>> def main(comm):
        ...     x = np.zeros(192, np.float32)
        ...     x[64 * comm.rank] = x[1] = comm.rank + 1
        ...     context = ExchangeContext(rank=comm.rank, size=comm.size)
        ...     top, buckets = TopK(0.01), [(x, {}, context, UNTAGGED)]
        ...     run(two_phase_program(buckets, top, top.sharded(), comm, {}, ShardBounds(), UNTAGGED), comm)
        ...     return np.flatnonzero(x).tolist(), x[x != 0].tolist()
        >>> run_ranks(3, main)[0]
        ([0, 1, 64, 128], [1.0, 6.0, 2.0, 3.0])
    """
    layouts = [compressed_members(compressor, layout_of(x, context), context) for x, _, context, _ in buckets]
    shards = cut_for(codec, layouts, buckets[0][2].size, bounds.starts)
    itemsizes = [x.itemsize for x, _, _, _ in buckets]
    entry_counts = HostCounts(codec, itemsizes) if comm.gpu is None else DeviceCounts(codec, itemsizes, shards, comm)
    put_back = []

    def labelled(payloads: Sequence[tuple[Piece, Payload]]) -> MessageTag:
        members = shards.members
        return MessageTag(tag.phase, tag.step, tag.bucket, members, lambda _: codec.breakdown(payloads, members))

    def sent() -> Generator[Sum, None, ToOwners]:
        selected, places = [], PlaceCounts(codec, shards, buckets[0][2])
        for number, (bucket, pieces) in enumerate(zip(buckets, shards.of_bucket, strict=True)):
            x, state, context, own_tag = bucket
            for watch in watches:
                watch.before(bucket)
            if codec.traits.memory is not None:
                settle_moved(bucket, [piece for piece in pieces if piece.owner == context.rank], owned)
            selected.append(codec.select(x, state, context, pieces, places.of_bucket(number)))
            mask = compressor.uncompressed(layout_of(x, context), context)
            if mask is not None:
                there = context.repeat("uncompressed", partial(UncompressedMembers, x, mask, context), (x,))
                if not there.none:
                    yield Sum(there.flat, own_tag if there.all else own_tag._replace(members=there.members))
                if not there.none and not there.all:
                    put_back.append((context, x, there))
        counts = places.counts(comm)
        packed = codec.pack(selected, counts, [context for _, _, context, _ in buckets], shards.of_bucket)
        payloads = list[tuple[Piece, Payload]]()
        for bucket, pieces, of_bucket in zip(buckets, shards.of_bucket, packed, strict=True):
            for watch in watches:
                watch.after(bucket, codec, pieces, of_bucket)
            payloads += zip(pieces, of_bucket, strict=True)
        return ToOwners(payloads, counts, buckets, shards, entry_counts, labelled(payloads))

    # no name holds what is sent, so that a rank that waits in one process with others keeps none of it
    sums: Sums = yield (yield from sent())
    results = []
    for piece, here, total, counts in sums:
        x, state, _, _ = buckets[piece.bucket]
        memory = None
        if codec.traits.memory is not None:
            memory = decayed(piece.of(state_array(state, OWED, x)), codec.traits.memory, here)
        results.append((piece, codec.compress_sum(total, memory, counts, piece, here)))
    gathered: list[tuple[Piece, Payload]] = yield ToAll(results, buckets, shards, entry_counts, labelled(results))
    received: list[list[Payload]] = [[] for _ in buckets]
    for piece, payload in gathered:
        received[piece.bucket].append(payload)
    if codec.traits.ragged:
        bounds.see(shards, [payload.entries for _, payload in gathered], buckets[0][2].step)
    of_buckets = zip(received, buckets, shards.of_bucket, strict=True)
    cut_up = [(payloads, x, context, pieces) for payloads, (x, _, context, _), pieces in of_buckets if pieces]
    if cut_up:
        codec.decompress(*zip(*cut_up, strict=True))
    for context, x, there in put_back:
        context.repeat("put back", there.put_back, (x,))


def settle_moved(bucket: TravellingBucket, mine: Sequence[Piece], owned: Owned) -> None:
    """Move what a rank owes of what it does not own any more to its residual.

    Args:
        bucket: of any exchange in two phases, so that its number in the plan counts, not its place among ``buckets``.
        mine: the piece of the bucket that it owns, if it owns one.
        owned: what it owned in the last step.
    """
    x, state, context, tag = bucket
    number = tag.bucket
    if not mine:
        owned.pop(number, None)
        settle(x, state, None, context.skip_flag)
        return
    known, part, since = owned.get(number), (mine[0].start, mine[0].stop), context.step
    if known is not None and known[0] is state.get(OWED) and known[1:3] == part:
        since = known[3]
    if since == context.step:  # once more if a GPU has refused that step, and left all as it was
        settle(x, state, slice(*part), context.skip_flag)
    owned[number] = state_array(state, OWED, x), *part, since


def _message(payloads: Sequence[np.ndarray], buckets: Sequence[TravellingBucket]) -> np.ndarray:
    """Return payloads as one message, where the buckets are."""
    return device.concatenated(payloads, ALIGNED) if payloads else buckets[0][0][:0].view(np.uint8)
