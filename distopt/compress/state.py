"""What a rank keeps of a bucket between steps: by name, and by what becomes of it where ranks come and go."""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import TypeVar, cast

import numpy as np

from distopt import device, kernels
from distopt.compress.traits import Traits

# What all ranks have the same is *shared*: a rank that joins is given it.  A rank's *own* is what no compressor has
# seen yet.  All the rest is *pending*, it waits to be sent: residuals, velocities, and what the owner of a shard owes.
# Other ranks than saved it share it out, so that the mean that waits stays as it was; a rank that joins begins with
# none.

T = TypeVar("T")
State = dict[str, np.ndarray]  # by name, arrays of the bucket's size that outlive a step

RESIDUAL = "residual"
OWED = "owed"  # what a rank, as the owner of a shard, has not sent: in the part of it that it owns
VELOCITY = "velocity"
DECAY = "decay"  # the momentum of the weight decay
WINDOW = "window"  # the sum of the gradients of a window of batches so far
SHARED, OWN = frozenset({DECAY}), frozenset({WINDOW})


def shared(state: Mapping[str, T]) -> dict[str, T]:
    """Return what all ranks have the same, by name."""
    return {name: kept for name, kept in state.items() if name in SHARED}


def own(state: Mapping[str, T]) -> dict[str, T]:
    """Return what is this rank's own, by name; sums over ranks, if these are what it adds up."""
    return {name: kept for name, kept in state.items() if name in OWN}


def pending(state: Mapping[str, T]) -> dict[str, T]:
    """Return what waits to be sent, by name."""
    return {name: kept for name, kept in state.items() if name not in SHARED | OWN}


class Prefixed(MutableMapping[str, T]):
    """Those of a bucket's states whose names begin with a text, by what follows it.

    Example:
        >>> dict(Prefixed({"residual": 1, "frequencies of residual": 2}, "frequencies of "))
        {'residual': 2}
    """

    def __init__(self, state: dict[str, T], prefix: str):
        self._state, self._prefix = state, prefix

    def __getitem__(self, name: str) -> T:
        return self._state[self._prefix + name]

    def __setitem__(self, name: str, array: T) -> None:
        self._state[self._prefix + name] = array

    def __delitem__(self, name: str) -> None:
        del self._state[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return iter([name.removeprefix(self._prefix) for name in self._state if name.startswith(self._prefix)])

    def __len__(self) -> int:
        return len(list(iter(self)))


def prefixed(state: State, traits: Traits) -> State:
    """Return a bucket's states by the names that a compressor of these traits knows them by."""
    return cast(State, Prefixed(state, traits.state_prefix)) if traits.state_prefix else state


def state_array(state: State, name: str, x: np.ndarray) -> np.ndarray:
    """Return an array of a state, of x's size and dtype, zeros at first."""
    if name not in state:
        state[name] = device.persistent_zeros(x.size, x.dtype, x)
    return state[name]


def settle(x: np.ndarray, state: State, owned: slice | None = None, skip_flag: np.ndarray | None = None) -> None:
    """Move what this rank owes as the owner of a shard to its residual, but for the part that it still owns."""
    if OWED not in state:
        return
    debt, residual = state[OWED], state_array(state, RESIDUAL, x)
    for part in (slice(0), slice(None)) if owned is None else (slice(0, owned.start), slice(owned.stop, None)):
        kernels.accumulate(debt[part], residual[part], skip_flag)
        kernels.clear(debt[part], skip_flag)
    if owned is None and skip_flag is None:
        del state[OWED]
