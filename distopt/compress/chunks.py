"""Send the largest entries of each chunk of a tensor: as many everywhere, so that all ranks know how many there are."""

import functools

import numpy as np

from distopt import device, kernels
from distopt.checks import check_bool, check_int
from distopt.compress.context import ExchangeContext, layout_of
from distopt.compress.planes import combination_bits, payload_size, unpack_entries
from distopt.compress.top_k import FixedDensity, Increment
from distopt.kernels.layout import BucketLayout

ALIGNED = 64  # elements: a chunk begins where a vector may be read
SLACK = 16  # places that the host's kernel may write beyond the last candidate


def chunk_counts(sizes: np.ndarray, k: int, of: int) -> np.ndarray:
    """Return how many entries are sent of tensors of these sizes, k of each chunk of so many elements."""
    full, rest = np.divmod(np.asarray(sizes, np.int64), of)
    counts: np.ndarray = full * k + -(-rest * k // of)
    return counts


def chunk_places(layout: BucketLayout, of: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where the chunks of so many elements of all members begin, ascending, and their sizes, of int64."""
    sizes, begins = layout.records["size"].astype(np.int64), layout.records["offset"].astype(np.int64)
    chunks = -(-sizes // of)
    first = of * (np.arange(chunks.sum()) - np.repeat(np.cumsum(chunks) - chunks, chunks))
    return np.repeat(begins, chunks) + first, np.minimum(np.repeat(sizes, chunks) - first, of)


@functools.lru_cache(4096)
def entries_in(layout: BucketLayout, k: int, of: int) -> int:
    """Return how many entries are sent of the members of a layout, which every rank asks of every piece, every step."""
    return int(chunk_counts(layout.records["size"], k, of).sum())


class Chunks(FixedDensity):
    """Send the ``k`` entries that are largest in magnitude of each chunk of ``of`` consecutive elements of a tensor.

    Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", 2025, choose so, 64 of 4,096.  A chunk is
    small enough that its indices are short (7.4 bits each at that density, 8.0 in Elias-Fano's code), and no part of a
    tensor is left out for long.  Ties go to the lowest index, and NaN counts as more than infinite.  The last chunk of
    a tensor, if it is shorter, sends as large a share, rounded up.

    The number of entries depends on no data: in a two-phase exchange shards begin where chunks do, so that no rank has
    to be told how many entries it will get.

    Args:
        k: the entries of a chunk that are sent.
        of: its elements, a multiple of 64.
        reselect: in a two-phase exchange, the owner of a shard sends the k largest of each chunk of the sum; False: all
            of them, so that the sum is exact, and its bytes grow with the ranks.

    Raises:
        TypeError: for a number that is no integer, or a ``reselect`` that is no bool.
        ValueError: for an ``of`` that is no positive multiple of 64, and for a ``k`` below 1 or above ``of``.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import ExchangeContext
        >>> x = np.arange(100, dtype=np.float32)
        >>> payload = Chunks(2, of=64).compress(x, {}, ExchangeContext())
        >>> payload[:16].view(np.float32), payload[16:].view(np.int32)
        (array([62., 63., 98., 99.], dtype=float32), array([62, 63, 98, 99], dtype=int32))
    """

    def __init__(self, k: int = 64, of: int = 4096, reselect: bool = True):
        self.of: int = check_int("of", of, least=ALIGNED)
        if self.of % ALIGNED:
            raise ValueError(f"of must be a multiple of {ALIGNED}, got {of}")
        self.k: int = check_int("k", k, least=1)
        if self.k > self.of:
            raise ValueError(f"k must be at most of = {of}, the elements of a chunk, got {k}")
        self.reselect: bool = check_bool("reselect", reselect)
        self.density, self.block = self.k / self.of, self.of

    def at_density(self, density: float) -> "Chunks":
        """Return the same with as many entries of a chunk as make this density, rounded up."""
        if not 0 < density <= 1:
            raise ValueError(f"density must be in (0, 1], got {density}")
        exact = density * self.of
        return Chunks(min(self.of, max(1, int(np.ceil(exact - 1e-9 * max(1.0, exact))))), self.of, self.reselect)

    def with_density(self, density: float) -> "Chunks":
        return self.at_density(density)

    def counts(self, sizes: np.ndarray) -> np.ndarray:
        """Return how many entries are sent of tensors of these sizes, ``(tensors,)`` of int64."""
        return chunk_counts(sizes, self.k, self.of)

    def known_entries(self, layout: BucketLayout, summed: bool) -> int | None:
        return entries_in(layout, self.k, self.of) if self.reselect or not summed else None

    def choice_bits(self, k: int, layout: BucketLayout) -> int:
        full, rest = np.divmod(layout.records["size"].astype(np.int64), self.of)
        of_rest = (combination_bits(n, -(-n * self.k // self.of)) for n in rest.tolist())
        return int(full.sum()) * combination_bits(self.of, self.k) + sum(of_rest)

    def known_counts(self, k: int, layout: BucketLayout) -> np.ndarray:
        return self.counts(layout.records["size"])

    def expected_parts(self, layout: BucketLayout) -> list[tuple[int, int, int]]:
        """Return of each tensor its full chunks as one part, and the rest as another."""
        parts = []
        for begin, size in zip(layout.records["offset"].tolist(), layout.records["size"].tolist(), strict=True):
            full, end = begin + size // self.of * self.of, begin + size
            found = [(begin, full, size // self.of * self.k), (full, end, -(-(end - full) * self.k // self.of))]
            parts += [part for part in found if part[0] < part[1]]
        return parts

    def extract(self, x: np.ndarray, add: Increment, context: ExchangeContext) -> np.ndarray:
        """Select in one launch on a GPU, with a block for each chunk; in one pass on the host."""
        layout = layout_of(x, context)
        table = context.constant(f"chunks of {self!r}", lambda: self._table(layout))
        total = self.counts(layout.records["size"]).sum()
        planes = context.scratch("payload", payload_size(total, x.itemsize))
        index, entry = unpack_entries(planes, x.dtype)
        if device.on_gpu(x):
            added = add.added(layout, context)
            kernels.select_chunks(x, added, table, index, entry, table.host.size // 4, context.skip_flag)
        else:
            held = context.scratch("candidates", payload_size(self.of + SLACK, x.itemsize))
            kernels.encode_chunks(x, *add, table, index, entry, *unpack_entries(held, x.dtype), context.skip_flag)
        return planes

    def reselect_sum(self, x: np.ndarray, add: np.ndarray, counts: np.ndarray, context: ExchangeContext) -> np.ndarray:
        """Select the largest entries of each chunk of a sum."""
        if not self.reselect:
            return super().reselect_sum(x, add, counts, context)
        return self.extract(x, Increment(add, x[:0]), context)

    def _table(self, layout: BucketLayout) -> np.ndarray:
        """Return ``struct ChunkOfX`` of the kernels for each chunk, ascending, flat: ``(4 chunks,)`` of int64."""
        begins, sizes = chunk_places(layout, self.of)
        rows = np.empty((begins.size, 4), np.int64)
        rows[:, 0], rows[:, 1] = begins, sizes
        rows[:, 2] = -(-rows[:, 1] * self.k // self.of)
        rows[:, 3] = np.cumsum(rows[:, 2]) - rows[:, 2]
        return rows.reshape(-1)

    def __repr__(self) -> str:
        return f"Chunks({self.k}, of={self.of}{', reselect=False' * (not self.reselect)})"
