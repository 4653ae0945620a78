"""Average gradients over ranks, then let the wrapped optimizer use them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from distopt.adapters import adapt
from distopt.buckets import Buffers, Plan, Staging, States, plan
from distopt.comm import Communicator, Ordered, world
from distopt.comm.communicator import checked
from distopt.compress import At, Compressor, Dense
from distopt.exchange import Window, choose
from distopt.gradients import Collector, Gradient
from distopt.guard import NonfinitePolicy, fingerprint
from distopt.optim import SGD


class DistOpt:
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
        self.opt = SGD() if opt is None else opt
        self._optimizer = adapt(self.opt)
        self.communicator = world() if communicator is None else communicator
        self.threshold = _whole("threshold", threshold, least=0)
        self.step_counter = 0  # updates applied
        self._options = f"{deterministic=}, {broadcast=}, {nonfinite=}, {num_batches=}, {sync_on_apply=}"
        rank_ordered = not deterministic or self.communicator.rank_ordered
        self._wire = self.communicator if rank_ordered else Ordered(self.communicator)
        self._nonfinite = NonfinitePolicy(nonfinite)
        self._window = Window(_whole("num_batches", num_batches, least=1), sync_on_apply)
        self._staging = Staging(_whole("buffSize", buffSize, least=1), self._wire.alloc)
        self._collector = Collector(allow_missing)
        self._buffers: Buffers | None = None
        self._restored: States = {}  # of a checkpoint, until there are buffers
        self._lines: list[str] = []  # what a step is, for the vote
        self._mark = 0
        self._broadcast_due, self._closed = broadcast, False

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
        self._optimizer.update(self._memory, self._collector.order, sums, mean)
        self._window.start(sums)
        self._finish()
        return True

    def _prepare(self, found: dict[str, Gradient], compressor: Compressor, threshold: int | None) -> None:
        """Everything that this rank can do and check alone: the plan, if it changes, and the packing."""
        choose(compressor)
        self._follow_plan(self.threshold if threshold is None else _whole("threshold", threshold, least=0))
        self._describe(f"a step with {compressor!r}")
        self._memory.pack({name: g.grad for name, g in found.items()})

    def _follow_plan(self, threshold: int) -> None:
        """Make plan and buffers, unless they are there; what outlives a step moves in by parameter name."""
        if self._buffers is not None and self._buffers.plan.threshold == threshold:
            return
        values = {name: g.value for name, g in self._collector.order.items()}
        sizes, dtypes = [v.size for v in values.values()], [v.dtype for v in values.values()]
        states = self._restored if self._buffers is None else self._buffers.states()
        self._buffers = Buffers(plan(list(values), sizes, dtypes, threshold), values, self._wire.alloc, states)
        self._restored, self._lines = {}, []

    def _describe(self, what: str) -> None:
        """What this rank is about to do, in lines that all ranks must agree on."""
        if self._lines and self._lines[0] == what:
            return
        order = self._collector.order.items()
        parameters = [f"parameter {k} = {n} {g.value.shape} {g.value.dtype}" for k, (n, g) in enumerate(order)]
        self._lines = [what, *parameters, f"threshold={self.plan.threshold}", self._options, repr(self._optimizer)]
        self._mark = fingerprint(self._lines)

    def _agree_on_step(self, error: Exception | None) -> bool:
        """Vote; False if all ranks are to skip this step because of gradients that are not finite."""
        name = f"step {self.step_counter + 1}"
        bad = self._memory.nonfinite() if error is None and self._nonfinite.looks else ""
        try:
            reports = self._wire.control.vote(name, self._mark, lambda: self._lines, error, bad)
        except Exception:
            if not self.step_counter:
                self._forget_first_step()
            raise
        return self._nonfinite.accepts(name, reports)

    def _forget_first_step(self) -> None:
        """A refused first step leaves nothing behind: the next one may bring other parameters."""
        self._collector.forget()
        self._restored = self._restored if self._buffers is None else self._buffers.states()
        self._buffers, self._lines = None, []

    def _send_parameters(self) -> None:
        """Rank 0's parameters to all, once."""
        if self._broadcast_due:
            for g in self._collector.order.values():
                self._wire.broadcast(g.value)
        self._broadcast_due = False

    def _finish(self) -> None:
        self.step_counter += 1
        self._optimizer.step()

    # ------------------------------------------------------------------------------------------------- the verbs

    def update(self, param: Any, grad: np.ndarray) -> None:
        """Take the mean of a summed gradient, in place, and apply it to one parameter."""
        name, value = self._collector.identify(param)
        grad /= self.world_size
        self._optimizer.apply(name, param, value, grad)

    def all_reduce(self, x: np.ndarray) -> None:
        """Replace an array, in place, by its sum over ranks."""
        self._agree_on_arrays("all_reduce", [x])
        self._wire.all_reduce(x)

    def fused_all_reduce(self, xs: Sequence[np.ndarray], send: bool = True) -> None:
        """Replace arrays, in place, by their sums over ranks, in messages of ``buffSize`` elements.

        ``send=False`` only copies them into the staging memory.  ``send=True`` fills as well if nothing was filled
        since the last send; otherwise ``xs`` must be what was filled, in order, or ValueError is raised.
        """
        xs = list(xs)
        if not send:
            self._staging.fill(xs)
            return
        self._agree_on_arrays("fused_all_reduce", xs, self._fill_or_match)
        self._staging.send(xs, self._wire.all_reduce)

    def _fill_or_match(self, xs: Sequence[np.ndarray]) -> None:
        if self._staging.empty:
            self._staging.fill(xs)
        else:
            self._staging.check(xs)

    def wait(self) -> None:
        """Results of the verbs above are visible to the caller's current stream; nothing to do without a GPU."""
        self._wire.wait()

    def broadcast(self, params: Iterable[Any]) -> None:
        """Rank 0's parameters to all ranks."""
        values = [p if isinstance(p, np.ndarray) else p.data for p in params]
        self._agree_on_arrays("broadcast", values)
        for value in values:
            self._wire.broadcast(value)

    def _agree_on_arrays(
        self, verb: str, arrays: Sequence[np.ndarray], check: Callable[[Sequence[np.ndarray]], None] | None = None
    ) -> None:
        """Vote before an array moves: all ranks are in the same verb, with arrays of the same shapes and dtypes."""
        self._check_open()
        error = None
        lines = [verb]
        try:
            for k, x in enumerate(arrays):
                checked(x)
                lines.append(f"{verb} of array {k} = {x.shape} {x.dtype}")
            if check:
                check(arrays)
        except Exception as e:
            error = e
        self._wire.control.vote(verb, fingerprint(lines), lambda: lines, error)

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
            names = self._plan_for(list(params))
        except Exception as e:
            error = e
        self._wire.control.vote("gradient_views", self._mark, lambda: self._lines, error)
        self._send_parameters()
        return [self._memory.view(name) for name in names]

    def _plan_for(self, params: Sequence[Any]) -> list[str]:
        allow, self._collector.allow_missing = self._collector.allow_missing, True
        try:
            names = list(self._collector.collect((p, None) for p in params))
        finally:
            self._collector.allow_missing = allow
        self._follow_plan(self.threshold)
        self._describe("gradient views")
        return names

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes between steps, as copies: plain numbers, and arrays by parameter name.

        The wrapped optimizer's own ``state_dict()`` or ``get_states()`` is in it, parameters are not.
        """
        states = self._restored if self._buffers is None else self._buffers.states()
        return {
            "step_counter": self.step_counter,
            "batches": self._window.batches,
            "skipped": self._nonfinite.skipped,
            "skips_in_a_row": self._nonfinite.in_a_row,
            "states": {state: {n: a.copy() for n, a in arrays.items()} for state, arrays in states.items()},
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned, with parameters that the caller has loaded on every rank."""
        self.step_counter, self._window.batches = int(state["step_counter"]), int(state["batches"])
        self._nonfinite.skipped, self._nonfinite.in_a_row = int(state["skipped"]), int(state["skips_in_a_row"])
        self._restored = {s: {n: np.array(a) for n, a in arrays.items()} for s, arrays in state["states"].items()}
        self._buffers, self._lines, self._broadcast_due = None, [], False
        self._optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Refuse further steps; the communicator stays open."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this DistOpt is closed; make a new one")


def _whole(name: str, given: Any, least: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int | np.integer):
        raise TypeError(f"{name} must be an integer, got {given!r}")
    if given < least:
        raise ValueError(f"{name} must be at least {least}, got {given}")
    return int(given)
