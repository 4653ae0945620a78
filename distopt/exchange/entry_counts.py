"""How many entries payloads have, which tells how long they are: their headers say it, or on a GPU the ranks' hosts."""

import itertools
from collections.abc import Sequence

import numpy as np

from distopt import device
from distopt.comm import Communicator
from distopt.comm.message import ALIGNED, message_bytes
from distopt.compress import ExchangeContext
from distopt.compress.shards import Payload, Piece, ShardCodec, parts
from distopt.exchange.sharding import Sharding


class PlaceCounts:
    """How many entries lie in each part of each piece: found where the entries are, and read by the host at once.

    Args:
        codec: counts them.
        shards: of the buckets.
        context: the call for any of them, in whose memory they are counted.
    """

    def __init__(self, codec: ShardCodec, shards: Sharding, context: ExchangeContext):
        lengths = [len(codec.edges(pieces)) if pieces else 0 for pieces in shards.of_bucket]
        self._ends = list(itertools.accumulate(lengths, initial=0))
        self._places: np.ndarray = context.bucket.scratch("places", 8 * self._ends[-1]).view(np.int64)

    def of_bucket(self, number: int) -> np.ndarray:
        """Return where ``ShardCodec.select`` writes those of a bucket."""
        return self._places[self._ends[number] : self._ends[number + 1]]

    def counts(self, comm: Communicator) -> list[np.ndarray]:
        """Return those of each bucket; on a GPU the host waits for them, and looks after the other ranks meanwhile.

        It does not wait where there are none, since all lengths are known.

        Args:
            comm: on whose stream they are found, after sums over its ranks.

        Raises:
            RuntimeError: a collective has failed, or a rank has ended.
        """
        if comm.gpu is not None and self._places.size:
            with comm.control.waits("the numbers of entries"):
                device.synchronize(device.current_stream(), comm.check)
        places = device.host_copy(self._places) if self._places.size else np.zeros(0, np.int64)
        return [places[a + 1 : b] - places[a : max(a, b - 1)] for a, b in itertools.pairwise(self._ends)]


class HostCounts:
    """What the headers of payloads on the host say.

    Args:
        codec: the compressor, as it takes part.
        itemsizes: bytes of an element of each bucket.

    Attributes:
        lengths: the bytes of each rank's message, of the phase that is next; True if only the messages tell.
    """

    lengths: bool | list[int] = True

    def __init__(self, codec: ShardCodec, itemsizes: Sequence[int]):
        self.codec, self._itemsizes, self._summed = codec, itemsizes, False

    def tell(self, counts: np.ndarray) -> None:
        """Begin the first phase, in which this rank sends so many entries of each part of each piece, in order."""

    def tell_sums(self, entries: Sequence[int]) -> None:
        """Begin the second phase, in which this rank sends so many entries of each piece of its shard."""
        self._summed = True

    def known_bytes(self, pieces: Sequence[Piece]) -> int:
        """Return the bytes of a message with payloads of these pieces, where all elements are sent."""
        return self._message_bytes(pieces, [0] * len(pieces))

    def _message_bytes(self, pieces: Sequence[Piece], entries: Sequence[int]) -> int:
        numbers = ((n, piece, self._itemsizes[piece.bucket]) for n, piece in zip(entries, pieces, strict=True))
        return message_bytes([self.codec.payload_bytes(*number, self._summed) for number in numbers])

    def counts(self, piece: Piece) -> np.ndarray | None:
        """Return how many entries of each part of a piece all ranks have sent together; None if nobody has told."""
        return None

    def entries(self, sender: int, piece: Piece, message: np.ndarray) -> int:
        """Return how many entries the payload of a piece has, with which a message of this sender begins."""
        return self.codec.entries(message, piece, self._itemsizes[piece.bucket])

    def by_piece(
        self, messages: Sequence[np.ndarray], cut: Sequence[Sequence[Piece]]
    ) -> list[tuple[Piece, list[Payload]]]:
        """Return the payloads of each piece, in the order of ranks; each rank's message has those of its pieces.

        Raises:
            ValueError: a payload was damaged.
        """
        found: dict[Piece, list[Payload]] = {piece: [] for pieces in cut for piece in pieces}
        for sender, (message, pieces) in enumerate(zip(messages, cut, strict=True)):
            end = 0
            for piece in pieces:
                start = -(-end // ALIGNED) * ALIGNED
                entries = self.entries(sender, piece, message[start:])
                end = start + self.codec.payload_bytes(entries, piece, self._itemsizes[piece.bucket], self._summed)
                found[piece].append(Payload(message[start:end], entries))
            if end != message.nbytes:
                text = f"message {sender} of a shard must be of {end} bytes, as its headers say, got {message.nbytes}"
                raise ValueError(f"{text}; it was damaged")
        return list(found.items())


class DeviceCounts(HostCounts):
    """What the ranks' hosts tell each other, since no host sees the headers of payloads on GPUs.

    Args:
        codec: the compressor, as it takes part.
        itemsizes: bytes of an element of each bucket.
        shards: of the buckets.
        comm: the ranks.
    """

    def __init__(self, codec: ShardCodec, itemsizes: Sequence[int], shards: Sharding, comm: Communicator):
        super().__init__(codec, itemsizes)
        self._shards, self._comm = shards, comm
        pieces = [piece for pieces in shards.of_bucket for piece in pieces]
        ends = np.cumsum([0, *(parts(codec, piece) for piece in pieces)]).tolist()
        self._rows = {piece: slice(a, b) for piece, a, b in zip(pieces, ends[:-1], ends[1:], strict=True)}
        self._counts = np.zeros((comm.size, 0), np.int64)
        self._sums: dict[Piece, int] = {}

    def tell(self, counts: np.ndarray) -> None:
        if not self._known():
            self._counts = np.array(self._gathered(counts.tolist()), np.int64).reshape(self._comm.size, -1)
        mine = self._shards.of_owner[self._comm.rank]
        self.lengths = [self._sent(sender, mine) for sender in range(self._comm.size)]

    def tell_sums(self, entries: Sequence[int]) -> None:
        self._summed = True
        if not self._known():
            padding = [0] * (max(map(len, self._shards.of_owner)) - len(entries))  # all texts have as many numbers
            for pieces, counts in zip(self._shards.of_owner, self._gathered([*entries, *padding]), strict=True):
                self._sums |= dict(zip(pieces, counts, strict=False))
        self.lengths = [self._sent(owner, pieces) for owner, pieces in enumerate(self._shards.of_owner)]

    def counts(self, piece: Piece) -> np.ndarray | None:
        total: np.ndarray = self._counts[:, self._rows[piece]].sum(axis=0)
        return total

    def entries(self, sender: int, piece: Piece, message: np.ndarray | None = None) -> int:
        known = self.codec.known_entries(piece, self._summed)
        if known is not None:
            return known
        return self._sums[piece] if self._summed else int(self._counts[sender, self._rows[piece]].sum())

    def _known(self) -> bool:
        """Tell if all is known already in this phase."""
        return all(self.codec.known_entries(piece, self._summed) is not None for piece in self._rows)

    def _sent(self, sender: int, pieces: Sequence[Piece]) -> int:
        """Return the bytes of what a rank sends of pieces."""
        return self._message_bytes(pieces, [self.entries(sender, piece) for piece in pieces])

    def _gathered(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every rank.  Collective."""
        texts = self._comm.control.gather(" ".join(map(str, numbers)))
        return [list(map(int, text.split())) for text in texts]
