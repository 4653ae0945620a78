"""Cut a plan into shards, one for each rank, of about as many elements."""

import functools
from collections.abc import Sequence

import numpy as np

from distopt.compress.shards import Piece
from distopt.kernels.layout import BucketLayout


class Cut:
    """A plan that was cut into shards: a pure function of the plan, the number of ranks, and the block.

    Args:
        layouts: the members of each bucket that are cut.
        ranks: the number of shards.
        block: a border stands at a multiple of so many elements from the start of a member.

    Attributes:
        of_bucket: the pieces of each bucket, in order.
        of_owner: the pieces of each rank's shard, in order.
        sizes: the elements of each rank's shard.
        members: all members of all buckets that are cut, one behind the other.

    Example:
        >>> import numpy as np
        >>> two = [BucketLayout([name], [(256,)], [0], np.float32) for name in "ab"]
        >>> [(p.owner, p.bucket, p.start, p.stop) for pieces in Cut(two, 3, 64).of_owner for p in pieces]
        [(0, 0, 0, 192), (1, 0, 192, 256), (1, 1, 0, 64), (2, 1, 64, 256)]
    """

    def __init__(self, layouts: Sequence[BucketLayout], ranks: int, block: int):
        self.of_bucket: list[list[Piece]] = [[] for _ in layouts]
        self.of_owner: list[list[Piece]] = [[] for _ in range(ranks)]
        sizes, first = np.concatenate([layout.records["size"] for layout in layouts]), 0
        members, elements = _borders(sizes, ranks, block)
        starts = np.cumsum([0, *sizes])
        self.sizes: list[int] = np.diff(starts[members] + elements).tolist()
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


def _borders(sizes: np.ndarray, ranks: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where each shard begins, and where the last one ends: in which member, and behind how many elements."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if sizes.size else 0
    wanted = np.array([total * rank // ranks for rank in range(ranks)] + [total])
    members = np.searchsorted(ends, wanted, "right")
    inside = members < sizes.size
    rows = np.where(inside, members, 0)
    before = np.where(inside, wanted - (ends - sizes)[rows], 0) if sizes.size else np.zeros_like(wanted)
    before = (before + block // 2) // block * block
    full = inside & (before >= sizes[rows]) if sizes.size else inside
    return members + full, np.where(full, 0, before)


@functools.lru_cache(16)
def cut(layouts: tuple[BucketLayout, ...], ranks: int, block: int) -> Cut:
    """Return the ``Cut`` of these layouts, which is kept for the next step.

    Args:
        layouts: as of ``Cut``.
        ranks: as of ``Cut``.
        block: as of ``Cut``.
    """
    return Cut(layouts, ranks, block)
