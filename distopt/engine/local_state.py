"""What a checkpoint holds of local steps."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from distopt import device
from distopt.buckets import States
from distopt.checks import check_int
from distopt.engine.engine import Engine
from distopt.engine.local_ranks import LocalRanks
from distopt.engine.outer_loop import LocalTraining, OuterLoop
from distopt.engine.parameters import GradientCollector
from distopt.engine.resharding import SavedRanks
from distopt.engine.state import SHARED, check_state, for_joiner, load_state_dict, settle, state_dict
from distopt.engine.training_state import TrainingState, Tree, optimizer_text

ENTRIES = {"step", "inner", "fragments", "values"}
OF_FRAGMENT = {"sent", "due", "outer"}


class InnerState:
    """What a rank has of its own beside its parameters: by default nothing, as a script saves its optimizer itself."""

    # For a reader of checkpoints.
    optimizer: Any = None
    # Those that make the steps.
    engines: Sequence[Engine] = ()

    def __init__(self) -> None:
        self.collector = GradientCollector()

    def state(self) -> Tree:
        """Return copies of what the rank has."""
        return {}

    def check(self, state: Tree) -> None:
        """Raise ValueError for a state that this rank cannot go on from."""
        if state:
            raise ValueError(f"the inner state must be empty, since the script has its own, got one of {sorted(state)}")

    def load(self, state: Tree, step: int) -> None:
        """Go on from a state after so many steps."""

    def for_joiner(self, state: Tree) -> Tree:
        """Return what of a state a process goes on from that joins."""
        return state

    def of_ranks(self, saved: SavedRanks) -> Tree:
        """Return the state that a rank goes on from, of those that ranks have saved as ``inner``."""
        return cast(Tree, saved.mine["inner"])


class EngineInnerState(InnerState):
    """The state of the engine of local steps."""

    def __init__(self, training: LocalTraining):
        self._training, engine = training, training.inner
        self.optimizer, self.engines, self.collector = engine.optimizer.opt, [engine], engine.store.collector

    def state(self) -> Tree:
        return {"calls": self._training.calls, "engine": state_dict(self._training.inner)}

    def check(self, state: Tree) -> None:
        if set(state) != {"calls", "engine"}:
            raise ValueError(f"the entries of an inner state must be calls and engine, got {sorted(state)}")
        num_batches = self._training.inner.accumulator.num_batches
        if check_int("calls", state["calls"], least=0) >= num_batches:
            raise ValueError(f"num_batches must be above {state['calls']}, the calls after a step, got {num_batches}")
        check_state(self._training.inner, state["engine"])

    def load(self, state: Tree, step: int) -> None:
        load_state_dict(self._training.inner, state["engine"])
        self._training.calls = state["calls"]

    def for_joiner(self, state: Tree) -> Tree:
        return state | {"engine": for_joiner(self._training.inner, state["engine"])}

    def of_ranks(self, saved: SavedRanks) -> Tree:
        means = saved.own(lambda tree: {name: tree["inner"]["engine"][name] for name in ("optimizer", "states")})
        inner: Tree = saved.mine["inner"]
        return inner | {"engine": inner["engine"] | means}


class RanksInnerState(EngineInnerState):
    """The states of the engine, by logical rank, with the parameters of each."""

    def __init__(self, training: LocalTraining, others: Callable[[], Sequence[np.ndarray]]):
        # others: returns a model's other arrays, which the steps of each rank change.
        super().__init__(training)
        self._others, self.ranks = others, LocalRanks(training.outer, self._own, self._load)
        training.ranks = self.ranks

    def _own(self) -> Tree:
        others = [device.host_copy(x) for x in self._others()]
        values = {name: device.host_copy(x) for name, x in self._training.inner.store.values.items()}
        return {"inner": super().state(), "parameters": values, "others": others}

    def _load(self, own: Tree | None, made: int) -> None:
        if own is None:
            # The window of batches of the rank in the model is not this one's, whose batches so far were as if zeros.
            inner, (steps, calls) = super().state(), divmod(made, self._training.inner.accumulator.num_batches)
            inner["engine"] |= {"step_counter": steps, "batches": calls, "contributions": float(calls), "states": {}}
            super().load(inner | {"calls": calls}, 0)
            return
        # What a schedule writes to groups of parameters, as torch.optim has them, is all ranks'.
        groups = [dict(group) for group in getattr(self.optimizer, "param_groups", ())]
        super().load(own["inner"], 0)
        for group, known in zip(getattr(self.optimizer, "param_groups", ()), groups, strict=True):
            group.update(known)
        for name, x in self._training.inner.store.values.items():
            device.copy(x, own["parameters"][name])
        # None where processes of one rank each have saved it.
        for x, kept in zip(self._others(), own["others"] or self._others(), strict=True):
            device.copy(x, kept)

    def state(self) -> Tree:
        return self.ranks.trees()

    def check(self, state: Tree) -> None:
        here = list(map(str, self._training.outer.comm.ranks.here))
        got = sorted(state) if isinstance(state, dict) else type(state).__name__
        if got not in (sorted(here), [SHARED]):
            raise ValueError(f"the inner state must be that of the logical ranks {', '.join(here)}, got {got}")
        for rank, own in state.items():
            if not isinstance(own, dict) or not {"inner", "parameters", "others"} <= set(own):
                raise ValueError(
                    f"the inner state of rank {rank} must have inner, parameters and others, got {own!r:.60}"
                )
            super().check(own["inner"])

    def for_joiner(self, state: Tree) -> Tree:
        return {SHARED: next(iter(state.values()))}

    def load(self, state: Tree, step: int) -> None:
        (*_, own), batches = state.values(), self._training.inner.accumulator.num_batches
        calls = step * batches + own["inner"]["calls"]
        self.ranks.load_trees({-1 if rank == SHARED else int(rank): own for rank, own in state.items()}, calls, step)
        super().load(own["inner"], step)


class LocalState(TrainingState):
    """The state of local steps: the inner one of each rank, and the outer ones, with the global parameters."""

    # Other ranks may go on than have saved it.  Their parameters and their inner optimizers' states are the means of
    # the saved ones then, so that the mean of their pseudo-gradients is what it was.

    def __init__(self, outer: OuterLoop, inner: InnerState, options: Sequence[str]):
        self._outer, self._inner, self.options = outer, inner, options
        engine = outer.engine
        self.comm, self.agreement = engine.comm, engine.agreement
        self.hooks, self.collector = outer.hooks, inner.collector
        self._engines = [*inner.engines, *(fragment.engine for fragment in outer.fragments)]

    @property
    def step(self) -> int:
        """The steps so far."""
        return self._outer.step

    def check_open(self) -> None:
        for engine in self._engines:
            engine.check_open()

    def check(self) -> None:
        for engine in self._engines:
            engine.progress.check()

    def land(self) -> None:
        self._outer.land()

    def settle(self) -> None:
        for engine in self._engines:
            settle(engine)

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self._outer.land()
        for engine in self._engines:
            engine.nonfinite.poll()

    def state(self) -> Tree:
        self._outer.land()
        values = self._outer.values or self._outer.restored
        return {
            "step": self._outer.step,
            "inner": self._inner.state(),
            "fragments": [{"sent": f.sent, "due": f.due, "outer": state_dict(f.engine)} for f in self._outer.fragments],
            "values": {name: device.host_copy(x) for name, x in values.items()},
        }

    def for_joiner(self, state: Tree) -> Tree:
        pairs = zip(self._outer.fragments, state["fragments"], strict=True)
        fragments = [saved | {"outer": for_joiner(fragment.engine, saved["outer"])} for fragment, saved in pairs]
        inner = self._inner.for_joiner(state["inner"])
        return state | {"inner": inner, "fragments": fragments}

    def begin_as_newcomer(self) -> None:
        """Make the local parameters the global ones, which the other ranks have come from since."""
        self._outer.go_on_from_values()

    def check_state(self, state: Tree) -> None:
        if set(state) != ENTRIES:
            raise ValueError(f"the entries of a state of local steps must be {sorted(ENTRIES)}, got {sorted(state)}")
        step, fragments = check_int("step", state["step"], least=0), state["fragments"]
        if not isinstance(fragments, list) or len(fragments) != len(self._outer.fragments):
            count = len(fragments) if isinstance(fragments, list) else type(fragments).__name__
            raise ValueError(f"fragments must be those of the state, {count}, got {len(self._outer.fragments)}")
        self._inner.check(state["inner"])
        for saved, fragment in zip(fragments, self._outer.fragments, strict=True):
            if not isinstance(saved, dict) or set(saved) != OF_FRAGMENT:
                raise ValueError(f"the entries of a fragment must be {sorted(OF_FRAGMENT)}, got {saved!r:.60}")
            check_int("sent", saved["sent"], least=0)
            if 0 < check_int("due", saved["due"], least=0) <= step:
                raise ValueError(f"due must be 0 or above the step {step}, got {saved['due']}")
            check_state(fragment.engine, saved["outer"])
        known = {name: (x.shape, x.dtype) for name, x in self._outer.values.items()}
        found = {name: (x.shape, x.dtype) for name, x in state["values"].items()}
        if known and known != found:
            name = next(n for n in known | found if known.get(n) != found.get(n))
            raise ValueError(f"values: {name} must be {known.get(name)} as the parameter, got {found.get(name)}")

    def load(self, state: Tree) -> None:
        self.abandon()
        self.check_state(state)
        self._inner.load(state["inner"], state["step"])
        for saved, fragment in zip(state["fragments"], self._outer.fragments, strict=True):
            load_state_dict(fragment.engine, saved["outer"])
            fragment.sent, fragment.due = saved["sent"], saved["due"]
            windows = self._outer.windows
            last = fragment.sent + windows.delay - windows.every * (fragment.due > 0)
            fragment.taken = min(state["step"], last) if fragment.sent else 0
        self._outer.step = self._outer.taken = state["step"]
        self._outer.restore(state["values"])

    @contextlib.contextmanager
    def writing_parameters(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for engine in self._engines:
                stack.enter_context(engine.progress.loading())
            yield
        for engine in self._engines:
            engine.store.mark_stream()

    def facts(self) -> Tree:
        return {
            "world_size": self.comm.ranks.size,
            "step": self.step,
            "options": [*self.options, f"threshold={self._outer.engine.threshold}"],
            "optimizer": optimizer_text(self._inner.optimizer),
            "ranks_differ": True,
            "window_of_sums": False,
        }

    def divide(self, state: Tree, parameters: Any) -> tuple[Tree, dict[int, Tree]]:
        residuals = [saved["outer"].pop("states") for saved in state["fragments"]]
        inner, ranks = state.pop("inner"), self.comm.ranks
        if not ranks.logical:
            return state, {ranks.here[0]: {"inner": inner, "parameters": parameters, "residuals": residuals}}
        return state, {
            rank: inner[str(rank)] | {"residuals": [states.get(str(rank), {}) for states in residuals]}
            for rank in ranks.here
        }

    def unite(self, place: Path, facts: Tree, of_all: Tree, ranks: Mapping[int, SavedRanks]) -> tuple[Tree, Any]:
        def residuals(number: int) -> dict[str, States]:
            return {str(rank): saved.states(lambda tree: tree["residuals"][number]) for rank, saved in ranks.items()}

        logical, inner = self.comm.ranks.logical, dict[str, Tree]()
        for number, fragment in enumerate(of_all["fragments"]):
            states = residuals(number)
            fragment["outer"]["states"] = states if logical else next(iter(states.values()))
        for rank, saved in ranks.items():
            parts = saved.own(lambda tree: {name: tree.get(name) for name in ("parameters", "others", "made")})
            inner[str(rank)] = {"inner": self._inner.of_ranks(saved), **parts}
        (*_, last) = inner.values()
        return of_all | {"inner": inner if logical else last["inner"]}, last["parameters"]
