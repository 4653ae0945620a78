"""Selected entries in a two-phase exchange (Li and Hoefler, "Near-optimal sparse allreduce", 2022: Ok-Topk)."""

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from distopt import device, kernels
from distopt.compress import sections
from distopt.compress.context import ExchangeContext
from distopt.compress.planes import INDEX, add_planes, combination_bits, counts_by_member, unpack_entries
from distopt.compress.shards import Payload, Piece, PieceBytes, Selected, ShardCodec, ShardTraits, by_member, remembered
from distopt.compress.state import State
from distopt.kernels.breakdown import LazyBreakdown, PayloadBreakdown
from distopt.kernels.layout import BucketLayout

NOTHING = BucketLayout([], [], [], np.float32)
Choose = Callable[[np.ndarray, State, ExchangeContext], tuple[np.ndarray, np.ndarray]]


class Selector(Protocol):
    """The part of ``top_k.Sparse`` that chooses the entries of a sum."""

    reselect: bool
    block: int

    def known_entries(self, layout: BucketLayout, summed: bool) -> int | None:
        """Return how many entries of these members are sent; None if that depends on the data."""

    def expected_parts(self, layout: BucketLayout) -> list[tuple[int, int, int]] | None:
        """Return of each part where it begins and ends, and how many are sent; None if that depends on the data."""

    def select(self, x: np.ndarray, context: ExchangeContext, add: np.ndarray | None = None) -> np.ndarray:
        """Move the selected entries out of x (+ add); return their planes."""

    def part_starts(self, layout: BucketLayout) -> np.ndarray:
        """Return where the parts begin that it chooses from."""

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
    """

    def __init__(self, selector: Selector, value: str, choose: Choose | None = None):
        self._selector, self._value, self._choose = selector, value, choose
        self._part_starts = functools.lru_cache(4096)(selector.part_starts)
        self.traits = ShardTraits(
            selector.block,
            ragged=selector.known_entries(NOTHING, summed=False) is None,
            note="" if selector.reselect else "; sums are exact, and their bytes grow with the ranks",
        )

    def expected_bytes(self, layout: BucketLayout, pieces: Sequence[Piece], summed: bool) -> list[PieceBytes] | None:
        edges = np.array([(piece.start, piece.stop) for piece in pieces], np.int64).reshape(-1, 2)
        counts = self._expected_counts(layout, pieces, edges, summed)
        if counts is None:
            return None
        itemsize = layout.dtype.itemsize
        rows = sections.table(edges[:, 0], edges[:, 1] - edges[:, 0], counts, self._value, itemsize)
        return [
            PieceBytes(total, values := self.value_bytes(count, itemsize), total - sections.HEADER - values)
            for total, count in zip(rows["bytes"].tolist(), counts.tolist(), strict=True)
        ]

    def _expected_counts(
        self, layout: BucketLayout, pieces: Sequence[Piece], edges: np.ndarray, summed: bool
    ) -> np.ndarray | None:
        """Return how many entries each piece has, if those of each part are spread evenly; None if nobody knows."""
        # pieces have layouts, of which there are thousands where many ranks are asked about
        if self._selector.known_entries(NOTHING, summed) is not None:
            return np.array([self.known_entries(piece, summed) for piece in pieces], np.int64)
        parts = self._selector.expected_parts(layout)
        if parts is None:
            return None
        counts = np.zeros(len(pieces), np.int64)
        for begin, end, count in parts:
            before = count * (np.clip(edges, begin, end) - begin) // max(1, end - begin)
            counts += before[:, 1] - before[:, 0]
        return counts

    def known_entries(self, piece: Piece, summed: bool) -> int | None:
        return self._selector.known_entries(piece.layout, summed)

    def after(self, change: Callable[[np.ndarray, ExchangeContext], np.ndarray]) -> "EntryShards":
        """Return the same of what ``change(x, context)`` makes of the gradients of a bucket."""
        twin, choose = copy.copy(self), self.choose
        twin._choose = lambda x, state, context: choose(change(x, context), state, context)
        return twin

    def choose(self, x: np.ndarray, state: State, context: ExchangeContext) -> tuple[np.ndarray, np.ndarray]:
        """Move what is sent of a bucket out of an array; return the planes of the entries, and the array."""
        if self._choose:
            return self._choose(x, state, context)
        memory, add = remembered(self, x, state, context)
        return self._selector.select(memory, context, add), memory

    def edges(self, pieces: Sequence[Piece]) -> np.ndarray:
        if not self.traits.ragged:
            return np.zeros(0, np.int64)
        starts = [piece.start + self._part_starts(piece.layout) for piece in pieces]
        return np.concatenate([*starts, [pieces[-1].stop]]).astype(np.int64)

    def breakdown(self, payloads: Sequence[tuple[Piece, Payload]], members: BucketLayout) -> LazyBreakdown:
        """Tell values with their scales, and indices; the rest is headers, and what aligns."""
        if any(device.on_gpu(payload.data) for _, payload in payloads):
            return super().breakdown(payloads, members)
        values = indices = ideal = 0
        for piece, payload in payloads:
            of_values = self.value_bytes(payload.entries, piece.layout.dtype.itemsize)
            values += of_values
            indices += payload.data.nbytes - sections.HEADER - of_values
            ideal += combination_bits(piece.size, payload.entries) + 8 * of_values
        found = ((piece, counts_by_member(self.indices(payload, piece), piece.layout)) for piece, payload in payloads)
        counts = by_member(found, members)
        return lambda: PayloadBreakdown(values, indices, ideal, counts)

    def select(
        self, x: np.ndarray, state: State, context: ExchangeContext, pieces: Sequence[Piece], places: np.ndarray
    ) -> Selected:
        edges = self.edges(pieces) if pieces else places[:0]
        mirror = context.bucket.constant(f"edges {edges.tobytes()!r}", edges.copy) if edges.size else None

        def work() -> Selected:
            planes, memory = self.choose(x, state, context)
            if mirror is not None:
                index, _ = unpack_entries(planes, x.dtype)
                kernels.find_edges(mirror, places, index)
            return Selected(planes, memory)

        edges_there = () if mirror is None else (mirror.host,)  # others when borders have moved
        return context.repeat("select", work, (x, places, *edges_there, *state.values()))

    def pack(
        self,
        selected: Sequence[Selected],
        counts: Sequence[np.ndarray],
        contexts: Sequence[ExchangeContext],
        pieces: Sequence[Sequence[Piece]],
    ) -> list[list[Payload]]:
        """Pack each bucket's entries, all into one memory, as messages have them: pieces are in the owners' order."""
        entries = [self._entries(of_parts, cuts) for of_parts, cuts in zip(counts, pieces, strict=True)]
        itemsizes = np.array([s.memory.itemsize for s, cuts in zip(selected, pieces, strict=True) for _ in cuts])
        rows = self._table(list(itertools.chain(*pieces)), np.concatenate(entries), itemsizes)
        cuts = list(map(len, pieces))
        planes, arrays = zip(*selected, strict=True)
        room = sections.room(rows, contexts[0])
        packed = map(Payload, sections.pack(arrays, planes, rows, cuts, room, contexts[0]), rows["places"].tolist())
        return [list(itertools.islice(packed, n)) for n in cuts]

    def _entries(self, counts: np.ndarray, pieces: Sequence[Piece]) -> np.ndarray:
        """Return the entries of each piece of a bucket, from those of each part."""
        if not self.traits.ragged:
            return np.array([self.known_entries(piece, summed=False) for piece in pieces], np.int64)
        starts = list(itertools.accumulate((len(self._part_starts(piece.layout)) for piece in pieces[:-1]), initial=0))
        return np.add.reduceat(counts, starts) if pieces else np.zeros(0, np.int64)

    def add(self, payloads: Sequence[Payload], total: np.ndarray, piece: Piece, context: ExchangeContext) -> np.ndarray:
        entries = np.array([payload.entries for payload in payloads], np.int64)
        bases, sizes = np.zeros(len(payloads), np.int64), np.array([piece.size] * len(payloads))
        rows = sections.table(bases, sizes, entries, self._value, total.itemsize)
        index, entry = sections.unpack([payload.data for payload in payloads], rows, total, context)
        cuts = [slice(a, a + n) for a, n in zip(rows["plane"].tolist(), entries.tolist(), strict=True)]
        add_planes([(index[cut], entry[cut]) for cut in cuts], total, context)
        if device.on_gpu(total) or not self.traits.ragged:
            return np.zeros(0, np.int64)
        starts = self._part_starts(piece.layout)
        return np.bincount(starts.searchsorted(index, "right") - 1, minlength=len(starts))

    def compress_sum(
        self, total: np.ndarray, memory: np.ndarray | None, counts: np.ndarray, piece: Piece, context: ExchangeContext
    ) -> Payload:
        x, add = (total, total[:0]) if memory is None else (memory, total)
        planes = self._selector.reselect_sum(x, add, counts, context)
        entries = planes.nbytes // (x.itemsize + INDEX)
        rows = sections.table(
            np.zeros(1, np.int64), np.array([piece.size]), np.array([entries]), self._value, x.itemsize
        )
        (payload,) = sections.pack([x], [planes], rows, [1], sections.room(rows, context), context)
        return Payload(payload, entries)

    def decompress(
        self,
        payloads: Sequence[Sequence[Payload]],
        arrays: Sequence[np.ndarray],
        contexts: Sequence[ExchangeContext],
        pieces: Sequence[Sequence[Piece]],
        summed: bool = True,
    ) -> None:
        """Unpack the entries of all buckets of a dtype at once, and write each bucket's to its array."""
        for dtype in {x.dtype: None for x in arrays}:
            same = [k for k, x in enumerate(arrays) if x.dtype == dtype]
            found = [payload for k in same for payload in payloads[k]]
            rows = self._table([piece for k in same for piece in pieces[k]], [n for _, n in found], dtype.itemsize)
            end = 0
            for k in same:
                begin, end = end, end + len(pieces[k])
                rows["x"][begin:end] = device.address(arrays[k])
                device.clear(arrays[k])
            sections.unpack([data for data, _ in found], rows, arrays[same[0]], contexts[same[0]])

    def _table(self, pieces: Sequence[Piece], entries: Sequence[int] | np.ndarray, itemsize: Any) -> np.ndarray:
        """Return the table of these pieces; ``itemsize`` is a number, or one for each of them."""
        edges = np.array([(piece.start, piece.size) for piece in pieces], np.int64).reshape(-1, 2)
        return sections.table(edges[:, 0], edges[:, 1], np.asarray(entries, np.int64), self._value, itemsize)

    def entries(self, message: np.ndarray, piece: Piece, itemsize: int) -> int:
        return sections.entries(message, piece.size, self._value, itemsize)

    def indices(self, payload: Payload, piece: Piece) -> np.ndarray:
        """Return the indices of the entries of a payload, from the start of its piece, ``(k,)`` of int32."""
        entries, like = np.array([payload.entries]), np.empty(0, piece.layout.dtype)
        rows = sections.table(np.zeros_like(entries), np.array([piece.size]), entries, self._value, like.itemsize)
        return sections.unpack([payload.data], rows, like, ExchangeContext())[0]

    def value_bytes(self, k: int, itemsize: int) -> int:
        """Return the bytes of so many values, and of their scales."""
        return int(sections.format_of(self._value, itemsize).value_bytes(k))

    def payload_bytes(self, entries: int, piece: Piece, itemsize: int, summed: bool) -> int:
        return sections.section_bytes(piece.size, entries, self._value, itemsize)
