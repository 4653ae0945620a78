"""What a model is to all ranks: its parameters, their plan, the memory of both, and the vote that keeps them equal."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from distopt.adapters import adapt
from distopt.buckets import Buffers, Plan, States, plan
from distopt.comm import Communicator
from distopt.compress import Compressor, Dense
from distopt.exchange import Window
from distopt.gradients import Collector
from distopt.guard import NonfinitePolicy, fingerprint, whole
from distopt.verbs import Verbs

HASH = 2**62 - 1  # the bits of a hash that fit into a vote; Python's hash of numbers is the same in every process


class Memory(Verbs):
    """The parameters of one model, and everything that outlives a step."""

    def __init__(
        self,
        opt: Any,
        wire: Communicator,
        *,
        threshold: int,
        broadcast: bool,
        nonfinite: str,
        allow_missing: bool,
        num_batches: int,
        sync_on_apply: bool,
        buffSize: int,
    ):
        super().__init__(wire, whole("buffSize", buffSize, least=1))
        self.opt, self._optimizer = opt, adapt(opt)
        self.threshold = whole("threshold", threshold, least=0)
        self.step_counter = 0  # updates applied
        options = f"{broadcast=}, {nonfinite=}, {num_batches=}, {sync_on_apply=}, {allow_missing=}"
        order = "sums in rank order" if wire.rank_ordered else "sums in any order"
        self._options = [options, order]
        self._nonfinite = NonfinitePolicy(nonfinite, wire.rank)
        self._window = Window(whole("num_batches", num_batches, least=1), sync_on_apply)
        self._collector = Collector(allow_missing)
        self._buffers: Buffers | None = None
        self._agreed: Buffers | None = None  # the last ones that all ranks agreed on
        self._restored: States = {}  # of a checkpoint, until there are buffers
        self._lines: list[str] = []  # what a step is, for the vote
        self._mark = 0
        self._number = 0  # among those that have made a step on this communicator, from 1; 0 before the first
        self._broadcast_due = broadcast
        self._failure = ""  # of an update, which may have been applied in part
        self._numbers: tuple[float, ...] = ()  # the optimizer's, for the next update
        self._partial = 0  # partial steps so far
        self._compressor: Compressor = Dense()  # of the last step
        self._threshold = self.threshold  # of the plan that all ranks have

    @property
    def skipped(self) -> int:
        """Steps dropped so far under ``nonfinite='skip'``."""
        return self._nonfinite.skipped

    @property
    def plan(self) -> Plan:
        """Which parameters share a bucket; printable.  RuntimeError before the first step or ``gradient_views``."""
        return self._memory.plan.sending(self._compressor.payload_bytes, self._compressor.summable)

    @property
    def _memory(self) -> Buffers:
        if self._buffers is None:
            raise RuntimeError("there is no plan yet: the first step makes it, or gradient_views(params)")
        return self._buffers

    def _follow_plan(self, threshold: int) -> None:
        """Make plan and buffers, unless they are there; what outlives a step moves in by parameter name."""
        old, parameters = self._buffers, len(self._collector.order)
        if old is not None and (old.plan.threshold, len(old)) == (threshold, parameters):
            return
        values = {name: known.value for name, known in self._collector.order.items()}
        sizes, dtypes = [v.size for v in values.values()], [v.dtype for v in values.values()]
        buffers = Buffers(plan(list(values), sizes, dtypes, threshold), values, self._wire.alloc)
        states = self._states()
        buffers.check(states)
        self._optimizer.check(buffers)
        buffers.restore(states)
        self._buffers, self._lines = buffers, []

    # ------------------------------------------------------------------------------------------------- the vote

    def _describe(self, what: str) -> None:
        """What this rank is about to do, in lines that all ranks must agree on."""
        if self._lines and self._lines[0] == what:
            return
        order = self._collector.order.items()
        parameters = [f"parameter {k} = {n} {p.value.shape} {p.value.dtype}" for k, (n, p) in enumerate(order)]
        self._lines = [what, *parameters, f"threshold={self._memory.plan.threshold}", *self._options]
        self._mark = fingerprint(self._lines)

    def _vote(
        self, name: str, number: int, error: Exception | None = None, report: str = "", part: str = ""
    ) -> list[str]:
        """The ranks' reports, if all are at the same call, agree on what ``_describe`` said, and none has an error.

        ``part`` is what of the call the vote is about, if it has several.
        """
        control = self._wire.control
        mark = self._mark ^ number ^ self._number << 40 ^ hash(self._numbers) & HASH
        try:
            reports = control.vote(
                name,
                mark,
                lambda: [*self._lines, name + part, f"DistOpt {self._number}", repr(self._optimizer)],
                error,
                report,
            )
        except Exception:
            self._forget_what_was_refused()
            raise
        if not self._number:
            control.optimizers += 1
            self._number, self._restored = control.optimizers, {}
        if self._agreed is not self._buffers:
            self._memory.connect(self._wire)
            self._agreed, self._threshold = self._buffers, self._memory.plan.threshold
        return reports

    def _forget_what_was_refused(self) -> None:
        """The plan is the last that all ranks agreed on; if there is none, the next step may bring other parameters."""
        if not self._number:
            self._collector.forget()
        if self._agreed is not self._buffers:
            self._buffers, self._lines = self._agreed, []

    def _send_parameters(self) -> None:
        """Rank 0's parameters to all, once."""
        if self._broadcast_due:
            for known in self._collector.order.values():
                self._wire.broadcast(known.value)
        self._broadcast_due = False

    # ------------------------------------------------------------------------------------------------- views

    def gradient_views(self, params: Iterable[Any]) -> list[np.ndarray]:
        """Arrays, one per parameter, in which gradients already lie where they are exchanged and are never packed.

        Makes the plan, in the order given, if there is none; collective, like the first step.  A later step with
        another ``threshold`` turns the views into ordinary arrays.
        """
        names = self._enroll(params, "gradient_views")
        self._send_parameters()
        return [self._memory.view(name) for name in names]

    def _enroll(self, params: Iterable[Any], verb: str) -> list[str]:
        """The names of parameters, which all ranks have alike, and have a plan for."""
        self._check_open()
        names: list[str] = []
        error = None
        try:
            names = self._collector.enroll(params)
            self._follow_plan(self._threshold)
            self._describe(verb)
        except Exception as e:
            error = e
        self._vote(verb, 0, error)
        return names

    # ------------------------------------------------------------------------------------------------- state

    def _states(self) -> States:
        """What outlives a step: that of a checkpoint until all ranks have agreed on a plan."""
        return self._memory.states() if self._number else self._restored

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes between steps, as copies: plain numbers, and arrays by parameter name.

        The wrapped optimizer's own ``state_dict()`` or ``get_states()`` is in it, parameters are not.
        """
        states = self._states()
        return {
            "step_counter": self.step_counter,
            "num_batches": self._window.num_batches,
            "batches": self._window.batches,
            "partial": self._partial,
            "skipped": self._nonfinite.skipped,
            "skips_in_a_row": self._nonfinite.in_a_row,
            "states": {state: {n: a.copy() for n, a in arrays.items()} for state, arrays in states.items()},
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned, with parameters that the caller has loaded on every rank.

        Raises ValueError, before anything changes, for what is no such dict or belongs to other parameters, and for
        one that was saved in the middle of a window of another ``num_batches``.
        """
        states = self._checked_state(state)
        self._optimizer.load_state_dict(state["optimizer"])
        if self._number:
            self._memory.restore(states)
        self._restored, self._broadcast_due, self._failure = {} if self._number else states, False, ""
        self.step_counter, self._window.batches = state["step_counter"], state["batches"]
        self._nonfinite.skipped, self._nonfinite.in_a_row = state["skipped"], state["skips_in_a_row"]
        self._partial = state["partial"]

    def _checked_state(self, state: dict[str, Any]) -> States:
        """What outlives a step, as copies; ValueError for a state that cannot be gone on from."""
        expected = self.state_dict()
        if set(state) != set(expected):
            raise ValueError(f"a state has the entries {sorted(expected)}, got {sorted(state)}")
        for name in ("step_counter", "num_batches", "batches", "partial", "skipped", "skips_in_a_row"):
            whole(name, state[name], least=0)
        num_batches = self._window.num_batches
        if state["batches"] and (state["num_batches"] != num_batches or state["batches"] >= num_batches):
            batches = f"{state['batches']} of {state['num_batches']} batches"
            raise ValueError(f"the state was saved after {batches}; num_batches is {num_batches} here")
        if state["optimizer"] is None and expected["optimizer"] is not None:
            raise ValueError("the state has nothing for the optimizer")
        if not isinstance(state["states"], dict):
            raise ValueError(f"states must be a dict of dicts of arrays, got {type(state['states']).__name__}")
        states = {s: {n: np.array(a) for n, a in arrays.items()} for s, arrays in state["states"].items()}
        if self._number:
            self._memory.check(states)
        return states
