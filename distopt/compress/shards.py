"""The interface of compressors in a two-phase exchange, in which every rank owns a shard of the plan.

In the first phase each rank sends every owner what it has compressed of the owner's shard.  The owner adds, in rank
order, compresses the sum again, and keeps what it does not send: the error feedback of Tang et al., "DoubleSqueeze:
parallel stochastic gradient descent with double-pass error-compensated compression", 2019.  In the second phase every
owner sends the result to all.
"""

import abc
import copy
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from distopt.compress.context import BucketContext, DeviceContext, ExchangeContext, decayed
from distopt.compress.state import RESIDUAL, State, state_array
from distopt.kernels.breakdown import LazyBreakdown, PayloadBreakdown
from distopt.kernels.layout import BucketLayout


class Piece:
    """The part of a bucket that lies in one rank's shard.

    Args:
        owner: the rank.
        bucket: the number of the bucket.
        start: its first element in the bucket's flat arrays.
        stop: the element after its last one.
        members: those of the bucket that are exchanged.

    Attributes:
        size: the elements of its flat arrays; gaps between members count.
    """

    def __init__(self, owner: int, bucket: int, start: int, stop: int, members: BucketLayout):
        self.owner, self.bucket, self.start, self.stop, self._members = owner, bucket, start, stop, members
        self.size = stop - start

    @functools.cached_property
    def layout(self) -> BucketLayout:
        """The members, or parts of them, that lie in it; offsets count from its start."""
        return self._members.stretch(self.start, self.stop)

    def of(self, flat: np.ndarray) -> np.ndarray:
        """Return its part of a flat array of the bucket."""
        return flat[self.start : self.stop]

    def context(self, context: ExchangeContext) -> ExchangeContext:
        """Return a call of a compressor for it, from one for its bucket."""
        bucket, name = context.bucket, f"of {self.start} to {self.stop}"
        return context._replace(
            device=DeviceContext(context.skip_flag),  # the capacity is that of the bucket's payload
            bucket=BucketContext(
                self.layout,
                None,
                lambda text, nbytes: bucket.scratch(f"shard {text}", nbytes),
                lambda text, make: bucket.constant(f"{text} {name}", make),
            ),
        )


class PieceBytes(NamedTuple):
    """The bytes of a payload of a piece, and how many of them are values and indices; the others are headers."""

    total: int
    values: int
    indices: int = 0


class Payload(NamedTuple):
    """What is sent of a piece.

    Args:
        data: the payload, of uint8.
        entries: how many it has; 0 if all elements are sent.
    """

    data: np.ndarray
    entries: int


class Selected(NamedTuple):
    """What is sent of a bucket, before it is cut.

    Args:
        payload: the payload of the bucket, or the planes of its entries.
        memory: the array that it was moved out of, where the rest stays.
    """

    payload: np.ndarray
    memory: np.ndarray


class ShardTraits(NamedTuple):
    """What a compressor is in a two-phase exchange.

    Args:
        block: borders of shards are multiples of so many elements from the start of a member.
        ragged: lengths of payloads depend on the data.
        memory: how much outlives a step of what a rank or an owner does not send (the states ``RESIDUAL`` and
            ``OWED``); None: it is dropped.
        note: what a description of the exchange says of it; '' for nothing.
    """

    block: int = 64
    ragged: bool = False
    memory: float | None = None
    note: str = ""


class ShardCodec(abc.ABC):
    """A compressor in a two-phase exchange.

    Attributes:
        traits: what it is there.
    """

    traits = ShardTraits()

    @abc.abstractmethod
    def expected_bytes(self, layout: BucketLayout, pieces: Sequence[Piece], summed: bool) -> list[PieceBytes] | None:
        """Return the bytes of the payload of each piece, if entries are spread evenly over what they are chosen from.

        Args:
            layout: the members of a bucket that are cut.
            pieces: its pieces, in order.
            summed: whether these are payloads of the second phase.

        Returns:
            The bytes; None if they depend on the data even so.
        """

    def known_entries(self, piece: Piece, summed: bool) -> int | None:
        """Return how many entries the payload of a piece has, 0 if all elements are sent; None if nobody knows before.

        Args:
            piece: the piece.
            summed: whether it is a payload of the second phase.
        """
        return None if self.traits.ragged else 0

    def edges(self, pieces: Sequence[Piece]) -> np.ndarray:
        """Return the elements of a bucket at which entries are counted, ascending, ``(edges,)`` of int64.

        From one to the next is a part of a piece (``parts``); the last edge ends the last piece.  Empty if all elements
        are sent, or if it is known how many entries are.
        """
        return np.zeros(0, np.int64)

    @abc.abstractmethod
    def select(
        self, x: np.ndarray, state: State, context: ExchangeContext, pieces: Sequence[Piece], places: np.ndarray
    ) -> Selected:
        """Move what is worth sending out of a bucket, as ``Compressor.compress`` does.

        Args:
            x: the gradients of the bucket, ``(n,)``.
            state: arrays of x's size by name.
            context: the call for the bucket.
            pieces: its pieces, in order.
            places: how many entries lie before each of ``edges`` is written here, ``(edges,)`` of int64, where x is.
        """

    @abc.abstractmethod
    def pack(
        self,
        selected: Sequence[Selected],
        counts: Sequence[np.ndarray],
        contexts: Sequence[ExchangeContext],
        pieces: Sequence[Sequence[Piece]],
    ) -> list[list[Payload]]:
        """Return the payload of each piece of each of several buckets; the arguments have an item for each bucket.

        Args:
            selected: what ``select`` has returned.
            counts: of the entries of each part, ``(parts,)`` of int64, on the host.
            contexts: the calls for the buckets.
            pieces: their pieces, in order.
        """

    @abc.abstractmethod
    def add(self, payloads: Sequence[Payload], total: np.ndarray, piece: Piece, context: ExchangeContext) -> np.ndarray:
        """Overwrite ``total`` by the sum of the payloads of a piece, added in their order.

        Args:
            payloads: of one piece, in rank order.
            total: ``(piece.size,)``.
            piece: the piece.
            context: the call for the piece.

        Returns:
            On the host, how many entries of each part were added, ``(parts,)`` of int64.
        """

    @abc.abstractmethod
    def compress_sum(
        self, total: np.ndarray, memory: np.ndarray | None, counts: np.ndarray, piece: Piece, context: ExchangeContext
    ) -> Payload:
        """Return the payload of a sum over ranks.

        Args:
            total: the sum, ``(piece.size,)``, which is spent.
            memory: what was not sent of earlier sums, of the same size, which is added first and keeps the rest; None
                drops the rest.
            counts: of the entries that all ranks have sent, by part.
            piece: the piece.
            context: the call for the piece.
        """

    @abc.abstractmethod
    def decompress(
        self,
        payloads: Sequence[Sequence[Payload]],
        arrays: Sequence[np.ndarray],
        contexts: Sequence[ExchangeContext],
        pieces: Sequence[Sequence[Piece]],
        summed: bool = True,
    ) -> None:
        """Overwrite the pieces of several buckets by what their payloads stand for.

        Args:
            payloads: of each bucket, one per piece.
            arrays: of the buckets, ``(n,)``.
            contexts: the calls for the buckets.
            pieces: their pieces, in order.
            summed: whether they are those of sums, of the second phase.
        """

    def entries(self, message: np.ndarray, piece: Piece, itemsize: int) -> int:
        """Return how many entries the payload of a piece has, as its header says; 0 if all elements are sent.

        Args:
            message: begins with the payload, of uint8, on the host.
            piece: the piece.
            itemsize: bytes of an element of the bucket.

        Raises:
            ValueError: it is none of this compressor, or was damaged.
        """
        return 0

    def breakdown(self, payloads: Sequence[tuple[Piece, Payload]], members: BucketLayout) -> LazyBreakdown:
        """Read now what is needed of payloads to say later what they consist of: by default of values alone.

        Args:
            payloads: the pieces, and of each its payload.
            members: of the whole plan, among which entries are shared out.
        """
        total = sum(payload.data.nbytes for _, payload in payloads)
        return lambda: PayloadBreakdown(total)

    @abc.abstractmethod
    def payload_bytes(self, entries: int, piece: Piece, itemsize: int, summed: bool) -> int:
        """Return the bytes of the payload of a piece.

        Args:
            entries: how many it has.
            piece: the piece.
            itemsize: bytes of an element of the bucket.
            summed: whether it is one of the second phase.
        """


class ElementShards(ShardCodec):
    """A codec that sends a code for every element."""

    @abc.abstractmethod
    def code_bytes(self, piece: Piece) -> int:
        """Return the bytes of the codes of a piece."""

    def breakdown(self, payloads: Sequence[tuple[Piece, Payload]], members: BucketLayout) -> LazyBreakdown:
        """Tell codes and scales apart."""
        pieces = [piece for piece, _ in payloads]
        elements = by_member(((piece, piece.layout.records["size"]) for piece in pieces), members)
        found = PayloadBreakdown(sum(map(self.code_bytes, pieces)), counts=elements)
        return lambda: found


def remembering(codec: ShardCodec, memory: float = 1.0) -> ShardCodec:
    """Return the same for a compressor with a memory: gradients are added to the residual, and so are sums."""
    twin = copy.copy(codec)
    twin.traits = codec.traits._replace(memory=memory)
    return twin


def remembered(
    codec: ShardCodec, x: np.ndarray, state: State, context: ExchangeContext
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the array that is sent of, and what is added to it: a residual, decayed, and x; or x, and None."""
    if codec.traits.memory is None:
        return x, None
    return decayed(state_array(state, RESIDUAL, x), codec.traits.memory, context), x


def parts(codec: ShardCodec, piece: Piece) -> int:
    """Return the number of parts of a piece in which entries are counted."""
    return max(0, len(codec.edges([piece])) - 1)


def by_member(pieces: Iterable[tuple[Piece, np.ndarray]], members: BucketLayout) -> np.ndarray:
    """Add up numbers of the members of pieces, ``(members of the piece,)`` each, by members of the whole plan."""
    total, row = np.zeros(len(members.names), np.int64), {name: k for k, name in enumerate(members.names)}
    for piece, numbers in pieces:
        total[[row[name] for name in piece.layout.names]] += numbers
    return total
