"""The state of an engine as a dict: everything that changes between steps, by parameter name."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distopt import device, kernels
from distopt.buckets import States
from distopt.checks import check_int
from distopt.comm import Communicator
from distopt.compress.state import shared
from distopt.engine.engine import Engine
from distopt.engine.measured import check_measured
from distopt.engine.resharding import SavedRanks
from distopt.engine.training_state import Arrays, TrainingState, Tree, optimizer_text
from distopt.engine.undo import Undo
from distopt.engine.views import share_with_newcomers
from distopt.kernels.layout import BucketLayout

COUNTS = ("step_counter", "num_batches", "batches", "partial", "skipped", "skips_in_a_row")
# In the place of a rank, for a process that joins and does not have its ranks yet.
SHARED = "shared"
ENTRIES = (*COUNTS, "contributions", "loss_scale", "rooms", "borders", "states", "optimizer")


def state_dict(engine: Engine) -> dict[str, Any]:
    """``DistOpt.state_dict``.  Collective if parameters are shared."""
    engine.sync_with_last_step()
    progress = engine.progress
    if not engine.store.sharded:
        progress.check()
        return _state(engine)

    def shared() -> dict[str, Any]:
        # What a try has declared that was interrupted is void.
        engine.agreement.declare_numbers(engine.nonfinite.lines())
        engine.renew_plan()
        engine.check_open()
        engine.declare("state_dict")
        failed = RuntimeError(progress.failure) if progress.failure else None
        engine.agree("state_dict", ~progress.updates, failed)
        return _state(engine)

    return engine.transaction(shared)


def _state(engine: Engine) -> dict[str, Any]:
    store, progress, accumulator, policy = engine.store, engine.progress, engine.accumulator, engine.nonfinite.policy
    measured, states = engine.reducers.measured.state(), dict[str, States]()
    for rank, kept in store.states().items():
        of_rank = {state: {n: device.host_copy(a) for n, a in arrays.items()} for state, arrays in kept.items()}
        states[str(rank)] = of_rank
    return ({"measured": measured} if measured else {}) | {
        "step_counter": progress.updates,
        "num_batches": accumulator.num_batches,
        "batches": accumulator.batches,
        "contributions": accumulator.num_gradients / engine.comm.ranks.size,
        "partial": progress.partial,
        "skipped": policy.skipped,
        "skips_in_a_row": policy.in_a_row,
        "loss_scale": policy.state(),
        "rooms": store.capacity.state() if store.capacity else [],
        "borders": list(engine.reducers.bounds.starts_at(progress.updates)),
        "states": states if engine.comm.ranks.logical else next(iter(states.values()), {}),
        **({"seeds": engine.losses.seeds} if engine.comm.ranks.logical else {}),
        "optimizer": engine.optimizer.state_dict(
            (lambda members, flat, number: _gathered(members, flat, number, engine.comm)) if store.sharded else None
        ),
    }


def _gathered(members: BucketLayout, flat: np.ndarray, number: int | None, comm: Communicator) -> np.ndarray:
    """A flat array with every rank's part of one of which each rank has its own.  Collective."""
    # That is its shard; or all on the rank of this number, modulo the ranks, and nothing on the others.
    gathered = np.zeros(members.extent, members.dtype)
    views = [members.view(flat, row) for row in range(len(members.names))]
    table = BucketLayout(members.names, members.shapes, members.records["offset"].tolist(), members.dtype)
    table.place = members.place
    if number is None:
        table = table.shard(comm.rank, comm.size)
    if number is None or number % comm.size == comm.rank:
        kernels.pack(table.point_to(views), gathered, 1.0, np.zeros(len(views), np.int64), math.inf)
    # As integers: adding zero must not change a bit.
    comm.all_reduce(gathered.view(f"i{gathered.itemsize}"))
    return gathered


def load_state_dict(engine: Engine, state: dict[str, Any]) -> None:
    """``DistOpt.load_state_dict``."""
    engine.sync_with_last_step()
    states = check_state(engine, state)
    store, progress, accumulator, policy = engine.store, engine.progress, engine.accumulator, engine.nonfinite.policy
    progress.version += 1
    undo = Undo()
    undo.keep_fields(progress, "failure")
    with progress.loading():
        try:
            engine.optimizer.load_state_dict(state["optimizer"])
        except Exception:
            # The optimizer refuses the state, and nothing has changed.
            undo.undo()
            raise
        if engine.buddies:
            engine.buddies.forget()
        store.restore(states, state["rooms"])
        engine.losses.seeds = list(state.get("seeds", []))
        engine.reducers.bounds.restore(tuple(state.get("borders", ())))
        engine.reducers.measured.restore(state.get("measured", []))
        progress.updates, progress.partial = state["step_counter"], state["partial"]
        engine.nonfinite.pop_refused()
        gradients = state["contributions"] * engine.comm.ranks.size
        # A number of gradients, unless other ranks saved it.
        whole_gradients = float(round(gradients))
        accumulator.batches, accumulator.reduced = state["batches"], None
        accumulator.num_gradients = whole_gradients if math.isclose(whole_gradients, gradients) else gradients
        policy.skipped, policy.in_a_row = state["skipped"], state["skips_in_a_row"]
        policy.restore(state["loss_scale"])
        store.mark_stream()


def check_state(engine: Engine, state: dict[str, Any]) -> dict[int, States]:
    """Return copies of the buckets' states, by rank; raise ValueError for a state that training cannot go on from."""
    if {*state, "borders"} - {"measured", "seeds"} != set(ENTRIES):
        # Older states have no borders: their shards are of as many elements.
        raise ValueError(f"the entries of a state must be {sorted(ENTRIES)}, got {sorted(state)}")
    for name in COUNTS:
        check_int(name, state[name], least=0)
    if not 0 <= state["contributions"] < math.inf:
        raise ValueError(f"contributions must be at least 0 and finite, got {state['contributions']!r}")
    num_batches = engine.accumulator.num_batches
    if state["batches"] and (state["num_batches"] != num_batches or state["batches"] >= num_batches):
        batches = f"{state['batches']} of {state['num_batches']} batches"
        raise ValueError(f"num_batches must be that of the state, which was saved after {batches}, got {num_batches}")
    if state["optimizer"] is None and engine.optimizer.has_state:
        raise ValueError("the optimizer of a state must be a state of this optimizer, got None")
    engine.nonfinite.policy.check(state["loss_scale"])
    if not isinstance(state["rooms"], list):
        raise ValueError(f"rooms must be a list, got {type(state['rooms']).__name__}")
    for entries in state["rooms"]:
        check_int("rooms", entries, least=0)
    borders = state.get("borders", [])
    if not isinstance(borders, list):
        raise ValueError(f"borders must be a list, got {type(borders).__name__}")
    for start in borders:
        check_int("borders", start, least=0)
    if borders[:1] not in ([], [0]) or borders != sorted(borders):
        raise ValueError(f"borders must ascend from 0, got {borders}")
    check_measured(state.get("measured", []))
    for seed in state.get("seeds", []):
        check_int("seeds", seed, least=0)
    ranks, kept = engine.comm.ranks, state["states"]
    by_rank = kept if ranks.logical else {str(rank): kept for rank in ranks.here}
    if not isinstance(by_rank, dict) or set(by_rank) not in (set(map(str, ranks.here)), {SHARED}):
        got = sorted(by_rank) if isinstance(by_rank, dict) else type(by_rank).__name__
        raise ValueError(f"states must be those of the logical ranks {list(ranks.here)} that live here, got {got}")
    states = {-1 if rank == SHARED else int(rank): _copies(kept) for rank, kept in by_rank.items()}
    engine.store.check_states(states)
    return states


def settle(engine: Engine) -> None:
    """Resolve the last step, and have what each logical rank has that lives here now.  Collective."""
    engine.resolve_last_step()
    if engine.comm.ranks.logical and engine.comm.membership:
        # What a try has declared that was interrupted is void.
        engine.agreement.declare_numbers(engine.nonfinite.lines())
        engine.renew_plan()


def for_joiner(engine: Engine, state: Tree) -> Tree:
    """Return a state of an engine with only ``shared`` of the buckets' states."""
    states = state["states"]
    if engine.comm.ranks.logical:
        return state | {"states": {SHARED: shared(next(iter(states.values()), {}))}}
    return state | {"states": shared(states)}


def _copies(states: Any) -> States:
    """Return copies of the buckets' states of one rank."""
    for arrays in (states, *(states.values() if isinstance(states, dict) else ())):
        if not isinstance(arrays, dict):
            raise ValueError(f"states must be a dict of dicts of arrays, got {type(arrays).__name__}")
    return {state: {n: np.array(a) for n, a in arrays.items()} for state, arrays in states.items()}


class EngineState(TrainingState):
    """The state of a training that one engine makes the steps of."""

    def __init__(self, engine: Engine, options: Sequence[str]):
        self._engine, self.options = engine, options
        self.comm, self.agreement, self.hooks = engine.comm, engine.agreement, engine.hooks
        self.collector = engine.store.collector

    @property
    def step(self) -> int:
        """Updates applied so far."""
        return self._engine.progress.updates

    @property
    def collective(self) -> bool:
        """Whether each rank has its share of the optimizer's state."""
        return self._engine.store.sharded

    def check_open(self) -> None:
        self._engine.check_open()

    def check(self) -> None:
        self._engine.progress.check()

    def settle(self) -> None:
        settle(self._engine)

    def abandon(self) -> None:
        self._engine.nonfinite.poll()

    def state(self) -> Tree:
        return state_dict(self._engine)

    def for_joiner(self, state: Tree) -> Tree:
        return for_joiner(self._engine, state)

    def share_with_newcomers(self) -> None:
        share_with_newcomers(self._engine)

    def check_state(self, state: Tree) -> None:
        check_state(self._engine, state)

    def load(self, state: Tree) -> None:
        load_state_dict(self._engine, state)

    @contextlib.contextmanager
    def writing_parameters(self) -> Iterator[None]:
        with self._engine.progress.loading():
            yield
        self._engine.store.mark_stream()

    def facts(self) -> Tree:
        accumulator, partial = self._engine.accumulator, self._engine.progress.partial > 0
        # The first call was of a partial step.
        own_calls = accumulator.batches > 0 and accumulator.reduced is False
        return {
            "world_size": self.comm.ranks.size,
            "step": self.step,
            "options": [*self.options, f"threshold={self._engine.threshold}"],
            "optimizer": optimizer_text(self._engine.optimizer.opt),
            "ranks_differ": partial or own_calls,
            "window_of_sums": not accumulator.sync_on_apply
            and (accumulator.reduced is True or not (partial or own_calls)),
        }

    def divide(self, state: Tree, parameters: Arrays | None) -> tuple[Tree, dict[int, Tree]]:
        ranks, states = self.comm.ranks, state.pop("states")
        of_ranks = {r: {"states": states.get(str(r), {}) if ranks.logical else states} for r in ranks.here}
        model = {"optimizer": state.pop("optimizer"), "parameters": parameters}
        if self.facts()["ranks_differ"]:
            return state, {rank: of_rank | model for rank, of_rank in of_ranks.items()}
        return state | model, of_ranks

    def unite(
        self, place: Path, facts: Tree, of_all: Tree, ranks: Mapping[int, SavedRanks]
    ) -> tuple[Tree, Arrays | None]:
        mine = self._engine.accumulator.sync_on_apply
        if of_all["batches"] and facts["window_of_sums"] == mine and not facts["ranks_differ"]:
            raise ValueError(
                f"sync_on_apply must be {not mine} to go on from {place}, which was saved in the middle of a window, "
                f"got {mine}"
            )
        differ, sums, states = facts["ranks_differ"], facts["window_of_sums"], dict[str, Any]()
        # The states too, as a window's gradients may be for a step of each rank's own.
        means = ("optimizer", "parameters", "states")
        for rank, of_ranks in ranks.items():
            if differ:
                of_all = of_all | of_ranks.own(lambda tree: {name: tree[name] for name in means})
                states[str(rank)] = of_all["states"]
            if sums or not differ:
                states[str(rank)] = of_ranks.states(lambda tree: tree["states"], sums)
        (*_, of_last) = states.values()
        parameters = of_all.pop("parameters")
        return of_all | {"states": states if self.comm.ranks.logical else of_last}, parameters
