"""What a model is to all ranks: its parameters, their plan, the memory of both, and the vote that keeps them equal."""

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from distopt import device, kernels, tape
from distopt.adapters import adapt
from distopt.buckets import Buffers, Plan, States, plan
from distopt.comm import Communicator
from distopt.compress import Compressor, Dense
from distopt.exchange import Background, Blind, Inline, Observer, Refusal, Rooms, Seen, Window
from distopt.gradients import Collector
from distopt.guard import agreed, by_rank, fingerprint
from distopt.ledger import Purpose
from distopt.nonfinite import Policy, policy
from distopt.numbers import bound, flag, whole
from distopt.tables import FORMATS, Members
from distopt.verbs import Verbs

COUNTS = ("step_counter", "num_batches", "batches", "partial", "skipped", "skips_in_a_row")
ENTRIES = (*COUNTS, "contributions", "loss_scale", "rooms", "states", "optimizer")  # of a state_dict
HALF_LOADED = "loading a state ended halfway; load a checkpoint to go on"


class AllJoinedError(Exception):
    """No rank has batches left."""


class NoPlanError(RuntimeError, AttributeError):
    """There is no plan yet; an AttributeError too, so that ``hasattr`` and ``inspect.getmembers`` can ask."""


GradientHook = Callable[[list[tuple[Any, np.ndarray]]], object]
Agreed = tuple[Buffers | None, Blind, Rooms | None]


class Memory(Verbs):
    """The parameters of one model, and everything that outlives a step."""

    opt: Any
    threshold: int
    step_counter: int  # updates applied

    def __init__(
        self,
        opt: Any,
        wire: Communicator,
        *,
        threshold: int,
        overlap: str | bool,
        broadcast: bool,
        nonfinite: str | Policy,
        allow_missing: bool,
        check_every: int,
        num_batches: int,
        sync_on_apply: bool,
        buffSize: int,
        clip_norm: float | None,
        gradient_hook: GradientHook | None,
    ):
        super().__init__(wire, whole("buffSize", buffSize, least=1))
        self.opt, self._optimizer = opt, adapt(opt)
        self.threshold = whole("threshold", threshold, least=0)
        self.step_counter = 0
        self._options_given: dict[str, Any] = {
            "threshold": threshold,
            "overlap": overlap,
            "broadcast": broadcast,
            "nonfinite": nonfinite,
            "allow_missing": allow_missing,
            "check_every": check_every,
            "num_batches": num_batches,
            "sync_on_apply": sync_on_apply,
            "buffSize": buffSize,
            "clip_norm": clip_norm,
            "gradient_hook": gradient_hook,
        }
        self._check_every = whole("check_every", check_every, least=0)
        self._wants_overlap = overlap is not False
        self._overlaps = wire.size > 1 and _overlaps(overlap, wire)
        self._background = Background() if wire.gpu is None else Inline()
        options = f"{broadcast=}, {nonfinite=}, {num_batches=}, {sync_on_apply=}, {allow_missing=}, {check_every=}"
        order = "sums in rank order" if wire.rank_ordered else "sums in any order"
        self._clip_norm = None if clip_norm is None else bound("clip_norm", clip_norm)
        if gradient_hook is not None and not callable(gradient_hook):
            raise TypeError(
                f"gradient_hook must be callable with (param, mean) pairs, or None, got {gradient_hook!r:.60}"
            )
        self._gradient_hook = gradient_hook
        self._gradient_norm: float | None = None
        changes = [f"clip_norm={self._clip_norm}", "a gradient hook" if gradient_hook else "no gradient hook"]
        self._options = [options, order, f"overlap={self._overlaps}", *changes]
        self._nonfinite = policy(nonfinite)
        self._window = Window(whole("num_batches", num_batches, least=1), sync_on_apply)
        self._collector = Collector(flag("allow_missing", allow_missing), wire.gpu)
        self._recorder = tape.recorder(wire.rank, wire.size)  # of gradients, None if nobody asked for one
        self._observer = Observer()  # of what is sent
        self._buffers: Buffers | None = None
        self._refusal = Blind()  # who looks for what is not finite in them
        self._rooms: Rooms | None = None  # on a GPU, in what is sent of them
        self._agreed: Agreed = (None, self._refusal, None)  # the last of these three that all ranks agreed on
        self._restored_rooms: list[int] = []  # of a checkpoint
        self._refused = 0  # entries of the last step that were not finite, as the GPU said
        self._before = 0, 0, 0, 0.0  # what is counted, before the last step
        self._changes = 0  # that a captured step would not know of
        self._restored: States = {}  # of a checkpoint, until there are buffers
        self._lines: list[str] = []  # what a step is, for the vote
        self._mark = 0
        self._started = False  # have all ranks agreed on a plan?
        self._broadcast_due = broadcast
        self._apart: Buffers | None = None  # of which no two ranks have a parameter in one place
        self._joined = False  # does this rank only keep the others company?
        self._live = wire.size  # ranks that do not
        self._failure = ""  # of an update, which may have been applied in part
        self._numbers: list[str] = []  # what a rank may change from step to step, and all must have alike
        self._numbers_mark = 0  # of these
        self._partial = 0  # partial steps so far
        self._compressor: Compressor = Dense()  # of the last step
        self._threshold = self.threshold  # of the plan that all ranks have
        self._nonfinite.serve(wire.rank, self._learn)  # last, since a LossScaler serves once
        wire.control.optimizers += 1
        self._number = wire.control.optimizers  # among those that were made on this communicator, from 1

    @property
    def skipped(self) -> int:
        """Calls dropped so far under ``nonfinite='skip'``, or by a LossScaler."""
        return self._nonfinite.skipped

    @property
    def clip_norm(self) -> float | None:
        """The bound of the global norm of an update's gradients; None: there is none."""
        return self._clip_norm

    @property
    def gradient_norm(self) -> float | None:
        """The global norm of the last update's mean gradient before it was clipped; None without ``clip_norm``."""
        return self._gradient_norm

    @property
    def plan(self) -> Plan | None:
        """Which parameters share a bucket; printable.  None before the first step or ``gradient_views``."""
        if self._buffers is None:
            return None
        flats = ((b.gradient.size, b.gradient.itemsize, b.gradients) for b in self._memory)
        return self._memory.plan.sending([self._compressor.payload_bytes(*flat) for flat in flats])

    def __repr__(self) -> str:
        """One line: the optimizer with its numbers as they are now, the rank, the steps so far, the chosen options."""
        state = [f"rank {self._wire.rank} of {self._wire.size}", f"{self.step_counter} steps"]
        usual = inspect.signature(type(self)).parameters
        chosen = [f"{n}={v!r}" for n, v in self._options_given.items() if n in usual and v != usual[n].default]
        optimizer = str(self._optimizer).removeprefix("optimizer ")
        return f"{type(self).__name__}({', '.join([optimizer, *state, *chosen])}{', closed' * self._closed})"

    @property
    def _memory(self) -> Buffers:
        if self._buffers is None:
            raise NoPlanError("there is no plan yet: the first step makes it, or gradient_views(params)")
        return self._buffers

    def _follow_plan(self, threshold: int) -> None:
        """Make plan and buffers, unless they are there; what outlives a step moves in by parameter name."""
        old, parameters = self._buffers, len(self._collector.order)
        if old is not None and (old.plan.threshold, len(old)) == (threshold, parameters):
            return
        if self._sharded:
            raise ValueError(f"threshold must stay {self._threshold} once parameters are shared, got {threshold}")
        values = {name: known.value for name, known in self._collector.order.items()}
        sizes, dtypes = [v.size for v in values.values()], [v.dtype for v in values.values()]
        buffers = Buffers(plan(list(values), sizes, dtypes, threshold), values, self._wire.alloc)
        states = self._states()
        buffers.check(states)
        self._optimizer.check(buffers)
        buffers.restore(states)
        self._buffers, self._lines = buffers, []
        if self._nonfinite.looks:
            gradients = self._wire.size * self._window.num_batches
            self._refusal = Seen(buffers, gradients) if self._wire.gpu is None else Refusal(buffers, self._wire)
        if self._wire.gpu is not None:
            self._rooms = Rooms(buffers, self._wire)
            self._rooms.restore(self._restored_rooms)
            self._restored_rooms = []

    # ------------------------------------------------------------------------------------------------- refused steps

    def _catch_up(self) -> None:
        """On a GPU, come behind the last step, in whatever stream it was, and learn what became of it."""
        if self._buffers is not None:
            self._buffers.follow()
        self._learn()

    def _hand_over(self) -> None:
        """What comes next, in whatever stream, comes behind what was enqueued so far."""
        if self._buffers is not None:
            self._buffers.end()

    def _learn(self) -> None:
        """What became of the last step; one that was refused on a GPU is not counted."""
        if self._refusal.pending and not self._was_refused():
            self._nonfinite.passed()
        if self._rooms:
            self._rooms.learn(count=not self._refused)

    def _was_refused(self) -> bool:
        """What the GPU says of the last step; all ranks will hear of it in ``_settle``."""
        self._refused = self._refusal.outcome()
        if self._refused:
            self._take_back()
            self._nonfinite.refused()
        return self._refused > 0

    def _take_back(self) -> None:
        """Count as if the last step had not been."""
        if self._before[0] < self.step_counter:
            self._optimizer.take_back()
        self.step_counter, self._window.batches, self._partial, self._window.contributions = self._before

    @property
    def _counts(self) -> tuple[int, int, int, float]:
        return self.step_counter, self._window.batches, self._partial, self._window.contributions

    def _settle(self) -> None:
        """Catch up where all ranks are: raises what they all raise."""
        self._catch_up()
        count, self._refused = self._refused, 0
        if count:
            reports = self._vote(self._name, ~self._calls, report=self._memory.nonfinite(), part=", its outcome")
            found = by_rank(reports)
            if not found and self._window.exchanges == 1:  # the gradients were finite, and are in the window
                self._window.start(self._memory)
            self._nonfinite.judge(self._name, found or f"the sum over ranks ({count} entries)")

    @property
    def _all_changes(self) -> object:
        """What must be as it was for a captured step to be what it was."""
        return self._changes, id(self._buffers), self._optimizer.version

    def close(self) -> None:
        """Refuse everything from now on; the communicator stays open.

        Raises FloatingPointError, on every rank alike, if the last step on a GPU was refused, which no later step told.
        """
        super().close()
        self._learn()
        count, self._refused = self._refused, 0
        self._nonfinite.judge(self._name, f"{count} entries of gradients and sums, of all ranks" if count else "")

    @property
    def _calls(self) -> int:
        return self.step_counter * self._window.num_batches + self._window.batches

    @property
    def _name(self) -> str:
        more = self._window.num_batches > 1
        return f"step {self.step_counter + 1}" + f", batch {self._window.batches + 1}" * more

    # ------------------------------------------------------------------------------------------------- the vote

    def _describe(self, what: str) -> bool:
        """What this rank is about to do, in lines that all ranks must agree on; False if that is what it did last."""
        if self._lines and self._lines[0] == what:
            return False
        order = self._collector.order.items()
        parameters = [f"parameter {k} = {n} {p.value.shape} {p.value.dtype}" for k, (n, p) in enumerate(order)]
        options = [f"threshold={self._memory.plan.threshold}", *self._options, repr(self._observer)]
        self._lines = [what, *parameters, *options, repr(self._optimizer)]
        self._mark = fingerprint(self._lines)
        return True

    def _agree_on(self, numbers: list[str]) -> None:
        """These numbers, and the loss scale, must be the same on all ranks in the votes that follow."""
        self._numbers = [f"the loss scale {self._nonfinite.divisor!r}", *numbers]
        self._numbers_mark = fingerprint(self._numbers)

    def _vote(
        self,
        name: str,
        number: int,
        error: Exception | None = None,
        report: str = "",
        part: str = "",
        doubts: bool = False,
    ) -> list[str]:
        """The ranks' reports, if all are at the same call, agree on what ``_describe`` said, and none has an error.

        ``part`` is what of the call the vote is about, if it has several; ``doubts`` as ``Control.vote`` has it.
        """
        control, history = self._wire.control, self._wire.bare.history

        def describe() -> list[str]:
            own = f"{type(self).__name__} {self._number} of those made on this communicator"
            enqueued = (
                f"enqueued collectives of the fingerprint {history:08x} (a loss that uses the communicator must do so "
                "between the same gradients on every rank; this run cannot go on)"
            )
            *lines, optimizer = self._lines or [""]  # the whole optimizer last: one of its numbers says more
            return [own, *lines, name + part, *self._numbers, optimizer, enqueued]

        try:
            reports = control.vote(
                name,
                self._mark ^ number ^ self._number << 40 ^ self._numbers_mark ^ history,
                describe,
                error,
                report,
                part,
                self._joined,
                doubts,
            )
        except Exception:
            self._forget_what_was_refused()
            raise
        self._live = control.live
        if not self._live:
            raise AllJoinedError
        if not self._started:
            self._started, self._restored = True, {}
        if self._agreed[0] is not self._buffers:
            self._change_plan()
        return reports

    def _change_plan(self) -> None:
        """All ranks have agreed on new buffers: make what a step with them needs, and let the old ones go."""
        memory, error = self._memory, None
        memory.connect(self._wire)
        if self._overlaps:
            _ = self._wire.beside  # made where all ranks are
        if self._agreed[0] is not None:
            self._agreed[0].last_read(self._wire.check)
        try:
            self._optimizer.reserve(memory)
        except MemoryError as e:
            error = e
        self._agreed, self._threshold = (memory, self._refusal, self._rooms), memory.plan.threshold
        self._wire.control.vote("making the optimizer's state", 1, lambda: ["the optimizer's state"], error)

    def _refuse_shared_values(self) -> None:
        """ValueError, on all ranks alike, for a parameter in the memory of another thread's, which updates it too.

        Looked at in the first step of a plan; ``parameter_views`` are meant to be shared.
        """
        if not self._wire.one_process or self._apart is self._buffers or self._sharded:
            return
        lengths = [known.value.nbytes for known in self._collector.order.values()]
        starts = np.stack(self._wire.bare.all_gather(self._collector.values.addresses.view(np.int64)))
        ends = starts + np.array(lengths, np.int64)
        ranks, rows = np.nonzero(ends > starts)
        starts, ends = starts[ranks, rows], ends[ranks, rows]
        order = np.argsort(starts, kind="stable")
        inside = np.flatnonzero(starts[order][1:] < ends[order][:-1])
        if inside.size:
            names, at = list(self._collector.order), min(inside, key=lambda k: rows[order[k]])  # the first of the plan
            first, second = (f"{names[rows[k]]} of rank {ranks[k]}" for k in sorted(order[at : at + 2]))
            text = (
                f"{first} and {second} are in one memory: each rank must make parameters of its own, inside main(comm)"
            )
            raise agreed(ValueError(text), self._wire.rank == 0)
        self._apart = self._buffers

    def _forget_what_was_refused(self) -> None:
        """The plan is the last that all ranks agreed on; if there is none, the next step may bring other parameters."""
        self._lines = []  # in which something may be put right
        if not self._started:
            self._collector.forget()
        if self._agreed[0] is not self._buffers:
            self._buffers, self._refusal, self._rooms = self._agreed

    def _send_parameters(self) -> None:
        """Rank 0's parameters to all, once."""
        if self._broadcast_due:
            with self._wire.on_behalf_of(Purpose("start", self.step_counter)):
                for known in self._collector.order.values():
                    self._wire.broadcast(known.value)
            self._wire.wait()
        self._broadcast_due = False

    # ------------------------------------------------------------------------------------------------- views

    def gradient_views(self, params: Iterable[Any]) -> list[np.ndarray]:
        """Arrays, one per parameter, in which gradients already lie where they are exchanged and are never packed.

        Makes the plan, in the order given, if there is none; collective, like the first step.  A later step with
        another ``threshold`` turns the views into ordinary arrays.  A ``LossScaler`` divides gradients in their views:
        after a call that raised they must be written anew.

        Raises TypeError, on every rank alike, for parameters of 16 bits, whose gradients are added up in float32.
        """
        names = self._enroll(params, "gradient_views", self._check_views)
        self._send_parameters()
        return [self._memory.view(name) for name in names]

    def parameter_views(self, params: Iterable[Any]) -> list[np.ndarray]:
        """Arrays, one per parameter, in memory that all ranks share; assign them as the parameters' data.

        They hold rank 0's values.  From now on there is one copy of the model on this machine, and each rank updates
        its share of it, and touches only that share of the optimizer's state (ZeRO stage 1, Rajbhandari et al., 2020,
        in shared memory); the results are the same, to the bit.  Collective; needs all parameters of the model.
        ``state_dict`` is collective from then on, and complete, as the optimizer's own ``get_states`` is not; the
        threshold is fixed, there are no partial steps and no ``update`` by hand, and what a script does to a parameter
        itself, one rank has to do for all.

        Raises, on every rank alike, TypeError for an optimizer that is not distopt's own or a parameter of 16 bits,
        ValueError if parameters are missing, and RuntimeError where the ranks share no memory.
        """
        names = self._enroll(params, "parameter_views", self._check_sharding)
        memory = self._memory
        if not memory.parameters and not memory.share_parameters(self._wire):
            raise RuntimeError(f"parameter_views: these ranks share no memory ({self._wire!r})")
        if self._wire.rank == 0:
            for name in names:
                memory.parameters[name][...] = self._collector.order[name].value
        self._wire.barrier()
        self._broadcast_due = False
        return [memory.parameters[name] for name in names]

    def _check_views(self, names: list[str]) -> None:
        """Raises what forbids views of these parameters' gradients."""
        self._check_wide(names)

    def _check_wide(self, names: list[str]) -> None:
        narrow = [n for n in names if self._collector.order[n].value.dtype in FORMATS]
        if narrow:
            raise TypeError(f"{narrow[0]}: no view for a parameter of 16 bits, whose gradients are added up in float32")

    def _check_sharding(self, names: list[str]) -> None:
        self._check_wide(names)
        if not self._optimizer.updates_shares:
            raise TypeError(f"parameter_views needs one of distopt's own optimizers, got {self._optimizer!r}")
        missing = [n for n in self._collector.order if n not in names]
        if missing:
            raise ValueError(f"parameter_views needs all parameters of the model; missing {', '.join(missing[:5])}")

    @property
    def _sharded(self) -> bool:
        """Are the parameters shared, so that each rank updates its share of them?"""
        return self._buffers is not None and bool(self._buffers.parameters)

    def _enroll(
        self, params: Iterable[Any], verb: str, check: Callable[[list[str]], None] = lambda names: None
    ) -> list[str]:
        """The names of parameters, which all ranks have alike, and have a plan for."""
        self._check_open()
        names: list[str] = []
        error = None
        self._catch_up()
        try:
            names = self._known(params)
            check(names)
            self._follow_plan(self._threshold)
            self._describe(verb)
            self._agree_on([])  # of a step
        except Exception as e:
            error = e
        self._vote(verb, 0, error)
        self._hand_over()
        return names

    def _known(self, params: Iterable[Any]) -> list[str]:
        """The names of parameters, which the plan is of."""
        return self._collector.enroll(params)

    # ------------------------------------------------------------------------------------------------- state

    def _half_applied(self) -> RuntimeError | None:
        """The error of whoever wants to go on with, or to keep, what an update has left that failed halfway."""
        return RuntimeError(self._failure) if self._failure else None

    def _states(self) -> States:
        """What outlives a step: that of a checkpoint until all ranks have agreed on a plan."""
        return self._memory.states() if self._started else self._restored

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes between steps, as copies: plain numbers, and numpy arrays by parameter name.

        The wrapped optimizer's own ``state_dict()`` or ``get_states()`` is in it, parameters are not.  Collective if
        parameters are shared (``parameter_views``), since each rank has its share of the optimizer's state then.

        Raises RuntimeError after an update that failed halfway, until a checkpoint has been loaded.
        """
        self._catch_up()
        states, failed = self._states(), self._half_applied()
        if self._sharded:
            self._check_open()
            self._describe("state_dict")
            self._agree_on([])  # of a step
            self._vote("state_dict", ~self.step_counter, failed)
        elif failed:
            raise failed
        return {
            "step_counter": self.step_counter,
            "num_batches": self._window.num_batches,
            "batches": self._window.batches,
            "contributions": self._window.contributions / self._wire.size,
            "partial": self._partial,
            "skipped": self._nonfinite.skipped,
            "skips_in_a_row": self._nonfinite.in_a_row,
            "loss_scale": self._nonfinite.state(),
            "rooms": self._rooms.state() if self._rooms else [],
            "states": {state: {n: device.host_copy(a) for n, a in arrays.items()} for state, arrays in states.items()},
            "optimizer": self._optimizer.state_dict(self._whole_state if self._sharded else None),
        }

    def _whole_state(self, members: Members, flat: np.ndarray) -> np.ndarray:
        """A flat array with every rank's share of one of which each rank has its own."""
        rank, size = self._wire.rank, self._wire.size
        found = np.zeros(members.extent, members.dtype)
        views = [members.view(flat, row) for row in range(len(members.names))]
        here = Members(members.names, members.shapes, members.rows["offset"].tolist(), members.dtype).point_to(views)
        kernels.pack(here.share(rank, size), found, 1.0, np.zeros(len(views), np.int64), math.inf)
        self._wire.all_reduce(found.view(f"i{found.itemsize}"))  # as integers: adding zero must not change a bit
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned, with parameters that the caller has loaded on every rank.

        Raises ValueError, before anything changes, for what is no such dict or belongs to other parameters, and for
        one that was saved in the middle of a window of another ``num_batches``.
        """
        self._catch_up()
        states = self._checked_state(state)
        self._changes += 1
        before, self._failure = self._failure, HALF_LOADED  # which a Ctrl-C leaves so
        try:
            self._optimizer.load_state_dict(state["optimizer"])
        except Exception:  # it refuses the state, and nothing has changed
            self._failure = before
            raise
        if self._started:
            self._memory.restore(states)
            self._refusal.start_again()
        self._restored, self._broadcast_due = {} if self._started else states, False
        self.step_counter, self._refused = state["step_counter"], 0
        self._window.batches, contributions = state["batches"], state["contributions"] * self._wire.size
        self._window.sent = None
        counted = float(round(contributions))  # a number of gradients, unless other ranks saved it
        self._window.contributions = counted if math.isclose(counted, contributions) else contributions
        self._nonfinite.skipped, self._nonfinite.in_a_row = state["skipped"], state["skips_in_a_row"]
        self._nonfinite.restore(state["loss_scale"])
        self._partial, self._restored_rooms = state["partial"], list(state["rooms"])
        if self._rooms:
            self._rooms.restore(self._restored_rooms)
            self._restored_rooms = []
        self._hand_over()
        self._failure = ""

    def _checked_state(self, state: dict[str, Any]) -> States:
        """What outlives a step, as copies; ValueError for a state that cannot be gone on from."""
        if set(state) != set(ENTRIES):
            raise ValueError(f"a state has the entries {sorted(ENTRIES)}, got {sorted(state)}")
        for name in COUNTS:
            whole(name, state[name], least=0)
        if not 0 <= state["contributions"] < math.inf:
            raise ValueError(f"contributions must be at least 0 and finite, got {state['contributions']!r}")
        num_batches = self._window.num_batches
        if state["batches"] and (state["num_batches"] != num_batches or state["batches"] >= num_batches):
            batches = f"{state['batches']} of {state['num_batches']} batches"
            raise ValueError(f"the state was saved after {batches}; num_batches is {num_batches} here")
        if state["optimizer"] is None and self._optimizer.has_state:
            raise ValueError("the state has nothing for the optimizer")
        self._nonfinite.check(state["loss_scale"])
        if not isinstance(state["rooms"], list):
            raise ValueError(f"rooms must be a list, got {type(state['rooms']).__name__}")
        for room in state["rooms"]:
            whole("rooms", room, least=0)
        for given in (state["states"], *(state["states"].values() if isinstance(state["states"], dict) else ())):
            if not isinstance(given, dict):
                raise ValueError(f"states must be a dict of dicts of arrays, got {type(given).__name__}")
        states = {s: {n: np.array(a) for n, a in arrays.items()} for s, arrays in state["states"].items()}
        if self._started:
            self._memory.check(states)
        return states


def _overlaps(overlap: str | bool, wire: Communicator) -> bool:
    """Are buckets exchanged while gradients arrive?  'auto': if ranks sit on several machines, or have GPUs."""
    if overlap not in ("auto", True, False):
        raise ValueError(f"overlap must be 'auto', True or False, got {overlap!r}")
    if overlap is True and not wire.may_overlap:
        raise ValueError("overlap=True needs an MPI with MPI_THREAD_MULTIPLE, which this one does not give")
    return wire.may_overlap and (wire.spans_hosts or wire.gpu is not None if overlap == "auto" else bool(overlap))
