"""Payloads that cannot be added on the wire, at 2 (P - 1) / P of a payload's bytes for any number P of ranks.

Every rank owns a shard of the plan.  In the first phase it gets of its shard what each rank has compressed, and adds;
in the second it compresses the sum again, and sends that to all.  All buckets of a step share the two messages to each
other rank.  One rank alone forms each sum, in rank order, so all have the same bits on any transport.

Li and Hoefler, "Near-optimal sparse allreduce for distributed deep learning", 2022 (Ok-Topk), and Wang et al., "ZEN:
empowering distributed training with sparsity-driven data synchronization", 2025, do so for entries; Tang et al., "1-bit
Adam", 2021, for codes.
"""

from collections.abc import Sequence

import numpy as np

from distopt import device
from distopt.comm import Communicator
from distopt.comm.message import MessageTag
from distopt.compress import Compressor, ExchangeContext
from distopt.compress.context import State, layout_of, state_array
from distopt.compress.shards import OWED, Piece, ShardCodec, owed, settle
from distopt.exchange.all_reduce import TravellingBucket
from distopt.exchange.breakdown import shard_breakdown
from distopt.exchange.cut import Cut, cut
from distopt.exchange.mixed import UncompressedMembers

ALIGNED = 8  # a payload in a message begins at a multiple of so many bytes
Owned = dict[int, tuple[np.ndarray, int, int]]  # by bucket: the state OWED, and the part of it that the rank owns


def two_phase(
    buckets: Sequence[TravellingBucket],
    compressor: Compressor,
    codec: ShardCodec,
    comm: Communicator,
    owned: Owned,
    tag: MessageTag,
) -> None:
    """Replace arrays by what the owners of their shards send of the sums over ranks.  Collective.

    Args:
        buckets: of each the array, the state, the context and the tag.
        compressor: what is sent of them.
        codec: the same, as it takes part.
        comm: the ranks.
        owned: empty at first; the same at every step.
        tag: of the messages of all buckets.

    Example:
        >>> import numpy as np
        >>> from distopt import run_ranks
        >>> from distopt.comm.message import UNTAGGED
        >>> from distopt.compress import ExchangeContext, TopK
        >>> def main(comm):
        ...     x = np.zeros(192, np.float32)
        ...     x[64 * comm.rank] = x[1] = comm.rank + 1
        ...     context = ExchangeContext(rank=comm.rank, size=comm.size)
        ...     top, buckets = TopK(0.01), [(x, {}, context, UNTAGGED)]
        ...     two_phase(buckets, top, top.sharded(), comm, {}, UNTAGGED)
        ...     return np.flatnonzero(x).tolist(), x[x != 0].tolist()
        >>> run_ranks(3, main)[0]
        ([0, 1, 64, 128], [1.0, 6.0, 2.0, 3.0])
    """
    shards = shards_of(buckets, codec, comm.size)
    with comm.on_comm_stream():
        outbox: list[list[tuple[Piece, np.ndarray]]] = [[] for _ in range(comm.size)]
        uncompressed = []
        for number, (x, state, context, bucket_tag) in enumerate(buckets):
            pieces = shards.of_bucket[number]
            if codec.remembers:
                settle_moved(x, state, context, owned_piece(pieces, comm.rank), owned, number)
            for piece, payload in zip(pieces, codec.compress(x, state, context, pieces), strict=True):
                outbox[piece.owner].append((piece, payload))
            uncompressed.append(_sum_uncompressed(x, compressor, comm, context, bucket_tag))
        like = buckets[0][0]
        with comm.tagged(_labelled(tag, shards, codec, [p for sent in outbox for p in sent], like)):
            inbox = comm.all_to_all([_message(sent, like) for sent in outbox], ragged=True)
        results = [
            (piece, sum_and_compress(piece, payloads, codec, buckets[piece.bucket]))
            for piece, payloads in _by_piece(inbox, shards.of_owner[comm.rank], codec, buckets)
        ]
        with comm.tagged(_labelled(tag, shards, codec, results, like)):
            gathered = comm.all_gather(_message(results, like), ragged=True)
        received: list[list[np.ndarray]] = [[] for _ in buckets]
        for owner, message in enumerate(gathered):
            for piece, (payload,) in _by_piece([message], shards.of_owner[owner], codec, buckets, summed=True):
                received[piece.bucket].append(payload)
        for number, (x, _, context, _) in enumerate(buckets):
            if shards.of_bucket[number]:
                codec.decompress(received[number], x, context, shards.of_bucket[number])
            members = uncompressed[number]
            if members and not members.none and not members.all:
                members.put_back()


def shards_of(buckets: Sequence[TravellingBucket], codec: ShardCodec, ranks: int) -> Cut:
    """Return the shards of these buckets, which are the same on every rank."""
    layouts = tuple(codec.cut(layout_of(x, context), context) for x, _, context, _ in buckets)
    return cut(layouts, ranks, codec.block)


def sum_and_compress(
    piece: Piece, payloads: Sequence[np.ndarray], codec: ShardCodec, bucket: TravellingBucket
) -> np.ndarray:
    """Return what the owner of a piece sends of the sum of its payloads, which are in rank order."""
    x, state, context, _ = bucket
    total = context.scratch("shard sum", piece.size * x.itemsize).view(x.dtype)
    here = piece.context(context)
    counts = codec.add(payloads, total, piece, here, first=True)
    return codec.compress_sum(total, owed(x, state, piece) if codec.remembers else None, counts, piece, here)


def settle_moved(
    x: np.ndarray, state: State, context: ExchangeContext, piece: Piece | None, owned: Owned, number: int
) -> None:
    """Move what a rank owes of what it does not own any more to its residual.

    Args:
        x: the gradients of a bucket, ``(n,)``.
        state: arrays of x's size by name.
        context: the call for the bucket.
        piece: the piece of the bucket that it owns; None for none.
        owned: what it owned in the last step.
        number: of the bucket.
    """
    if piece is None:
        owned.pop(number, None)
        settle(state_array(state, "residual", x), state, None, context.skip_flag)
        return
    known = owned.get(number)
    if OWED in state and (known is None or known[0] is not state[OWED] or known[1:] != (piece.start, piece.stop)):
        part = slice(piece.start, piece.stop)
        settle(state_array(state, "residual", x), state, part, context.skip_flag)
    owned[number] = state_array(state, OWED, x), piece.start, piece.stop


def _message(payloads: Sequence[tuple[Piece, np.ndarray]], like: np.ndarray) -> np.ndarray:
    """Return the payloads of pieces as one message, where ``like`` is."""
    if not payloads:
        return like[:0].view(np.uint8)
    return device.concatenated([payload for _, payload in payloads], ALIGNED)


def _labelled(
    tag: MessageTag, shards: Cut, codec: ShardCodec, payloads: Sequence[tuple[Piece, np.ndarray]], like: np.ndarray
) -> MessageTag:
    """Return the tag of the messages of these payloads."""
    members = shards.members
    return tag._replace(members=members, breakdown=lambda _: shard_breakdown(codec, payloads, members, like))


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
    members = UncompressedMembers(x, mask, context)
    if not members.none:
        with comm.tagged(tag if members.all else tag._replace(members=members.members)):
            comm.all_reduce(members.flat)
    return members


def message_bytes(payloads: Sequence[int]) -> int:
    """Return the bytes of a message with payloads of these bytes.

    Example:
        >>> message_bytes([19, 4])
        28
    """
    end = 0
    for nbytes in payloads:
        end = -(-end // ALIGNED) * ALIGNED + nbytes
    return end


def _by_piece(
    messages: Sequence[np.ndarray],
    pieces: Sequence[Piece],
    codec: ShardCodec,
    buckets: Sequence[TravellingBucket],
    summed: bool = False,
) -> list[tuple[Piece, list[np.ndarray]]]:
    """Return the payloads of each piece of a shard, one from each message.

    Args:
        messages: of the same shard, one for each rank that has sent one.
        pieces: of the shard.
        codec: the compressor.
        buckets: of the plan.
        summed: whether these are messages of the second phase.

    Raises:
        ValueError: a message is not as long as its payloads say.
    """
    found: list[tuple[Piece, list[np.ndarray]]] = [(piece, []) for piece in pieces]
    for sender, message in enumerate(messages):
        end = 0
        for piece, payloads in found:
            start = -(-end // ALIGNED) * ALIGNED
            end = start + codec.payload_bytes(message[start:], piece, buckets[piece.bucket][0].itemsize, summed)
            payloads.append(message[start:end])
        if end != message.nbytes:
            text = f"message {sender} of a shard must be of {end} bytes, as its headers say, got {message.nbytes}"
            raise ValueError(f"{text}; it was damaged")
    return found
