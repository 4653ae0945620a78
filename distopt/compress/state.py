"""What a rank keeps of a bucket between steps: by name, and by what becomes of it where ranks come and go."""

from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from distopt import device, kernels

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
