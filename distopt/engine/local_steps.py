"""Local steps: an engine of this rank alone, and an outer loop with the others."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distopt import device
from distopt.checkpoint import resharding
from distopt.checks import check_int
from distopt.comm import Communicator, LocalCommunicator
from distopt.comm.local import LocalControl
from distopt.compress.dgc import DECAY
from distopt.engine.engine import Engine
from distopt.engine.outer_loop import Arrays, OuterLoop
from distopt.engine.parameters import Loss
from distopt.engine.spec import StepSpec
from distopt.engine.state import check_state, load_state_dict, state_dict
from distopt.engine.training_state import TrainingState, Tree, optimizer_text


def alone(comm: Communicator) -> Communicator:
    """Return a communicator of this rank alone, in whose errors it has its number among all."""
    local = LocalCommunicator(f"local steps of rank {comm.rank}", comm.gpu)
    local.control = LocalControl(comm.rank)
    return local


def places(inner: Engine) -> Sequence[Arrays]:
    """Return the arrays that hold parameters: the masters that an optimizer keeps, and the parameters, by name."""
    masters: dict[str, Any] = {}
    for bucket in inner.store.buckets_if_any or ():
        flat = inner.optimizer.masters(bucket)
        masters |= {} if flat is None else bucket.views(flat)
    return masters, inner.store.values


class LocalTraining:
    """Steps of this rank alone, and exchanges with the others behind some of them.

    Args:
        inner: the engine of the steps, on a communicator of this rank alone.
        outer: the exchanges.

    Attributes:
        inner: the engine of the steps.
        outer: the exchanges.
        calls: since the last step that counted; with ``num_batches`` several are one.
    """

    def __init__(self, inner: Engine, outer: OuterLoop):
        self.inner, self.outer, self.calls = inner, outer, 0

    def run(self, loss: Loss) -> bool:
        """Make a step of this rank alone, and the exchange that is due behind it; tell if the step was applied.

        A step that was refused, as not finite, counts in the window, so that all ranks count alike.
        """
        self.inner.check_open()
        if not self.outer.begun:
            loss = self.begin(loss)
        try:
            applied = self.inner.step(loss, StepSpec(label="a local step"))
        except Exception as error:
            vars(error).pop("agreed", None)  # no other rank has raised it
            raise
        self.calls += 1
        if self.calls == self.inner.accumulator.num_batches:
            self.calls = 0
            self.outer.advance()
        return applied

    def begin(self, loss: Loss) -> Any:
        """Learn the parameters that a loss brings, and return its pairs.  Collective."""
        collector, error = self.inner.store.collector, None
        pairs: list[Any] = []
        try:
            pairs = collector.read(loss)
            collector.enroll(param for param, _ in pairs)
        except Exception as e:
            error = e
        try:
            self.outer.begin(self.inner.store.values, error)
        except Exception:
            if not self.inner.store.started:
                collector.forget()
            raise
        return pairs

    def join(self) -> None:
        """Take part in the others' exchanges until no rank has batches left (``OuterLoop.join``)."""
        self.inner.check_open()
        self.outer.join()


ENTRIES = {"step", "calls", "inner", "fragments", "values"}
OF_FRAGMENT = {"sent", "due", "outer"}


class LocalState(TrainingState):
    """The state of local steps: the inner one of each rank, and the outer ones, with the global parameters.

    Other ranks may go on than have saved it.  Their parameters and their inner optimizers' states are the means of the
    saved ones then, so that the mean of their pseudo-gradients is what it was.

    Args:
        training: the training.
        options: lines for a reader of checkpoints.
    """

    def __init__(self, training: LocalTraining, options: Sequence[str]):
        self._training, self._inner, self._outer, self.options = training, training.inner, training.outer, options
        engine = training.outer.engine
        self.comm, self.agreement, self.hooks = engine.comm, engine.agreement, training.outer.hooks
        self.collector = training.inner.store.collector

    @property
    def step(self) -> int:
        """Steps behind this rank."""
        return self._outer.step

    @property
    def _engines(self) -> list[Engine]:
        return [self._inner, *(fragment.engine for fragment in self._outer.fragments)]

    def check_open(self) -> None:
        self._inner.check_open()

    def check(self) -> None:
        for engine in self._engines:
            engine.progress.check()

    def settle(self) -> None:
        self._outer.land()
        for engine in self._engines:
            engine.resolve_last_step()

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
            "calls": self._training.calls,
            "inner": state_dict(self._inner),
            "fragments": [{"sent": f.sent, "due": f.due, "outer": state_dict(f.engine)} for f in self._outer.fragments],
            "values": {name: device.host_copy(x) for name, x in values.items()},
        }

    def check_state(self, state: Tree) -> None:
        if set(state) != ENTRIES:
            raise ValueError(f"the entries of a state of local steps must be {sorted(ENTRIES)}, got {sorted(state)}")
        step, fragments = check_int("step", state["step"], least=0), state["fragments"]
        if check_int("calls", state["calls"], least=0) >= max(1, self._inner.accumulator.num_batches):
            raise ValueError(f"num_batches must be above {state['calls']}, the calls of a step in the state")
        if not isinstance(fragments, list) or len(fragments) != len(self._outer.fragments):
            count = len(fragments) if isinstance(fragments, list) else type(fragments).__name__
            raise ValueError(f"fragments must be those of the state, {count}, got {len(self._outer.fragments)}")
        check_state(self._inner, state["inner"])
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
        load_state_dict(self._inner, state["inner"])
        for saved, fragment in zip(state["fragments"], self._outer.fragments, strict=True):
            load_state_dict(fragment.engine, saved["outer"])
            fragment.sent, fragment.due = saved["sent"], saved["due"]
        self._outer.step, self._training.calls = state["step"], state["calls"]
        self._outer.restore(state["values"])

    @contextlib.contextmanager
    def writing_parameters(self) -> Iterator[None]:
        self._inner.progress.begin_load()
        yield
        self._inner.progress.end_load()
        self._inner.store.mark_stream()

    def facts(self) -> Tree:
        return {
            "world_size": self.comm.size,
            "step": self.step,
            "options": [*self.options, f"threshold={self._inner.threshold}"],
            "optimizer": optimizer_text(self._inner.optimizer.opt),
            "ranks_differ": True,
            "window_of_sums": False,
        }

    def divide(self, state: Tree, parameters: Any) -> tuple[Tree, Tree]:
        residuals = [saved["outer"].pop("states") for saved in state["fragments"]]
        return state, {"inner": state.pop("inner"), "parameters": parameters, "residuals": residuals}

    def unite(
        self, place: Path, facts: Tree, of_all: Tree, of_rank: Tree, read: Callable[[int], Tree]
    ) -> tuple[Tree, Any]:
        saved, rank, size = facts["world_size"], self.comm.rank, self.comm.size
        inner, parameters, residuals = (of_rank[name] for name in ("inner", "parameters", "residuals"))
        if saved != size:
            means = resharding.mean(saved, lambda r: [read(r)["inner"]["optimizer"], read(r)["parameters"]])
            window = resharding.pending(rank, size, saved, lambda r: read(r)["inner"]["states"], [], [])
            inner, parameters = inner | {"optimizer": means[0], "states": window}, means[1]
            residuals = [
                resharding.pending(rank, size, saved, lambda r, k=k: read(r)["residuals"][k], [], [DECAY])  # type: ignore[misc]
                for k in range(len(residuals))
            ]
        for fragment, states in zip(of_all["fragments"], residuals, strict=True):
            fragment["outer"]["states"] = states
        return of_all | {"inner": inner}, parameters
