"""The states of M ranks that continue from the checkpoint of N ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distopt.checkpoint import foreign

Tree = Any
# state name -> parameter name -> array
States = dict[str, dict[str, np.ndarray]]


def pending(
    rank: int, size: int, saved: int, read: Callable[[int], States], sums: Sequence[str], equal: Sequence[str]
) -> States:
    """Return the pending states, such as a compressor's residuals, of one of ``size`` ranks that continue."""
    # read: returns the states that a saved rank had.
    # sums: names of states that are sums over ranks, alike on every rank; they are scaled by size / saved.
    # equal: names of states that are alike on every rank and stay as they are.
    factor = size / saved
    states = inherited([read(r) for r in heirs(rank, size, saved)], factor)
    alike = read(rank % saved)
    return states | inherited([_only(alike, sums)], factor) | _only(alike, equal)


def _only(states: States, names: Sequence[str]) -> States:
    return {state: arrays for state, arrays in states.items() if state in names}


def heirs(rank: int, size: int, saved: int) -> range:
    """Return the saved ranks whose states a rank takes over: every ``size``-th, so that each has one heir."""
    return range(rank, saved, size)


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
    """Return the mean over saved ranks of trees that were not kept equal, leaf by leaf."""
    total = read(0)
    for rank in range(1, count):
        total = _zipped(total, read(rank), lambda a, b: np.asarray(a + b.astype(np.float64)))
    first = read(0)
    return _zipped(first, total, lambda a, b: np.asarray(b / count, a.dtype))


def _zipped(a: Tree, b: Tree, combine: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Tree:
    """Combine the float arrays at the same place in two trees of one shape; all other leaves are those of ``a``."""
    if isinstance(a, dict) and isinstance(b, dict):
        return {key: _zipped(value, b[key], combine) if key in b else value for key, value in a.items()}
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        values = [_zipped(x, y, combine) for x, y in zip(a, b, strict=True)]
        return type(a)(*values) if foreign.is_named(a) else type(a)(values)
    if foreign.is_tensor(a) and foreign.is_tensor(b):
        return foreign.tensor(_zipped(foreign.array(a), foreign.array(b), combine))
    floats = all(isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "fV" for x in (a, b))
    if not floats or a.shape != b.shape:
        return a
    return combine(a, b) if isinstance(a, np.ndarray) else combine(a, b)[()]
