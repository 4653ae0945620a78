"""States of residuals and counters: as tensors, for ``torch.save``, and as one for all ranks."""

import io
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from distopt.comm import Communicator
from distopt.device import host_copy
from distopt.engine.engine import Engine
from distopt.torch.tensors import as_array

# of a state_dict, and of that of all ranks
ENTRIES, GATHERED = {"rank", "ranks", "state"}, {"states", "mean"}


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
    if isinstance(state, Mapping) and set(state) == GATHERED:
        states = state["states"]
        return as_arrays(states[comm.rank] if len(states) == comm.size else state["mean"])
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
    everywhere: dict[str, dict[str, Any]] = {}
    for kinds in _listed_by_rank("full_state_dict", state, engine):
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


def on_rank_0(state: dict[str, Any], engine: Engine, device: torch.device) -> list[dict[str, Any]]:
    """Return the states of all ranks on rank 0, this rank's on the others.  Collective."""
    # device: where the ranks exchange
    comm, listed = engine.comm, _listed_by_rank("gathered_state_dict", state, engine)
    arrays = [a.reshape(-1).view(np.uint8) for of_kind in state["states"].values() for a in of_kind.values()]
    mine = as_array(torch.from_numpy(np.concatenate([*arrays, np.empty(0, np.uint8)])).to(device))
    received = comm.all_to_all([mine if rank == 0 else mine[:0] for rank in range(comm.size)], ragged=True)
    if comm.rank:
        return [state]
    states = []
    for kinds, sent in zip(listed, map(host_copy, received), strict=True):
        start, found = 0, dict[str, dict[str, np.ndarray]]()
        for kind, of_kind in kinds.items():
            for name, (dtype, shape) in of_kind.items():
                end = start + np.dtype(dtype).itemsize * math.prod(shape)
                found.setdefault(kind, {})[name] = sent[start:end].view(dtype).reshape(shape).copy()
                start = end
        states.append(state | {"states": found})
    return states


def _listed_by_rank(verb: str, state: dict[str, Any], engine: Engine) -> list[Any]:
    """Return dtype and shape of each array of each rank's state, by kind and name.  Collective."""
    listed = {
        kind: {name: [a.dtype.str, a.shape] for name, a in arrays.items()} for kind, arrays in state["states"].items()
    }
    line = f"{verb} after {state['step_counter']} updates, {engine.kind} {engine.agreement.number}"
    return [json.loads(text) for text in engine.agreement.run_on_all(line, json.dumps, listed)]
