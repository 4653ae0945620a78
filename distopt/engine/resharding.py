"""The states of M ranks that go on from the checkpoint of N ranks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from distopt.buckets import States
from distopt.checkpoint import foreign
from distopt.compress.state import own, shared

Tree = Any


class SavedRanks(NamedTuple):
    """What each rank of a checkpoint had of its own, as one of ``size`` ranks goes on from it."""

    saved: int  # ranks of the checkpoint
    rank: int  # the one that goes on
    size: int  # ranks that go on
    mine: Tree  # of the saved rank of this rank's number, modulo theirs
    read: Callable[[int], Tree]  # returns that of any

    def own(self, part: Callable[[Tree], Tree]) -> Tree:
        """Return this rank's part; of other ranks than have saved it the mean of theirs, leaf by leaf."""
        if self.saved == self.size:
            return part(self.mine)
        return mean(self.saved, lambda rank: part(self.read(rank)))

    def states(self, part: Callable[[Tree], States], window_of_sums: bool = False) -> States:
        """Return what of the states of buckets, with which all ranks make steps together, is this rank's."""
        # window_of_sums: a window of batches has sums over ranks, which are the same on all.
        mine, factor = part(self.mine), self.size / self.saved
        if self.saved == self.size:
            return mine
        # Every ``size``-th rank, so that each has one heir.
        left = [part(self.read(rank)) for rank in range(self.rank, self.saved, self.size)]
        sums = inherited([own(mine)], factor) if window_of_sums else {}
        return inherited(left, factor) | sums | shared(mine)


def inherited(states: Sequence[States], factor: float) -> States:
    """Return ``factor`` times the sum of the states of several ranks."""
    # With the factor size / saved the mean over ranks of pending states stays as it is.
    totals: States = {}
    for state, arrays in (item for mine in states for item in mine.items()):
        for name, a in arrays.items():
            into = totals.setdefault(state, {})
            into[name] = into[name] + a if name in into else a
    scaled = {state: {name: (a * factor).astype(a.dtype) for name, a in into.items()} for state, into in totals.items()}
    return scaled if factor != 1 else totals


def mean(count: int, read: Callable[[int], Tree]) -> Tree:
    """Return the mean over saved ranks of trees that were not kept equal, leaf by leaf; one that is missing is zero."""
    like = total = read(0)
    for rank in range(1, count):
        tree = read(rank)
        like = _zipped(like, tree, lambda a, b: a)
        total = _zipped(total, tree, lambda a, b: np.asarray(a + b.astype(np.float64)))
    return _zipped(like, total, lambda a, b: np.asarray(b / count, a.dtype))


def _zipped(a: Tree, b: Tree, combine: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Tree:
    """Combine the float arrays at the same place in two trees of one shape; all other leaves are those of ``a``."""
    if isinstance(a, dict) and isinstance(b, dict):
        both = {key: _zipped(a[key], b[key], combine) for key in a.keys() & b.keys()}
        return {key: both.get(key, value) for key, value in (a | b).items()}
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        values = [_zipped(x, y, combine) for x, y in zip(a, b, strict=True)]
        return type(a)(*values) if foreign.is_named(a) else type(a)(values)
    if foreign.is_tensor(a) and foreign.is_tensor(b):
        return foreign.tensor(_zipped(foreign.array(a), foreign.array(b), combine))
    floats = all(isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "fV" for x in (a, b))
    if not floats or a.shape != b.shape:
        return a
    return combine(a, b) if isinstance(a, np.ndarray) else combine(a, b)[()]
