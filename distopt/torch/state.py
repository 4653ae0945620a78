"""States of residuals and counters: as tensors, for ``torch.save``, and as one for all ranks."""

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from distopt.comm import Communicator
from distopt.engine.engine import Engine

# of a state_dict
ENTRIES = {"rank", "ranks", "state"}


class RankState:
    """What each rank has of its own, as ``torch.distributed.checkpoint`` saves and loads it, a ``Stateful``.

    That takes tensors of one name for one tensor, which a rank saves for all, and loads none that are not there yet;
    but residuals differ between ranks, and come with the first step.  So this is one entry, named after the rank.

    Args:
        part: what ``synchronize``, ``compress`` or ``local_steps`` has returned.

    Example:
        >>> import torch
        >>> import distopt.torch as dt
        >>> sync = dt.synchronize(torch.nn.Linear(3, 2))
        >>> list(dt.RankState(sync).state_dict())
        ['rank 0 of 1']
    """

    def __init__(self, part: Any):
        self._part = part

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank as bytes, by its number."""
        state, file = self._part.state_dict(), io.BytesIO()
        torch.save(state, file)
        return {f"rank {state['rank']} of {state['ranks']}": file.getvalue()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` has returned on this rank.

        Args:
            state: the dict.

        Raises:
            ValueError: it is of another rank, or of another number of ranks, or belongs to another model.
        """
        (of_this_rank,) = state.values()
        self._part.load_state_dict(torch.load(io.BytesIO(of_this_rank), weights_only=True))


def as_tensors(tree: Any) -> Any:
    """Return a tree of dicts and lists with tensors in the place of arrays."""
    if isinstance(tree, dict):
        return {name: as_tensors(leaf) for name, leaf in tree.items()}
    if isinstance(tree, list):
        return [as_tensors(leaf) for leaf in tree]
    return torch.from_numpy(tree) if isinstance(tree, np.ndarray) else tree


def as_arrays(tree: Any) -> Any:
    """Return what ``as_tensors`` was given; tensors may have come from any device."""
    if isinstance(tree, dict):
        return {name: as_arrays(leaf) for name, leaf in tree.items()}
    if isinstance(tree, list):
        return [as_arrays(leaf) for leaf in tree]
    return tree.detach().cpu().numpy() if isinstance(tree, torch.Tensor) else tree


def of_rank(comm: Communicator, state: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's state as tensors, with the number of the rank and of all ranks."""
    return {"rank": comm.rank, "ranks": comm.size, "state": as_tensors(state)}


def for_rank(comm: Communicator, state: Any) -> Any:
    """Return the state of which ``of_rank`` has made this one, or that of all ranks, whose rank is None."""
    if not isinstance(state, Mapping) or set(state) != ENTRIES:
        raise ValueError(
            f"state must be what state_dict() has returned, with {sorted(ENTRIES)}, got {type(state).__name__}"
        )
    if state["rank"] is not None and (state["rank"], state["ranks"]) != (comm.rank, comm.size):
        raise ValueError(
            f"state must be that of rank {comm.rank} of {comm.size}, got that of rank {state['rank']} of "
            f"{state['ranks']}; save a state of each rank, or full_state_dict(), which every rank calls"
        )
    return as_arrays(state["state"])


def mean_over_ranks(state: dict[str, Any], engine: Engine) -> dict[str, Any]:
    """Return a state whose arrays are the means over ranks, added in float64.  Collective."""
    # A rank without an array, as an owner of another shard, counts as zeros.
    mine, comm = state["states"], engine.comm
    listed = {kind: {name: [a.dtype.str, a.shape] for name, a in arrays.items()} for kind, arrays in mine.items()}
    line = f"full_state_dict after {state['step_counter']} updates, {engine.kind} {engine.agreement.number}"
    everywhere: dict[str, dict[str, Any]] = {}
    for kinds in map(json.loads, engine.agreement.run_on_all(line, json.dumps, listed)):
        for kind, arrays in kinds.items():
            everywhere.setdefault(kind, {}).update(arrays)
    means: dict[str, dict[str, np.ndarray]] = {}
    for kind, arrays in sorted(everywhere.items()):
        for name, (dtype, shape) in sorted(arrays.items()):
            total = np.zeros(shape, np.float64)
            total += mine.get(kind, {}).get(name, 0)
            comm.all_reduce(total)
            means.setdefault(kind, {})[name] = (total / comm.size).astype(dtype)
    return state | {"states": means}
