"""Payloads that cannot be added on the wire, at 2 (P - 1) / P of a payload's bytes for any number P of ranks.

Every rank owns a shard of the plan.  In the first phase it gets of its shard what each rank has compressed, and adds;
in the second it compresses the sum again, and sends that to all.  All buckets of a step share the two messages to each
other rank.  One rank alone forms each sum, in rank order, so all have the same bits on any transport.

Li and Hoefler, "Near-optimal sparse allreduce for distributed deep learning", 2022 (Ok-Topk), and Wang et al., "ZEN:
empowering distributed training with sparsity-driven data synchronization", 2025, do so for entries; Tang et al., "1-bit
Adam", 2021, for codes.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from distopt import device
from distopt.comm import Communicator
from distopt.comm.message import MessageTag
from distopt.compress import Compressor, ExchangeContext
from distopt.compress.context import layout_of, state_array
from distopt.compress.shards import OWED, Payload, Piece, ShardCodec, settle
from distopt.exchange.all_reduce import TravellingBucket
from distopt.exchange.cut import Borders, Cut, cut_for
from distopt.exchange.mixed import UncompressedMembers
from distopt.exchange.told import ALIGNED, Headers, PlaceCounts, Told

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


def two_phase(
    buckets: Sequence[TravellingBucket],
    compressor: Compressor,
    codec: ShardCodec,
    comm: Communicator,
    owned: Owned,
    borders: Borders,
    tag: MessageTag,
    watches: Sequence[Watch] = (),
) -> None:
    """Replace arrays by what the owners of their shards send of the sums over ranks.  Collective.

    On a GPU the host waits once for the numbers of entries, which it tells the other ranks' hosts, if they depend on
    the data.

    Args:
        buckets: of each the array, the state, the context and the tag.
        compressor: what is sent of them.
        codec: the same, as it takes part.
        comm: the ranks.
        owned: empty at first; the same at every step.
        borders: of the shards; the same at every step.
        tag: of the messages of all buckets.
        watches: are shown what this rank sends.

    Example:
        >>> import numpy as np
        >>> from distopt import run_ranks
        >>> from distopt.comm.message import UNTAGGED
        >>> from distopt.compress import ExchangeContext, TopK
        >>> from distopt.exchange.cut import Borders
        >>> def main(comm):
        ...     x = np.zeros(192, np.float32)
        ...     x[64 * comm.rank] = x[1] = comm.rank + 1
        ...     context = ExchangeContext(rank=comm.rank, size=comm.size)
        ...     top, buckets = TopK(0.01), [(x, {}, context, UNTAGGED)]
        ...     two_phase(buckets, top, top.sharded(), comm, {}, Borders(), UNTAGGED)
        ...     return np.flatnonzero(x).tolist(), x[x != 0].tolist()
        >>> run_ranks(3, main)[0]
        ([0, 1, 64, 128], [1.0, 6.0, 2.0, 3.0])
    """
    shards, like = shards_of(buckets, codec, borders, comm.size), buckets[0][0]
    mine = shards.of_owner[comm.rank]
    with comm.on_comm_stream():
        sent, counts, uncompressed = compress_all(buckets, compressor, codec, shards, comm, owned, watches)
        itemsizes = [x.itemsize for x, _, _, _ in buckets]
        told: Headers = Headers(codec) if comm.gpu is None else Told(codec, shards, comm, itemsizes)
        told.tell(counts)
        outbox = [[(piece, sent[piece.bucket, piece.start]) for piece in pieces] for pieces in shards.of_owner]
        with comm.tagged(_labelled(tag, shards, codec, [p for payloads in outbox for p in payloads])):
            inbox = comm.all_to_all([_message(payloads, like) for payloads in outbox], ragged=told.lengths)
        results = [
            (piece, sum_and_compress(piece, payloads, codec, buckets[piece.bucket], told.counts(piece)))
            for piece, payloads in by_piece(inbox, [mine] * comm.size, told, buckets)
        ]
        told.tell_sums([payload.entries for _, payload in results])
        with comm.tagged(_labelled(tag, shards, codec, results)):
            gathered = comm.all_gather(_message(results, like), ragged=told.lengths)
        received: list[list[Payload]] = [[] for _ in buckets]
        of_owners = by_piece(gathered, shards.of_owner, told, buckets)
        for piece, payloads in of_owners:
            received[piece.bucket] += payloads
        if codec.ragged:
            borders.see(shards, [payload.entries for _, (payload,) in of_owners], buckets[0][2].step)
        codec.decompress_all(*_where_cut(shards, received, [b[0] for b in buckets], [b[2] for b in buckets]))
        for (x, _, context, _), members in zip(buckets, uncompressed, strict=True):
            if members and not members.none and not members.all:
                context.repeat("put back", members.put_back, (x,))


def compress_all(
    buckets: Sequence[TravellingBucket],
    compressor: Compressor,
    codec: ShardCodec,
    shards: Cut,
    comm: Communicator,
    owned: Owned,
    watches: Sequence[Watch],
) -> tuple[dict[tuple[int, int], Payload], np.ndarray, list[UncompressedMembers | None]]:
    """Compress this rank's buckets, and sum up the members that stay as they are.  Collective.

    Args:
        buckets: as of ``two_phase``.
        compressor: as of ``two_phase``.
        codec: as of ``two_phase``.
        shards: of these buckets.
        comm: as of ``two_phase``.
        owned: as of ``two_phase``.
        watches: as of ``two_phase``.

    Returns:
        The payload of each piece, by bucket and start; the number of entries of each part of each piece, in order;
        and of each bucket the members that were summed.
    """
    uncompressed = []
    selected, places = [], PlaceCounts(codec, shards, buckets[0][2])
    for number, bucket in enumerate(buckets):
        x, state, context, tag = bucket
        for watch in watches:
            watch.before(bucket)
        pieces = shards.of_bucket[number]
        if codec.remembers:
            settle_moved(bucket, owned_piece(pieces, comm.rank), owned)
        selected.append(codec.select(x, state, context, pieces, places.of_bucket(number)))
        uncompressed.append(_sum_uncompressed(x, compressor, comm, context, tag))
    counts, sent = places.counts(comm), dict[tuple[int, int], Payload]()
    packed = codec.pack_all(selected, counts, [context for _, _, context, _ in buckets], shards.of_bucket)
    for number, (bucket, pieces, payloads) in enumerate(zip(buckets, shards.of_bucket, packed, strict=True)):
        sent |= {(number, piece.start): payload for piece, payload in zip(pieces, payloads, strict=True)}
        for watch in watches:
            watch.after(bucket, codec, pieces, payloads)
    return sent, np.concatenate(counts), uncompressed


def compress_bucket(
    bucket: TravellingBucket, codec: ShardCodec, pieces: Sequence[Piece]
) -> tuple[list[Payload], np.ndarray]:
    """Return the payloads of the pieces of one bucket, which is on the host, and the entries of each part of them."""
    x, state, context, _ = bucket
    places = np.empty(len(codec.edges(pieces)) if pieces else 0, np.int64)
    selected = codec.select(x, state, context, pieces, places)
    counts: np.ndarray = np.diff(places)
    return codec.pack(selected, counts, context, pieces), counts


def shards_of(buckets: Sequence[TravellingBucket], codec: ShardCodec, borders: Borders, ranks: int) -> Cut:
    """Return the shards of these buckets, which are the same on every rank."""
    layouts = [codec.cut(layout_of(x, context), context) for x, _, context, _ in buckets]
    return cut_for(codec, layouts, ranks, borders.starts)


def sum_and_compress(
    piece: Piece,
    payloads: Sequence[Payload],
    codec: ShardCodec,
    bucket: TravellingBucket,
    counts: np.ndarray | None = None,
) -> Payload:
    """Return what the owner of a piece sends of the sum of its payloads.

    Args:
        piece: the piece.
        payloads: of all ranks, in rank order.
        codec: the compressor, as it takes part.
        bucket: of the piece.
        counts: of all ranks' entries, by part; None if they are counted here.
    """
    x, state, context, _ = bucket
    total = context.scratch("shard sum", piece.size * x.itemsize).view(x.dtype)
    here = piece.context(context)
    found = codec.add(payloads, total, piece, here)
    memory = codec.owed(x, state, piece, here) if codec.remembers else None
    return codec.compress_sum(total, memory, found if counts is None else counts, piece, here)


def settle_moved(bucket: TravellingBucket, piece: Piece | None, owned: Owned) -> None:
    """Move what a rank owes of what it does not own any more to its residual.

    Args:
        bucket: of any exchange in two phases, so that its number in the plan counts, not its place among ``buckets``.
        piece: the piece of the bucket that it owns; None for none.
        owned: what it owned in the last step.
    """
    x, state, context, tag = bucket
    number = tag.bucket
    if piece is None:
        owned.pop(number, None)
        settle(x, state, None, context.skip_flag)
        return
    known, part, since = owned.get(number), (piece.start, piece.stop), context.step
    if known is not None and known[0] is state.get(OWED) and known[1:3] == part:
        since = known[3]
    if since == context.step:  # once more if a GPU has refused that step, and left all as it was
        settle(x, state, slice(*part), context.skip_flag)
    owned[number] = state_array(state, OWED, x), *part, since


def _message(payloads: Sequence[tuple[Piece, Payload]], like: np.ndarray) -> np.ndarray:
    """Return the payloads of pieces as one message, where ``like`` is."""
    if not payloads:
        return like[:0].view(np.uint8)
    return device.concatenated([payload.data for _, payload in payloads], ALIGNED)


def _where_cut(shards: Cut, *of_buckets: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield, of lists with an item for each bucket, those of buckets that have pieces; at last the pieces."""
    for items in (*of_buckets, shards.of_bucket):
        yield [item for item, pieces in zip(items, shards.of_bucket, strict=True) if pieces]


def _labelled(tag: MessageTag, shards: Cut, codec: ShardCodec, payloads: Sequence[tuple[Piece, Payload]]) -> MessageTag:
    """Return the tag of the messages of these payloads."""
    members = shards.members
    return tag._replace(members=members, breakdown=lambda _: codec.breakdown(payloads, members))


def owned_piece(pieces: Sequence[Piece], rank: int) -> Piece | None:
    """Return the piece of a bucket that a rank owns, None if it owns none."""
    return next((piece for piece in pieces if piece.owner == rank), None)


def _sum_uncompressed(
    x: np.ndarray, compressor: Compressor, comm: Communicator, context: ExchangeContext, tag: MessageTag
) -> UncompressedMembers | None:
    """Sum up the members of a bucket that the compressor leaves as they are, if there are any.  Collective."""
    mask = compressor.uncompressed(layout_of(x, context), context)
    if mask is None:
        return None
    members = context.repeat("uncompressed", lambda: UncompressedMembers(x, mask, context), (x,))
    if not members.none:
        with comm.tagged(tag if members.all else tag._replace(members=members.members)):
            comm.all_reduce(members.flat)
    return members


def by_piece(
    messages: Sequence[np.ndarray],
    shards: Sequence[Sequence[Piece]],
    told: Headers,
    buckets: Sequence[TravellingBucket],
) -> list[tuple[Piece, list[Payload]]]:
    """Return the payloads of each piece, in the order of messages.

    Args:
        messages: one of each rank.
        shards: the pieces of which each message has a payload: always the same ones, or each its own.
        told: how many entries they have.
        buckets: of the plan.

    Raises:
        ValueError: a message is not as long as its payloads say.
    """
    found: dict[Piece, list[Payload]] = {piece: [] for pieces in shards for piece in pieces}
    for sender, (message, pieces) in enumerate(zip(messages, shards, strict=True)):
        end = 0
        for piece in pieces:
            start = -(-end // ALIGNED) * ALIGNED
            entries, nbytes = told.payload(sender, piece, message[start:], buckets[piece.bucket][0].itemsize)
            end = start + nbytes
            found[piece].append(Payload(message[start:end], entries))
        if end != message.nbytes:
            text = f"message {sender} of a shard must be of {end} bytes, as its headers say, got {message.nbytes}"
            raise ValueError(f"{text}; it was damaged")
    return list(found.items())
