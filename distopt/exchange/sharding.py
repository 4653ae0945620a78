"""Cut a plan into shards, one for each rank: of about as many elements, or of about as many entries."""

import bisect
import functools
import itertools
import zlib
from collections.abc import Sequence

import numpy as np

from distopt.compress.shards import Piece, ShardCodec
from distopt.kernels.layout import BucketLayout

Starts = tuple[int, ...]  # the first element of each shard, in all members one after the other, and their end
FULLEST = 5, 4  # bounds move if the fullest shard has more than 5 / 4 of the mean entries; all wait for its owner
LONGEST = 9  # times the mean elements: an owner adds and selects among all of its shard, however few entries there are


class Sharding:
    """A plan that was cut into shards: a pure function of the plan, the number of ranks, the block, and the starts.

    Args:
        layouts: the members of each bucket that are cut.
        ranks: the number of shards.
        block: a border stands at a multiple of so many elements from the start of a member.
        starts: where shards begin, rounded to such multiples; evenly if they are none of this plan and these ranks.

    Attributes:
        of_bucket: the pieces of each bucket, in order.
        of_owner: the pieces of each rank's shard, in order.
        sizes: the elements of each rank's shard.
        members: all members of all buckets that are cut, one after the other.

    Example:
        >>> import numpy as np
        >>> two = [BucketLayout([name], [(256,)], [0], np.float32) for name in "ab"]
        >>> [(p.owner, p.bucket, p.start, p.stop) for pieces in Sharding(two, 3, 64).of_owner for p in pieces]
        [(0, 0, 0, 192), (1, 0, 192, 256), (1, 1, 0, 64), (2, 1, 64, 256)]
    """

    def __init__(self, layouts: Sequence[BucketLayout], ranks: int, block: int, starts: Starts = ()):
        self.of_bucket: list[list[Piece]] = [[] for _ in layouts]
        self.of_owner: list[list[Piece]] = [[] for _ in range(ranks)]
        sizes, first = np.concatenate([layout.records["size"] for layout in layouts]), 0
        total = int(sizes.sum())
        if len(starts) != ranks + 1 or starts[-1] != total:
            starts = tuple(total * rank // ranks for rank in range(ranks + 1))
        members, elements = _bounds(sizes, starts, block)
        self.sizes: list[int] = np.diff(np.cumsum([0, *sizes])[members] + elements).tolist()
        for number, layout in enumerate(layouts):
            begins, count = layout.records["offset"], len(layout.names)
            rows = np.clip(members - first, 0, count - 1) if count else members
            inside = begins[rows] + elements if count else elements
            at = np.where(members < first, begins[:1].sum(), np.where(members < first + count, inside, layout.extent))
            first += count
            for owner in np.flatnonzero(at[:-1] < at[1:]).tolist():
                piece = Piece(owner, number, int(at[owner]), int(at[owner + 1]), layout)
                self.of_bucket[number].append(piece)
                self.of_owner[owner].append(piece)
        names = [name for layout in layouts for name in layout.names]
        self.members = BucketLayout(
            names, [(int(n),) for n in sizes], (np.cumsum(sizes) - sizes).tolist(), layouts[0].dtype
        )


def _bounds(sizes: np.ndarray, starts: Starts, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where each shard begins, and where the last one ends: in which member, and after how many elements."""
    ends, wanted = np.cumsum(sizes), np.array(starts)
    members = np.searchsorted(ends, wanted, "right")
    inside = members < sizes.size
    rows = np.where(inside, members, 0)
    before = np.where(inside, wanted - (ends - sizes)[rows], 0) if sizes.size else np.zeros_like(wanted)
    before = (before + block // 2) // block * block
    full = inside & (before >= sizes[rows]) if sizes.size else inside
    return members + full, np.where(full, 0, before)


@functools.lru_cache(16)
def cut(layouts: tuple[BucketLayout, ...], ranks: int, block: int, starts: Starts = ()) -> Sharding:
    """Return the ``Sharding`` of these layouts, which is kept for the next step.

    Args:
        layouts: as of ``Sharding``.
        ranks: as of ``Sharding``.
        block: as of ``Sharding``.
        starts: as of ``Sharding``.
    """
    return Sharding(layouts, ranks, block, starts)


def cut_for(codec: ShardCodec, layouts: Sequence[BucketLayout], ranks: int, starts: Starts) -> Sharding:
    """Return the shards of an exchange; they are of as many elements where a codec sends all elements.

    Args:
        codec: a compressor, as it takes part.
        layouts: as of ``Sharding``.
        ranks: as of ``Sharding``.
        starts: where shards of as many entries begin.
    """
    return cut(tuple(layouts), ranks, codec.traits.block, starts if codec.traits.ragged else ())


class ShardBounds:
    """Where shards begin, from step to step: bounds move to where entries are, on all ranks alike, without a message.

    Large gradients lie together, and so do entries.  In the second phase every rank gets every owner's payload, and
    sees how many entries each piece has had.  Bounds move after updates 1, 2, 4, 8 ... only, since each move has a
    price: what an owner has not sent of the part that it gives away becomes a residual of its own.  Gradients move
    fast while a training is young, so that moves are seldom when they cost more than they gain.

    Attributes:
        starts: where shards begin; () if they are of as many elements.
        lines: what all ranks must have alike.

    Example:
        >>> import numpy as np
        >>> layouts, bounds = (BucketLayout(["w"], [(1024,)], [0], np.float32),), ShardBounds()
        >>> bounds.see(cut(layouts, 2, 64), entries=[9, 1], step=0)
        >>> bounds.settle(step=1)
        >>> cut(layouts, 2, 64, bounds.starts).sizes
        [320, 704]
    """

    CHANGES = "starts", "lines", "_next"  # what a step replaces

    def __init__(self) -> None:
        self.starts: Starts = ()
        self.lines: list[str] = []
        self._next: tuple[int, Starts] | None = None  # the starts after this update, if it is applied

    def starts_at(self, step: int) -> Starts:
        """Return where shards begin after so many updates."""
        return self._next[1] if self._next and self._next[0] <= step else self.starts

    def restore(self, starts: Starts) -> None:
        """Go on with shards that begin here."""
        self.starts, self._next = starts, None
        self.lines = [f"borders of shards, of the checksum {zlib.crc32(repr(starts).encode()):08x}"] if starts else []

    def settle(self, step: int) -> None:
        """Move bounds as the last exchange has it, if its update was applied; else they stay.

        Args:
            step: updates applied so far.
        """
        if self._next:
            self.restore(self.starts_at(step))

    def see(self, shards: Sharding, entries: Sequence[int], step: int) -> None:
        """Have bounds move at the next ``settle``, if the shards of this step are too uneven.

        Args:
            shards: those of this step.
            entries: of the owners' payloads, by piece: those of the first owner, in order, and so on; 0 if all
                elements are sent.
            step: updates applied so far.
        """
        update = step + 1
        if update & (update - 1):
            return
        numbers = iter(entries)
        by_owner = [list(itertools.islice(numbers, len(pieces))) for pieces in shards.of_owner]
        most, least = FULLEST
        if least * len(by_owner) * max(map(sum, by_owner)) <= most * sum(entries):
            self._next = None
            return
        sizes = [int(piece.layout.records["size"].sum()) for pieces in shards.of_owner for piece in pieces]
        self._next = update, balanced(sizes, entries, len(by_owner))


def balanced(sizes: Sequence[int], entries: Sequence[int], ranks: int) -> Starts:
    """Return where shards of about as many entries begin, none of which is more than ``LONGEST`` times the mean long.

    They have at most ``LONGEST / (LONGEST - 1)`` of the mean entries, if these are spread evenly over each stretch.

    Args:
        sizes: the elements of stretches of a plan, one after the other.
        entries: how many entries each of them has; there are some.
        ranks: the number of shards.

    Example:
        >>> balanced([100, 100], [30, 10], 2)
        (0, 69, 200)
    """
    elements, found, starts = sum(sizes), sum(entries), []
    weights = [(LONGEST - 1) * elements * k + found * n for n, k in zip(sizes, entries, strict=True)]
    before, behind = list(itertools.accumulate(sizes, initial=0)), list(itertools.accumulate(weights))
    for rank in range(ranks):  # in integers, so that all ranks have the same
        wanted = behind[-1] * rank // ranks
        row = bisect.bisect_right(behind, wanted)
        starts.append(before[row] + sizes[row] * (wanted - behind[row] + weights[row]) // weights[row])
    return (*starts, elements)
