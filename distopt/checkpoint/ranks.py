"""What each of M ranks goes on with when N have saved."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distopt.checkpoint import foreign

Tree = Any
States = dict[str, dict[str, np.ndarray]]  # state name -> parameter name -> array


def pending(
    rank: int, size: int, saved: int, read: Callable[[int], States], sums: Sequence[str], equal: Sequence[str]
) -> States:
    """What waits on one of ``size`` ranks that go on with what ``saved`` ranks have saved; ``read`` is a rank's.

    Every rank has had the same of the states that are ``sums`` over ranks, and has the same again, of as many ranks as
    there are now; and of those that are ``equal``, which stay as they are.
    """
    factor = size / saved
    found = inherited([read(r) for r in heirs(rank, size, saved)], factor)
    mine = read(rank % saved)
    return found | inherited([_only(mine, sums)], factor) | _only(mine, equal)


def _only(states: States, names: Sequence[str]) -> States:
    return {state: arrays for state, arrays in states.items() if state in names}


def heirs(rank: int, size: int, saved: int) -> range:
    """The saved ranks whose states a rank takes over: every ``size``-th, so that each has one heir."""
    return range(rank, saved, size)


def inherited(states: Sequence[States], factor: float) -> States:
    """``factor`` times the sum of the states of several ranks.

    With size / saved for a factor, what is pending stays as it is: the mean over ranks of what waits.
    """
    found: States = {}
    for state, arrays in (item for mine in states for item in mine.items()):
        for name, a in arrays.items():
            into = found.setdefault(state, {})
            into[name] = into[name] + a if name in into else a
    scaled = {state: {name: (a * factor).astype(a.dtype) for name, a in into.items()} for state, into in found.items()}
    return scaled if factor != 1 else found


def mean(count: int, read: Callable[[int], Tree]) -> Tree:
    """The mean of what ranks have that were not kept equal, leaf by leaf; what is no float array is the first's."""
    total = read(0)
    for rank in range(1, count):
        total = _zipped(total, read(rank), lambda a, b: np.asarray(a + b.astype(np.float64)))
    first = read(0)
    return _zipped(first, total, lambda a, b: np.asarray(b / count, a.dtype))


def _zipped(a: Tree, b: Tree, combine: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Tree:
    """Combine the float arrays that stand at the same place in two trees; for all else, a."""
    if isinstance(a, dict) and isinstance(b, dict):
        return {key: _zipped(value, b[key], combine) if key in b else value for key, value in a.items()}
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        found = [_zipped(x, y, combine) for x, y in zip(a, b, strict=True)]
        return type(a)(*found) if foreign.is_named(a) else type(a)(found)
    if foreign.is_tensor(a) and foreign.is_tensor(b):
        return foreign.tensor(_zipped(foreign.array(a), foreign.array(b), combine))
    floats = all(isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "fV" for x in (a, b))
    if not floats or a.shape != b.shape:
        return a
    return combine(a, b) if isinstance(a, np.ndarray) else combine(a, b)[()]
