"""Average gradients over ranks, then let the wrapped optimizer use them."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from distopt.adapters import adapt
from distopt.buckets import Buffers, Plan, States, plan
from distopt.comm import Communicator, Ordered, world
from distopt.compress import At, Compressor, Dense
from distopt.exchange import Window, choose
from distopt.gradients import Collector, Gradient
from distopt.guard import NonfinitePolicy, fingerprint, whole
from distopt.optim import SGD
from distopt.verbs import Verbs


class DistOpt(Verbs):
    """Wrap any optimizer so that all ranks of a communicator train one model.

    A step collects the gradients, checks them, votes, exchanges them bucket by bucket, and updates; what goes wrong on
    one rank before the vote raises the same error on every rank, and nothing is applied anywhere.

    * ``opt``: None (a new ``SGD()``), or any object with ``apply(name, value, grad)`` and ``step()``, or with
      ``update(param, grad)``.  distopt's own optimizers take the sum of a whole bucket in one kernel call.
    * ``communicator``: None is ``distopt.world()``.
    * ``threshold``: elements that fill a bucket (``buckets.plan``).
    * ``deterministic``: sums are added in rank order on every transport.
    * ``broadcast``: rank 0's parameters go to all ranks at the first step.
    * ``nonfinite``: what to do when a gradient of any rank has an infinity or NaN: 'raise' FloatingPointError on every
      rank, 'skip' the step on every rank (10 in a row raise), or 'propagate'.
    * ``allow_missing``: a parameter without a gradient counts as zeros on that rank instead of an error.
    * ``num_batches``: this many calls are one step: their gradients are averaged, and exchanged once at the last call
      (``sync_on_apply=False``: exchanged at every call, before they are added).
    * ``buffSize``: elements of the staging memory of the fused verbs.

    The order of the first step is the plan; ranks that differ in it, or in these options, all raise a ValueError that
    names the first difference.  Later gradients may arrive in any order.  After a step the contents of the gradients
    are undefined.
    """

    def __init__(
        self,
        opt: Any = None,
        communicator: Communicator | None = None,
        *,
        threshold: int = 2097152,
        deterministic: bool = False,
        broadcast: bool = True,
        nonfinite: str = "raise",
        allow_missing: bool = False,
        num_batches: int = 1,
        sync_on_apply: bool = True,
        buffSize: int = 4194304,
    ):
        self.communicator = world() if communicator is None else communicator
        rank_ordered = not deterministic or self.communicator.rank_ordered
        wire = self.communicator if rank_ordered else Ordered(self.communicator)
        super().__init__(wire, whole("buffSize", buffSize, least=1))
        self.opt = SGD() if opt is None else opt
        self._optimizer = adapt(self.opt)
        self.threshold = whole("threshold", threshold, least=0)
        self.step_counter = 0  # updates applied
        options = f"{deterministic=}, {broadcast=}, {nonfinite=}, {num_batches=}, {sync_on_apply=}, {allow_missing=}"
        self._options = [options, repr(self._optimizer)]
        self._nonfinite = NonfinitePolicy(nonfinite)
        self._window = Window(whole("num_batches", num_batches, least=1), sync_on_apply)
        self._collector = Collector(allow_missing)
        self._buffers: Buffers | None = None
        self._restored: States = {}  # of a checkpoint, until there are buffers
        self._lines: list[str] = []  # what a step is, for the vote
        self._mark = 0
        self._number = 0  # among those that have made a step on this communicator, from 1; 0 before the first
        self._broadcast_due = broadcast

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.communicator.size

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return self.communicator.rank

    @property
    def local_rank(self) -> int:
        """This process among those of its node."""
        return self.communicator.local_rank

    @property
    def skipped(self) -> int:
        """Steps dropped so far under ``nonfinite='skip'``."""
        return self._nonfinite.skipped

    @property
    def plan(self) -> Plan:
        """Which parameters share a bucket; printable.  RuntimeError before the first step or ``gradient_views``."""
        return self._memory.plan

    # ------------------------------------------------------------------------------------------------- the loop

    def __call__(self, loss: Any) -> bool:
        """``backward_and_update(loss)``."""
        return self.backward_and_update(loss)

    def backward_and_update(self, loss: Any, threshold: int | None = None) -> bool:
        """One step with the mean of all ranks' gradients; True if an update was applied.

        ``loss`` is an iterable of (param, grad) pairs (a generator too), a callable that returns one, or an object
        whose ``backward()`` yields one.
        """
        return self._step(loss, Dense(), threshold)

    def step(self, loss: Any = None, compressor: Compressor | None = None) -> bool:
        """One step with any compressor (default ``Dense()``); True if an update was applied.

        Without a loss it ends a step that was made of ``all_reduce`` and ``update``.
        """
        if loss is not None:
            return self._step(loss, compressor or Dense(), None)
        self._check_open()
        self._finish()
        return True

    def _step(self, loss: Any, compressor: Compressor, threshold: int | None) -> bool:
        """Collect, check, vote, exchange, update."""
        self._check_open()
        error = None
        try:
            self._prepare(self._collector.collect(loss), compressor, threshold)
        except Exception as e:
            error = e
        if not self._agree_on_step(error):
            return False
        self._send_parameters()
        at = At(self.step_counter, self._wire.rank, self._wire.size)
        algorithm = choose(compressor)
        sums = self._window.add(self._memory, lambda b, x: algorithm(x, compressor, self._wire, b.state, at))
        if sums is None:
            return False
        self._wire.wait()
        mean = 1.0 / (self._wire.size * self._window.num_batches)
        try:
            self._optimizer.update(self._memory, self._collector.order, sums, mean)
        finally:
            self._window.start(sums)
        self._finish()
        return True

    def _prepare(self, found: dict[str, Gradient], compressor: Compressor, threshold: int | None) -> None:
        """Everything that this rank can do and check alone: the plan, if it changes, and the packing."""
        choose(compressor)
        self._follow_plan(self.threshold if threshold is None else whole("threshold", threshold, least=0))
        self._describe(f"a step with {compressor!r}")
        self._memory.pack({name: g.grad for name, g in found.items()})

    def _follow_plan(self, threshold: int) -> None:
        """Make plan and buffers, unless they are there; what outlives a step moves in by parameter name."""
        if self._buffers is not None and self._buffers.plan.threshold == threshold:
            return
        values = {name: g.value for name, g in self._collector.order.items()}
        sizes, dtypes = [v.size for v in values.values()], [v.dtype for v in values.values()]
        buffers = Buffers(plan(list(values), sizes, dtypes, threshold), values, self._wire.alloc)
        buffers.restore(self._states())
        self._optimizer.prepare(buffers)
        self._buffers, self._lines = buffers, []

    def _describe(self, what: str) -> None:
        """What this rank is about to do, in lines that all ranks must agree on."""
        if self._lines and self._lines[0] == what:
            return
        order = self._collector.order.items()
        parameters = [f"parameter {k} = {n} {g.value.shape} {g.value.dtype}" for k, (n, g) in enumerate(order)]
        self._lines = [what, *parameters, f"threshold={self.plan.threshold}", *self._options]
        self._mark = fingerprint(self._lines)

    def _agree_on_step(self, error: Exception | None) -> bool:
        """Vote; False if all ranks are to skip this step because of gradients that are not finite."""
        calls, more = self.step_counter * self._window.num_batches + self._window.batches, self._window.num_batches > 1
        name = f"step {self.step_counter + 1}" + f", batch {self._window.batches + 1}" * more
        bad = self._memory.nonfinite() if error is None and self._nonfinite.looks else ""
        return self._nonfinite.accepts(name, self._vote(name, calls, error, bad))

    def _vote(self, name: str, number: int, error: Exception | None, report: str = "") -> list[str]:
        """The ranks' reports, if all are at the same call, agree on what ``_describe`` said, and none has an error."""
        control = self._wire.control
        mark = self._mark ^ number ^ self._number << 40
        try:
            reports = control.vote(name, mark, lambda: [*self._lines, name, f"DistOpt {self._number}"], error, report)
        except Exception:
            self._forget_first_step()
            raise
        if not self._number:
            control.optimizers += 1
            self._number, self._restored = control.optimizers, {}
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

    def _finish(self) -> None:
        self.step_counter += 1
        self._optimizer.step()

    def update(self, param: Any, grad: np.ndarray) -> None:
        """Take the mean of a summed gradient, in place, and apply it to one parameter."""
        name, value = self._collector.identify(param)
        grad /= self.world_size
        self._optimizer.apply(name, param, value, grad)

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
            self._follow_plan(self.threshold if self._buffers is None else self.plan.threshold)
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
        expected = self.state_dict()
        if set(state) != set(expected):
            raise ValueError(f"a state has the entries {sorted(expected)}, got {sorted(state)}")
        if state["batches"] and state["num_batches"] != self._window.num_batches:
            batches = f"{state['batches']} of {state['num_batches']} batches"
            raise ValueError(f"the state was saved after {batches}; num_batches is {self._window.num_batches} here")
        states = {s: {n: np.array(a) for n, a in arrays.items()} for s, arrays in state["states"].items()}
        if self._number:
            self._memory.restore(states)
        self._optimizer.load_state_dict(state["optimizer"])
        if self._number:
            self._optimizer.prepare(self._memory)
        self._restored, self._broadcast_due = {} if self._number else states, False
        self.step_counter, self._window.batches = int(state["step_counter"]), int(state["batches"])
        self._nonfinite.skipped, self._nonfinite.in_a_row = int(state["skipped"]), int(state["skips_in_a_row"])
