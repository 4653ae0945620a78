"""Selected entries in a two-phase exchange (Li and Hoefler, "Near-optimal sparse allreduce", 2022: Ok-Topk)."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from distopt import device, kernels
from distopt.compress import sections
from distopt.compress.context import ExchangeContext, State, state_array
from distopt.compress.planes import INDEX, unpack_entries
from distopt.compress.shards import Piece, PieceBytes, ShardCodec
from distopt.kernels.layout import BucketLayout

Choose = Callable[[np.ndarray, State, ExchangeContext], tuple[np.ndarray, np.ndarray]]
Cut = Callable[[BucketLayout, ExchangeContext], BucketLayout]


class Selector(Protocol):
    """What chooses entries (``top_k.Sparse`` says what each method does)."""

    reselect: bool

    def expected_parts(self, layout: BucketLayout) -> list[tuple[int, int, int]] | None:
        """Return of each part where it begins and ends, and how many are sent; None if that depends on the data."""

    def select(self, x: np.ndarray, context: ExchangeContext, add: np.ndarray | None = None) -> np.ndarray:
        """Move the selected entries out of x (+ add); return their planes."""

    def count_parts(self, index: np.ndarray, layout: BucketLayout) -> np.ndarray:
        """Count entries by the part that the selector chooses from."""

    def reselect_sum(self, x: np.ndarray, add: np.ndarray, counts: np.ndarray, context: ExchangeContext) -> np.ndarray:
        """Move what an owner sends of a sum over ranks out of x + add; return the planes."""


class EntryShards(ShardCodec):
    """Entries that a selector has chosen are cut at the borders of shards; an owner chooses again among their sums.

    It sends as many as the ranks have sent it on average, rounded up, of each part that the selector chooses from, or
    with ``reselect=False`` all that are not zero.

    Args:
        selector: chooses the entries.
        value: the format of values (``sections.FORMATS``).
        choose: moves what is sent of a bucket out of an array; returns the planes of the entries, and the array.  None
            for what the selector chooses of the gradients, or of the residual with them.
        cut: returns the members of a bucket from which entries are chosen; None for all.
    """

    ragged = True

    def __init__(
        self,
        selector: Selector,
        value: str,
        choose: Choose | None = None,
        cut: Cut | None = None,
    ):
        self._selector, self._value, self._choose, self._cut = selector, value, choose, cut
        if not selector.reselect:
            self.note = "; sums are exact, and their bytes grow with the ranks"

    def cut(self, layout: BucketLayout, context: ExchangeContext) -> BucketLayout:
        return layout if self._cut is None else self._cut(layout, context)

    def expected_bytes(self, layout: BucketLayout, pieces: Sequence[Piece], summed: bool) -> list[PieceBytes] | None:
        parts = self._selector.expected_parts(layout)
        if parts is None:
            return None
        edges = np.array([(piece.start, piece.stop) for piece in pieces], np.int64).reshape(-1, 2)
        counts = np.zeros(len(pieces), np.int64)
        for begin, end, count in parts:
            before = count * (np.clip(edges, begin, end) - begin) // max(1, end - begin)
            counts += before[:, 1] - before[:, 0]
        itemsize = layout.dtype.itemsize
        rows = sections.table(edges[:, 0], edges[:, 1] - edges[:, 0], counts, self._value, itemsize)
        return [
            PieceBytes(total, values := self.value_bytes(count, itemsize), total - sections.HEADER - values)
            for total, count in zip(rows["bytes"].tolist(), counts.tolist(), strict=True)
        ]

    def choose(self, x: np.ndarray, state: State, context: ExchangeContext) -> tuple[np.ndarray, np.ndarray]:
        """Move what is sent of a bucket out of an array; return the planes of the entries, and the array."""
        if self._choose:
            return self._choose(x, state, context)
        if not self.remembers:
            return self._selector.select(x, context), x
        residual = state_array(state, "residual", x)
        return self._selector.select(residual, context, x), residual

    def compress(
        self, x: np.ndarray, state: State, context: ExchangeContext, pieces: Sequence[Piece]
    ) -> list[np.ndarray]:
        planes, memory = self.choose(x, state, context)
        if not pieces:
            return []
        starts = np.array([piece.start for piece in pieces], np.int64)
        sizes = np.array([piece.size for piece in pieces], np.int64)
        index, _ = unpack_entries(planes, x.dtype)
        borders = np.searchsorted(index, np.concatenate([starts, starts[-1:] + sizes[-1:]]))
        rows = sections.table(starts, sizes, np.diff(borders), self._value, x.itemsize)
        return sections.pack(memory, planes, rows, context)

    def add(
        self, payloads: Sequence[np.ndarray], total: np.ndarray, piece: Piece, context: ExchangeContext, first: bool
    ) -> np.ndarray:
        n, itemsize = piece.size, total.itemsize
        places = np.array([sections.entries(payload, n, self._value, itemsize) for payload in payloads], np.int64)
        rows = sections.table(np.zeros_like(places), np.full_like(places, n), places, self._value, itemsize)
        index, entry = sections.unpack(payloads, rows, total, context)
        if first:
            device.clear(total)
        for begin, count in zip(rows["plane"].tolist(), places.tolist(), strict=True):
            kernels.decode_sparse(total, index[begin : begin + count], entry[begin : begin + count])
        return self._selector.count_parts(index, piece.layout)

    def compress_sum(
        self, total: np.ndarray, memory: np.ndarray | None, counts: np.ndarray, piece: Piece, context: ExchangeContext
    ) -> np.ndarray:
        x, add = (total, total[:0]) if memory is None else (memory, total)
        planes = self._selector.reselect_sum(x, add, counts, context)
        entries = planes.nbytes // (x.itemsize + INDEX)
        rows = sections.table(
            np.zeros(1, np.int64), np.array([piece.size]), np.array([entries]), self._value, x.itemsize
        )
        (payload,) = sections.pack(x, planes, rows, context)
        return payload

    def decompress(
        self, payloads: Sequence[np.ndarray], x: np.ndarray, context: ExchangeContext, pieces: Sequence[Piece]
    ) -> None:
        sizes = [piece.size for piece in pieces]
        places = [sections.entries(p, n, self._value, x.itemsize) for p, n in zip(payloads, sizes, strict=True)]
        starts = np.array([piece.start for piece in pieces], np.int64)
        rows = sections.table(starts, np.array(sizes), np.array(places), self._value, x.itemsize)
        device.clear(x)
        kernels.decode_sparse(x, *sections.unpack(payloads, rows, x, context))

    def indices(self, payload: np.ndarray, piece: Piece, like: np.ndarray) -> np.ndarray:
        """Return the indices of the entries of a payload, from the start of its piece, ``(k,)`` of int32.

        Args:
            payload: the payload, on the host.
            piece: the piece.
            like: an array of the dtype of the entries.
        """
        count = np.array([sections.entries(payload, piece.size, self._value, like.itemsize)])
        rows = sections.table(np.zeros_like(count), np.array([piece.size]), count, self._value, like.itemsize)
        return sections.unpack([payload], rows, like, ExchangeContext())[0]

    def value_bytes(self, k: int, itemsize: int) -> int:
        """Return the bytes of so many values, and of their scales."""
        return sections.value_bytes(k, self._value, itemsize)

    def payload_bytes(self, payload: np.ndarray, piece: Piece, itemsize: int, summed: bool) -> int:
        count = sections.entries(payload, piece.size, self._value, itemsize)
        return sections.section_bytes(piece.size, count, self._value, itemsize)
