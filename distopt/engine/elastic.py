"""Elastic jobs: a step is made again, by the ranks that are left, when one is lost."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from distopt import device
from distopt.buckets.shared_state import StateFolder
from distopt.compress.state import pending
from distopt.engine.buddies import Buddies
from distopt.engine.parameters import Loss, iterable
from distopt.engine.spec import Outcome, StepSpec, Update
from distopt.engine.undo import Undo
from distopt.resilience import job

# Updates between two norms of what would be lost: each costs a pass over it.
TELL = 100
T = TypeVar("T")
# Numbers of the trainings of this job, for the names of their files; processes make them in the same order.
_trainings = itertools.count()


class ElasticSteps:
    """Steps of an engine whose ranks go on without those that are lost (``comm.Elastic``)."""

    # Until all ranks have the sums of a step, it has changed counters, residuals, what was accumulated, and gradients
    # that lie in buckets.  If a rank is lost meanwhile these are put back, the plan is made anew for the ranks that are
    # left, and they make the step again.  The update follows when all have the sums, outside of the transaction; but
    # where each rank has a share of the optimizer's state, it is a part of it (`Buddies`).

    def __init__(self, engine: Any, undo: Undo, buddy: bool):
        self._engine, self._undo, self.membership = engine, undo, engine.comm.membership
        parts = engine.comm, engine.store, engine.optimizer, engine.progress
        self.buddies = Buddies(*parts, undo) if buddy else None
        if engine.comm.ranks.logical and engine.comm.gpu is None and (memory := job.memory()):
            engine.store.state_folder = StateFolder.made(memory, lambda: self.membership.ended + 1, next(_trainings))
        self._tell()

    def step(self, loss: Loss, spec: StepSpec, update: Update | None = None) -> bool:
        """Make one step as ``Engine.step``, and again if a rank is lost.  Collective."""
        engine, again = self._engine, loss
        if not (engine.comm.ranks.logical or isinstance(loss, list | tuple)):
            again = Replayed(loss)
        engine.losses.packed.clear()
        shared = engine.store.sharded or engine.optimizer.shares_work
        if engine.comm.gpu is not None:
            # The last step is not made again.
            engine.sync_with_last_step()

        def exchange() -> Outcome | None:
            if spec.epoch not in (None, engine.comm.epoch):
                # What lost ranks have left is found as it was before this transaction until that ends.
                engine.renew_plan()
                return None
            attempt = engine.voted(engine.prepare, again, spec)
            if attempt is None:
                return None
            with engine.progress.halfway:
                return engine.outcome_of(attempt.spec, attempt.reducer)  # type: ignore[no-any-return]

        def apply(outcome: Outcome) -> bool:
            sums, scale = outcome
            with engine.progress.halfway:
                if sums is not None:
                    (update or engine.update)(sums, scale, engine.spec)
            return sums is not None

        if self.buddies and shared and spec.reduced and engine.accumulator.closes:
            outcome, applied = self.buddies.step(self.run, exchange, apply)
        else:
            outcome = self.run(exchange)
            applied = outcome is not None and apply(outcome)
        if outcome is None:
            return False
        if applied:
            self._tell()
        engine.end_call(applied)
        return applied

    def run(self, operation: Callable[[], T]) -> T:
        """Return what an operation returns that all ranks do together, and again if one is lost.  Collective."""
        engine, undo = self._engine, self._undo
        undo.forget()
        policy, bounds = engine.nonfinite.policy, engine.reducers.bounds
        undo.keep_fields(engine.store, "broadcast_due")
        for part in (engine, engine.progress, engine.accumulator, policy, engine.nonfinite, engine.means, bounds):
            undo.keep_fields(part, *part.CHANGES)

        def put_back() -> None:
            undo.undo()
            engine.store.discard_outcomes()

        outcome: T = engine.comm.transaction(operation, put_back)
        return outcome

    def _tell(self) -> None:
        """Say from time to time, where the launcher can read it, what would be lost with this rank."""
        updates, folder = self._engine.progress.updates, self._engine.store.state_folder
        if folder and not folder.full:
            job.tell(job.ADOPTED)
        elif updates and updates % TELL == 0 and job.is_rank():
            held = [x for bucket in self._engine.store.buckets for x in pending(bucket.state).values()]
            norm = math.sqrt(sum(float(np.vdot(x, x)) for x in map(device.host_copy, held)))
            job.tell(f"its residual (norm {norm:.3g} after step {updates})" if norm else "no residual")


class Replayed:
    """A loss that gives the pairs of its first reading at every later one, or raises the same error."""

    def __init__(self, loss: Loss):
        self._read: Callable[[], Iterable[Any]] = lambda: self._first_reading(loss)

    def __call__(self) -> Iterable[Any]:
        return self._read()

    def _first_reading(self, loss: Loss) -> Iterable[Any]:
        try:
            pairs = iterable(loss)
        except Exception as error:
            self._read = functools.partial(_again, [], error)
            raise
        if isinstance(pairs, list | tuple):
            self._read = lambda: pairs
            return pairs
        return self._noting(pairs)

    def _noting(self, pairs: Iterable[Any]) -> Iterator[Any]:
        noted: list[Any] = []
        self._read = functools.partial(_again, noted, None)
        try:
            for pair in pairs:
                noted.append(pair)
                yield pair
        except Exception as error:
            self._read = functools.partial(_again, noted, error)
            raise


def _again(pairs: list[Any], error: Exception | None) -> Iterator[Any]:
    yield from pairs
    if error is not None:
        raise error
