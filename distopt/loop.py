"""Collect, check, vote, exchange, update: one step, whatever is sent in it."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from distopt import kernels
from distopt.adapters import adapt
from distopt.buckets import Buffer, Buffers, Plan, States, plan
from distopt.comm import Communicator
from distopt.compress import At, Compressor, Dense
from distopt.exchange import Window, choose
from distopt.gradients import Collector
from distopt.guard import NonfinitePolicy, by_rank, fingerprint, whole
from distopt.verbs import Verbs

Make = Callable[[], Compressor]
HASH = 2**62 - 1  # the bits of a hash that fit into a vote; Python's hash of numbers is the same in every process


class Loop(Verbs):
    """The steps of one model: its parameters, their plan, and everything that outlives a step."""

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

    # ------------------------------------------------------------------------------------------------- a step

    def _step(
        self, loss: Any, make: Make, threshold: int | None, break_even: bool = False, clip: float | None = None
    ) -> bool:
        """One step with the mean over ranks of what a compressor sends; True if an update was applied."""
        compressor = self._ready(loss, make, threshold, clip)
        if compressor is None:
            return False
        algorithm, self._compressor = choose(compressor, break_even), compressor

        def exchange(buffer: Buffer, x: np.ndarray) -> None:
            at = At(self.step_counter, self._wire.rank, self._wire.size, buffer.bucket)
            algorithm(x, compressor, self._wire, buffer.state, at)

        sums = self._window.add(self._memory, exchange)
        self._wire.wait()
        if sums is not None and compressor.may_overflow and not self._finite(sums):
            self._window.start(sums)
            return False
        self._nonfinite.passed()
        if sums is None:
            return False
        self._apply(sums, self._wire.size)
        return True

    def _partial_step(self, loss: Any, threshold: int | None) -> bool:
        """One step with this rank's own gradients, after which the parameters of one bucket are averaged."""
        if self._ready(loss, Dense, threshold, what="a partial step") is None:
            return False
        self._nonfinite.passed()
        sums = self._window.add(self._memory, lambda buffer, x: None)
        if sums is None:
            return False
        self._apply(sums, 1)
        buffers = list(self._memory)
        if buffers:
            self._average_parameters(buffers[self._partial % len(buffers)])
        self._partial += 1
        return True

    def _ready(
        self, loss: Any, make: Make, threshold: int | None, clip: float | None = None, what: str = "a step"
    ) -> Compressor | None:
        """Collect, check, vote: the compressor, if all ranks go on with their packed gradients; None if all skip."""
        self._check_open()
        error, compressor = None, None
        try:
            if self._failure:
                raise RuntimeError(f"{self._failure}; load a checkpoint to go on")
            compressor = make()
            choose(compressor)
            self._numbers = self._optimizer.numbers()
            found = self._collector.collect(loss)
            threshold = self.threshold if threshold is None else whole("threshold", threshold, least=0)
            self._follow_plan(threshold)
            self._describe(f"{what} with {compressor!r}" + f", clipped at {clip}" * (clip is not None))
            self._memory.pack({name: g.grad for name, g in found.items()})
            if clip is not None:
                if not clip >= 0:
                    raise ValueError(f"clip_Value must be at least 0, got {clip}")
                for buffer in self._memory:
                    kernels.clip(buffer.gradient, clip)
        except Exception as e:
            error = e
        if not self._agree_on_step(error):
            return None
        self._send_parameters()
        return compressor

    def _follow_plan(self, threshold: int) -> None:
        """Make plan and buffers, unless they are there; what outlives a step moves in by parameter name."""
        old, parameters = self._buffers, len(self._collector.order)
        if old is not None and (old.plan.threshold, len(old)) == (threshold, parameters):
            return
        values = {name: g.value for name, g in self._collector.order.items()}
        sizes, dtypes = [v.size for v in values.values()], [v.dtype for v in values.values()]
        buffers = Buffers(plan(list(values), sizes, dtypes, threshold), values, self._wire.alloc)
        states = self._states()
        buffers.check(states)
        self._optimizer.check(buffers)
        buffers.restore(states)
        self._buffers, self._lines = buffers, []

    def _describe(self, what: str) -> None:
        """What this rank is about to do, in lines that all ranks must agree on."""
        if self._lines and self._lines[0] == what:
            return
        order = self._collector.order.items()
        parameters = [f"parameter {k} = {n} {g.value.shape} {g.value.dtype}" for k, (n, g) in enumerate(order)]
        self._lines = [what, *parameters, f"threshold={self._memory.plan.threshold}", *self._options]
        self._mark = fingerprint(self._lines)

    def _agree_on_step(self, error: Exception | None) -> bool:
        """Vote; False if all ranks are to skip this step because of gradients that are not finite."""
        calls = self.step_counter * self._window.num_batches + self._window.batches
        bad = self._memory.nonfinite() if error is None and self._nonfinite.looks else ""
        return self._nonfinite.accepts(self._name, by_rank(self._vote(self._name, calls, error, bad)))

    @property
    def _name(self) -> str:
        more = self._window.num_batches > 1
        return f"step {self.step_counter + 1}" + f", batch {self._window.batches + 1}" * more

    def _vote(self, name: str, number: int, error: Exception | None, report: str = "") -> list[str]:
        """The ranks' reports, if all are at the same call, agree on what ``_describe`` said, and none has an error."""
        control = self._wire.control
        mark = self._mark ^ number ^ self._number << 40 ^ hash(self._numbers) & HASH
        try:
            reports = control.vote(
                name,
                mark,
                lambda: [*self._lines, name, f"DistOpt {self._number}", repr(self._optimizer)],
                error,
                report,
            )
        except Exception:
            self._forget_first_step()
            raise
        if not self._number:
            control.optimizers += 1
            self._number, self._restored = control.optimizers, {}
        self._threshold = self._memory.plan.threshold
        return reports

    def _forget_first_step(self) -> None:
        """A refused first step leaves nothing behind: the next one may bring other parameters."""
        if not self._number:
            self._collector.forget()
            self._buffers, self._lines = None, []

    def _states(self) -> States:
        """What outlives a step: that of a checkpoint until all ranks have agreed on a plan."""
        return self._memory.states() if self._number else self._restored

    def _send_parameters(self) -> None:
        """Rank 0's parameters to all, once."""
        if self._broadcast_due:
            for g in self._collector.order.values():
                self._wire.broadcast(g.value)
        self._broadcast_due = False

    def _finite(self, sums: list[np.ndarray]) -> bool:
        """Has no sum overflowed on the wire?  All ranks have the same bits, and decide alike."""
        bad = np.zeros(1, np.int64)
        for total in sums:
            kernels.count_nonfinite(total, bad)
        overflow = f"the sum over ranks ({int(bad[0])} entries)" if bad[0] and self._nonfinite.looks else ""
        return self._nonfinite.accepts(self._name, overflow)

    def _apply(self, sums: list[np.ndarray], ranks: int) -> None:
        """Take the mean and hand it to the optimizer."""
        try:
            mean = 1.0 / (ranks * self._window.num_batches)
            self._optimizer.update(self._memory, self._collector.order, sums, mean)
        except Exception as error:
            self._failure = (
                f"the update of step {self.step_counter + 1} failed halfway with {type(error).__name__}: {error}"
            )
            raise
        self._window.start(sums)
        self._finish()

    def _average_parameters(self, buffer: Buffer) -> None:
        values = [self._collector.order[name].value for name in buffer.bucket.names]
        members = buffer.parameters.point_to(values)
        kernels.pack(members, buffer.gradient, 1.0, buffer.bad)
        self._wire.all_reduce(buffer.gradient)
        self._wire.wait()
        kernels.unpack(members, buffer.gradient, 1.0 / self._wire.size)

    def _finish(self) -> None:
        self.step_counter += 1
        self._optimizer.step()

    # ------------------------------------------------------------------------------------------------- memory

    @property
    def _memory(self) -> Buffers:
        if self._buffers is None:
            raise RuntimeError("there is no plan yet: the first step makes it, or gradient_views(params)")
        return self._buffers

    def gradient_views(self, params: Iterable[Any]) -> list[np.ndarray]:
        """Arrays, one per parameter, in which gradients already lie where they are exchanged and are never packed.

        Makes the plan, in the order given, if there is none; collective, like the first step.  A later step with
        another ``threshold`` turns the views into ordinary arrays.
        """
        self._check_open()
        names: list[str] = []
        error = None
        try:
            names = self._collector.enroll(params)
            self._follow_plan(self._threshold)
            self._describe("gradient views")
        except Exception as e:
            error = e
        self._vote("gradient_views", 0, error)
        self._send_parameters()
        return [self._memory.view(name) for name in names]

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
