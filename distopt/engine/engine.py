"""One training step: collect, check, vote, reduce, update."""

import functools
import operator
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from distopt.buckets import Reduced
from distopt.checks import check_int
from distopt.comm import Communicator
from distopt.comm.control import agreed
from distopt.comm.message import MessageTag
from distopt.compress import Compressor
from distopt.compress.base import check_compressor, interchangeable
from distopt.engine import phases
from distopt.engine.accumulation import GradientAccumulator
from distopt.engine.agreement import Agreement, AllJoinedError, GradientReport, decode, describe, encode
from distopt.engine.background import Background, Inline
from distopt.engine.bucket_store import BucketStore
from distopt.engine.elastic import ElasticSteps
from distopt.engine.hooks import DivergenceCheck, StepHook
from distopt.engine.means import MeanGradients
from distopt.engine.nonfinite import NonfiniteGuard, policy
from distopt.engine.overlap import Overlap
from distopt.engine.parameters import Loss
from distopt.engine.progress import Progress
from distopt.engine.rank_losses import RankLosses
from distopt.engine.reducers import Reducer, Reducers, StepContext, Unreduced
from distopt.engine.spec import DENSE, NOTHING, Options, Outcome, StepSpec, Update
from distopt.engine.undo import Undo
from distopt.exchange import EXCHANGES
from distopt.optim import SGD
from distopt.optim.adapters import adapt
from distopt.optim.optimizer import UpdatingRanks
from distopt.resilience import job
from distopt.resilience.operation_log import recorder

# What ranks vote on after a step's own vote, which has compared all the rest.
SUMS = zlib.crc32(b"sums")
T = TypeVar("T")


class Attempt:
    """A step on its way: what this rank has prepared of it, before all ranks vote."""

    __slots__ = ("compressor", "error", "missing", "reducer", "spec", "undo")

    def __init__(self, spec: StepSpec):
        self.spec = spec
        self.compressor: Compressor = DENSE
        self.reducer: Reducer | None = None
        self.error: Exception | None = None
        # Of each rank that lives here, the parameters without a gradient (``GradientCollector.missing``).
        self.missing = [0]
        # Puts back what buckets that have left before the vote have changed of what outlives the step.
        self.undo: Undo | None = None


class Engine:
    """Make steps with one model on all ranks of a communicator."""

    # A step collects the gradients and checks them, on this rank alone; then all ranks vote, and go on or raise the
    # same error; then the buckets are reduced over ranks, and the optimizer updates the parameters with the means.

    # The attributes that a step replaces (``Undo.keep_fields``).
    CHANGES = "compressor", "spec", "in_backward", "missing_everywhere", "_asked"

    def __init__(
        self,
        opt: Any,
        comm: Communicator,
        options: Options,
        *,
        threshold: int,
        kind: str = "DistOpt",
        remedy: str = "load a checkpoint to go on",
        counted: str = "step",
        make_reducers: Callable[["Engine"], Reducers] | None = None,
    ):
        # kind, remedy, counted: for errors: the facade, what to do after a step that failed halfway, and an update.
        if comm.ranks.logical and kind not in ("DistOpt", "Synchronizer", "LocalSteps"):
            raise ValueError(
                "logical ranks must be those of a DistOpt or LocalSteps, or of distopt.torch's synchronize or "
                f"local_steps, got {comm!r} for a {kind}"
            )
        phases.check()
        nonfinite = policy(options.nonfinite)
        # The threshold, in elements of a bucket, may be another one from the next step on.
        self.comm, self.options, self.kind = comm, options, kind
        self.threshold = check_int("threshold", threshold, least=0)
        self.optimizer = adapt(SGD() if opt is None else opt)
        self.accumulator = GradientAccumulator(options.num_batches, options.sync_on_apply)
        self.progress = Progress(self.accumulator, remedy, counted)
        # What a step has changed, where it may be made again; None where the job ends with the first lost rank.
        self.undo = Undo() if comm.membership else None
        self.store = BucketStore(
            comm,
            self.optimizer,
            self.undo,
            threshold=self.threshold,
            allow_missing=options.allow_missing,
            broadcast=options.broadcast,
            overlaps=options.overlap,
            checked=options.num_batches if nonfinite.checks_finite else 0,
        )
        self.losses = RankLosses(comm, self.progress)
        self.nonfinite = NonfiniteGuard(nonfinite, self.store, self.progress, self.optimizer)
        self.means = MeanGradients(comm, self.store, options.gradient_hook, options.clip_norm)
        self.hooks: list[StepHook] = []
        if options.check_every:
            self.hooks.append(DivergenceCheck(options.check_every, comm, self.store, self.progress))
        self.step_context = StepContext(comm, self.store, self.progress, self.accumulator, self.hooks)
        self.agreement = Agreement(comm, kind)
        # Both of the last step.
        self.compressor: Compressor = DENSE
        self.spec = StepSpec()
        # The compressor that a step was asked for last, and the one of them that it was made with.
        self._asked: tuple[Compressor, Compressor] = DENSE, DENSE
        # The parameters of which no gradient has arrived on any rank (``StepSpec.arrived``).
        self.missing_everywhere: Collection[str] = frozenset()
        # In backward: buckets leave while a loss yields its gradients.
        self.closed = self.in_backward = False
        self._background = Background() if comm.gpu is None else Inline()
        # Its memory is used again by every step.
        self._early = Undo()
        self.reducers = (
            make_reducers(self)
            if make_reducers
            else Reducers(comm, self.step_context, self.accumulator, options, not self.optimizer.updates_shards)
        )
        # Of steps that are this rank's alone, whose gradients are the sums.
        self._own = Unreduced(self.store, DENSE)
        self.elastic = ElasticSteps(self, self.undo, options.buddy) if self.undo else None
        self.buddies = self.elastic.buddies if self.elastic else None
        if self.elastic:
            self.step = self.elastic.step  # type: ignore[method-assign]
        # Last, since a LossScaler is attached once.
        nonfinite.attach(comm.rank, self.nonfinite.poll)

    def step(self, loss: Loss, spec: StepSpec, update: Update | None = None) -> bool:
        """Make one step with the ranks that there are; tell if an update was applied.  Collective."""
        # `update` is done with the sums over ranks, instead of `self.update`.
        attempt = self.voted(self.prepare, loss, spec)
        if attempt is None:
            return False
        with self.progress.halfway:
            sums, scale = self.outcome_of(attempt.spec, attempt.reducer)
            if sums is not None:
                (update or self.update)(sums, scale, self.spec)
        self.end_call(sums is not None)
        return sums is not None

    def let_in(self) -> None:
        """Go on with the processes that wait to be let in, unless a window of batches is open.  Collective then."""
        if self.elastic and not self.accumulator.batches:
            self.elastic.membership.admit()

    def transaction(self, operation: Callable[[], T]) -> T:
        """Return what an operation returns that all ranks do together, and again if one is lost.  Collective."""
        return self.elastic.run(operation) if self.elastic else operation()

    def voted(self, prepare: Callable[..., Attempt], *arguments: Any) -> Attempt | None:
        """Prepare a step and vote on it; None if all ranks skip it, as it is not finite on some.  Collective."""
        try:
            attempt, accepted = prepare(*arguments), False
            try:
                accepted = self.vote(attempt)
            finally:
                if attempt.undo and not accepted:
                    attempt.undo.undo()
            return attempt if accepted else None
        except BaseException:
            self.store.mark_stream_of_failure()
            raise

    def step_alone(self, loss: Loss, spec: StepSpec) -> bool:
        """Make one step as ``step`` does, on a communicator of this rank alone, whose own gradients are the sums."""
        # There is nobody to vote with, but where the plan changes, or something went wrong, whose text names the rank.
        store, changed = self.store, False
        try:
            error = self.begin()
            try:
                if error is None:
                    store.clear_counts(store.of_ranks)
                    threshold = self.checked_threshold(spec)
                    self.step_context.begin(spec)
                    store.collector.collect(loss, *map(operator.attrgetter("wrap_loss"), self.hooks))
                    changed = store.propose(threshold)
                    self.optimizer.follow(store.collector.order)
                    # They raise for a schedule that is out of its range.
                    self.optimizer.numbers()
                    scale = 1.0 / self.nonfinite.policy.divisor
                    store.pack_all(self.comm.rank, scale, True, spec.clip_value)
            except Exception as e:
                error = e
            if error or changed:
                self.agree(self.progress.name, self.progress.calls, error)
            # As a vote does.
            job.note(self.progress.name)
            found = store.check.nonfinite_gradients()
            if found and not self.nonfinite.accepts(describe([*[{}] * self.comm.control.rank, *found])):
                return False
            self.accumulator.missing = 0
            if missing := store.collector.missing if store.collector.allow_missing else 0:
                _, spec = self._leave_alone(spec, [missing])
            self.go_on(self.compressor, spec, store.check.doubts)
        except BaseException:
            store.mark_stream_of_failure()
            raise
        with self.progress.halfway:
            sums, scale = self.outcome_of(spec, self._own)
            if sums is not None:
                self.update(sums, scale, spec)
        self.end_call(sums is not None)
        return sums is not None

    def begin(self) -> Exception | None:
        """Begin a call: follow the last one, of which all ranks hear if it was refused; return an error of CUDA."""
        if self.comm.gpu is not None:
            try:
                self.sync_with_last_step()
            except Exception as error:
                # The vote tells all ranks, as it does of errors in prepare.
                return error
            self._refuse_last_step()
        self.progress.version += 1
        phases.follow(self.comm.rank)
        return None

    def prepare(self, loss: Loss, spec: StepSpec) -> Attempt:
        """Collect, check and pack this rank's gradients; what goes wrong is kept in the attempt, for the vote."""
        self.check_open()
        attempt, overlap, store, failed, ranks = Attempt(spec), None, self.store, True, self.comm.ranks
        attempt.error = self.begin()
        if attempt.error:
            return attempt
        self.losses.agree()
        # Gradients of a call that is made again, as processes were lost before its exchange, lie there already.
        missing = dict(self.losses.packed) if ranks.by_process else {}
        todo = [rank for rank in ranks.here if rank not in missing or rank not in store.of_ranks]
        try:
            store.clear_counts(todo)
            threshold = self.checked_threshold(spec)
            attempt.compressor = compressor = self.compressor_at_this_step(spec.compressor())
            if spec.over != "ranks":
                self.reducers.check_senders(compressor, spec)
            self.step_context.begin(spec)
            self.reducers.measured.trying = False
            asked, spec = spec, self.reducers.settled(compressor, spec)
            attempt.spec = spec
            self.reducers.bounds.settle(self.progress.updates)
            self.declare_numbers(compressor, spec.clock)
            watches = list[Any](map(operator.attrgetter("wrap_loss"), self.hooks))
            if self.reducers.may_overlap(compressor, spec, threshold):
                overlap = self._begin_overlap(attempt)
                watches.append(overlap.watch)
            collector = store.collector
            for rank in todo[:1]:
                collector.collect(self.losses.of(loss, rank), *watches)
            if store.propose(threshold):
                self.agreement.forget()
                self.accumulator.bound(self.comm.ranks.size)
                # Once more: there may be new parameters.
                self.declare_numbers(compressor, spec.clock)
                attempt.spec = spec = self.reducers.settled(compressor, asked)
                if ranks.logical and not self.accumulator.batches:
                    # A process that was killed may have left those of a step that it has made.
                    self.accumulator.reset(store)
            if compressor.traits.budget is not None:
                compressor = attempt.compressor = self.reducers.within_budget(compressor, spec, self.progress.updates)
            phases = None if compressor.traits.summable else self.reducers.two_phases(compressor, spec)
            if spec.exchange == "nodes":
                self.reducers.by_nodes(compressor, spec)
            if self.declare(spec.describe(compressor, phases is not None)):
                store.check_sizes(compressor)
            leaving = (overlap.buckets, overlap.sent) if overlap else None
            counts = not (spec.reduced and self.reducers.in_shared_memory(compressor))
            scale, multipliers = 1.0 / self.nonfinite.policy.divisor, compressor.traits.has_hooks
            for rank in todo:
                if rank != todo[0]:
                    collector.collect_again(self.losses.of(loss, rank), *watches)
                store.pack_all(rank, scale, counts, spec.clip_value, multipliers, leaving)
                missing[rank] = collector.missing if collector.allow_missing else 0
                if self.undo and ranks.by_process and not store.lie_in_place(rank):
                    self.losses.packed[rank] = missing[rank]
            attempt.missing = [missing[rank] for rank in ranks.here]
            failed = False
        except Exception as error:
            attempt.error = error
        finally:
            if overlap:
                # At an exit too: the buckets that others wait for still travel.
                self.in_backward = False
                overlap.complete(failed)
        if self.undo and attempt.error and self.comm.lost(attempt.error):
            # A lost rank is no outcome of the step, which the vote would make of NCCL's own error.
            raise attempt.error
        return attempt

    def vote(self, attempt: Attempt) -> bool:
        """Vote on an attempt: False if all ranks skip it, as it is not finite on some.  Collective."""
        store, progress, spec = self.store, self.progress, attempt.spec
        report, self.missing_everywhere = "", frozenset()
        if not attempt.error:
            found, missing = store.check.nonfinite_gradients(), attempt.missing
            if spec.arrived:
                places, arrived = list(enumerate(store.collector.order)), map(spec.arrived, self.comm.ranks.here)
                missing = [sum(1 << k for k, name in places if name not in names) for names in arrived]
            if found or any(missing):
                report = encode(map(GradientReport, found or [{}] * len(missing), missing))
        texts = self.agree(progress.name, progress.calls, attempt.error, report, doubts=store.check.doubts)
        doubted = self.comm.control.doubted
        if texts:
            reports = decode(texts, self.comm.ranks)
            # The last ones: a rank that votes alone (local steps) has empty ones of those before it.
            missing_of = [report.missing for report in reports][-self.comm.ranks.size :]
            if spec.arrived:
                here = functools.reduce(operator.and_, missing_of)
                self.missing_everywhere = {name for k, name in enumerate(store.collector.order) if here >> k & 1}
                if not attempt.reducer:
                    # Otherwise they were sent, and another rank may read them by now, but nobody uses that.
                    store.bring_nothing(self.missing_everywhere)
            # What has left with infinities may have spread them.
            unsent = () if attempt.undo else self.missing_everywhere
            if not self.nonfinite.accepts(describe([r.nonfinite for r in reports], unsent)):
                return False
            attempt.spec, spec = self._leave_alone(spec, missing_of)
            if attempt.undo and attempt.spec.only is not None:
                # As ``KeepStates`` does; other entries have had their places.
                unchanged = store.collector.order.keys() - set(attempt.spec.only)
                for bucket in store.all_buckets:
                    attempt.undo.undo_parts(bucket.state, functools.partial(bucket.views_of, unchanged))
        else:
            self.accumulator.missing = 0
        self.go_on(attempt.compressor, spec, doubted, attempt.undo)
        return True

    def go_on(self, compressor: Compressor, spec: StepSpec, doubted: bool, undo: Undo | None = None) -> None:
        """Go on with a step that all ranks make; ``doubted``: on some rank sums may overflow.  Collective."""
        store, progress = self.store, self.progress
        self.losses.packed.clear()
        if store.apart_due:
            store.check_values_apart()
        # A copy, as a hook may take itself away.
        for hook in tuple(self.hooks):
            hook.after_vote(store.collector, self.optimizer.opt)
        if store.broadcast_due:
            store.broadcast_parameters(progress.updates)
        if self.comm.gpu is not None:
            # A GPU may refuse the step later, or captures it and makes it then.
            progress.snapshot()
        self.compressor, self.spec = compressor, spec
        store.check.begin(doubted, compressor.traits.stateful, undo)

    def _leave_alone(self, spec: StepSpec, missing: Sequence[int]) -> tuple[StepSpec, StepSpec]:
        """Leave the parameters alone that no rank has a gradient of; return what is exchanged, and what updated."""
        # In a partial step this rank leaves those alone that it has none of; of several batches that are exchanged
        # apart each exchange leaves its own alone.  `missing` is each rank's `GradientCollector.missing`.
        accumulator = self.accumulator
        if spec.only is not None or not self.reducers.all_have_voted:
            return spec, spec
        here = functools.reduce(operator.and_, missing) if spec.reduced else self.store.collector.missing
        window = accumulator.missing = here & accumulator.missing if accumulator.batches else here
        shared = self.store.sharded or self.optimizer.shares_work
        if window and accumulator.closes and spec.reduced and shared:
            names = ", ".join(n for k, n in enumerate(self.store.collector.order) if window >> k & 1)
            text = f"no rank has a gradient of {names}, but where ranks share an update they update all parameters"
            raise agreed(ValueError(text), self.comm.rank == 0)
        exchanged = spec._replace(only=self._but(here if accumulator.holds_sums else window))
        return exchanged, spec._replace(only=self._but(window))

    def _but(self, missing: int) -> Collection[str] | None:
        """Return the names of all parameters but those, None if that are all."""
        order = self.store.collector.order
        return frozenset(n for k, n in enumerate(order) if not missing >> k & 1) if missing else None

    def outcome_of(self, spec: StepSpec, reducer: Reducer | None = None) -> Outcome:
        """Return what a step that all ranks make is updated with; reducer: None to choose one.  Collective."""
        accumulator, store, buckets = self.accumulator, self.store, self.store.buckets
        accumulator.meet(self.agreement.live, self.agreement.all_joined)
        accumulator.open(self.agreement.live, spec.reduced)
        reducer = reducer or self.choose_reducer(spec)
        check_finite = self.nonfinite.policy.checks_finite
        in_turn = store.sharded and not (check_finite or self.means.hook or self.optimizer.whole or self.elastic)
        if accumulator.holds_sums and spec.reduced:
            reduced = list(reducer.reduce([b.gradient for b in buckets]))
            self.comm.wait()
            nonfinite = reducer.nonfinite(reduced)
            if nonfinite:
                # The window stays as it was before this call.
                accumulator.num_gradients -= self.agreement.live
            if not self.nonfinite.accepts(nonfinite):
                return NOTHING
            reducer = Unreduced(store, self.compressor)
        sums: Iterable[Reduced] | None = accumulator.add(store, reducer.reduce)
        if sums is None:
            self.settle_call(self.spec)
            return NOTHING
        if not (reducer.shards_are_final and in_turn):
            sums = self.finite_sums(reducer, sums)
            if sums is None or not self.settle_call(self.spec):
                return NOTHING
        scale = 1.0 / self.step_context.divisor
        return self.hooked_and_clipped(sums, scale, self.spec) if self.means.needs_all else (sums, scale)

    def choose_reducer(self, spec: StepSpec) -> Reducer:
        """Return the reducer of a step, on which all ranks have agreed, and whose buckets have not left yet."""
        compressor, check_finite = self.compressor, self.nonfinite.policy.checks_finite
        if self.undo and (compressor.traits.stateful or self.accumulator.num_batches > 1):
            for bucket in self.store.all_buckets:
                self.undo.keep_state(bucket.state)

        def vote(report: str) -> list[str]:
            name, part, joined = self.progress.name, ", its sums", self.agreement.joined
            return self.comm.control.vote(name, SUMS, lambda: [name + part], report=report, part=part, joined=joined)

        return self.reducers.choose(compressor, spec, check_finite, vote)

    def finite_sums(self, reducer: Reducer, reduced: Iterable[Reduced]) -> list[Reduced] | None:
        """Wait for the sums of all buckets, and return them; None if all ranks skip them, as they are not finite."""
        sums = list(reduced)
        self.comm.wait()
        nonfinite = reducer.nonfinite(sums)
        if not nonfinite:
            self.store.check.passed()
            return sums
        self.accumulator.reset(self.store)
        return sums if self.nonfinite.accepts(nonfinite) else None

    def update(self, sums: Iterable[Reduced], scale: float, spec: StepSpec) -> None:
        """Update the parameters with ``scale`` times the sums over ranks."""
        store, comm, buckets, order = self.store, self.comm, self.store.buckets, self.store.collector.order
        # Other ranks read this one's memory.
        shared = store.sharded or max(map(len, sums), default=0) > 1
        try:
            if spec.only is None:
                # None: these sums are this rank's own.
                ranks = None
                if store.sharded or (spec.reduced and comm.size > 1):
                    ranks = UpdatingRanks(comm.rank, comm.size, store.sharded, self.add_norms, self._gather_updates)
                self.optimizer.update(buckets, order, sums, scale, store.skip_flag, ranks)
            else:
                chosen = {name: known for name, known in order.items() if name in spec.only}
                self.optimizer.one_by_one(buckets, chosen, sums, scale)
        finally:
            if shared:
                comm.barrier()
        self.accumulator.reset(store, store.skip_flag)
        self.count_update()

    def end_call(self, applied: bool) -> None:
        """Tell the hooks that all of a call has been enqueued."""
        if self.comm.gpu is not None:
            self.store.mark_stream()
        if self.reducers.measured.trying:
            self.reducers.measured.end_step()
        for hook in self.hooks:
            hook.after_call(self.progress.updates, applied)

    def join(self, repeat: Callable[[], object]) -> None:
        """Call ``repeat``, which makes this rank's last step again without gradients, until all ranks have joined."""
        self.check_own_rank("join")
        collector, agreement = self.store.collector, self.agreement
        agreement.joined, missing = True, collector.allow_missing
        collector.allow_missing = True
        try:
            while True:
                repeat()
        except AllJoinedError:
            pass
        finally:
            agreement.joined, collector.allow_missing = False, missing

    # -- votes

    def agree(
        self,
        name: str,
        number: int,
        error: Exception | None = None,
        report: str = "",
        part: str = "",
        doubts: bool = False,
    ) -> list[str]:
        """Vote (``Agreement.vote``); then the proposed plan is that of all ranks, or is taken back.  Collective."""
        try:
            reports = self.agreement.vote(name, number, error, report, part, doubts)
        except Exception:
            self.agreement.forget()
            self.store.roll_back()
            raise
        if not self.agreement.live:
            raise AllJoinedError
        if self.store.proposed:
            self.store.commit()
        return reports

    def renew_plan(self) -> None:
        """Make the plan of the ranks that there are, if they have changed since it was made.  Collective then."""
        # A process that has come may have none.
        due = self.store.stale or (self.store.buckets_if_any is None and self.store.collector.order)
        if due and self.store.propose(self.store.threshold):
            self.declare("the plan of the ranks that there are")
            self.agree(self.progress.name, ~self.progress.calls, part=", the plan of the ranks that there are")
            self.store.point_to_parameters()

    def declare(self, label: str) -> bool:
        """Declare what this rank is about to do; False if it is what it did last."""
        if self.agreement.lines[:1] == [label]:
            return False
        hooks = [hook.line for hook in self.hooks if hook.line]
        lines = [label, *self.store.lines(), *self.options.lines(self.comm), *hooks, repr(self.optimizer)]
        self.agreement.declare(lines)
        return True

    def declare_numbers(self, compressor: Compressor, clock: str = "") -> None:
        """Declare the numbers that may change from step to step, and that must be the same on all ranks."""
        self.optimizer.follow(self.store.collector.order)
        capacity = self.store.capacity if compressor.traits.bounded else None
        entries = [f"room for {n} entries of bucket {k}" for k, n in enumerate(capacity.state())] if capacity else []
        numbers = [
            *([clock] if clock else ()),
            *self.nonfinite.lines(),
            *self.optimizer.numbers(),
            *entries,
            *self.reducers.bounds.lines,
        ]
        self.agreement.declare_numbers(numbers)

    def check_open(self) -> None:
        """Raise RuntimeError if this is closed, or if a loss calls, whose vote another thread takes part in."""
        if self.closed:
            raise RuntimeError(f"this {self.kind} is closed; make a new one")
        if self.in_backward:
            raise RuntimeError(
                "collectives must be those of opt.communicator in a loss, with overlap, got one of DistOpt"
            )

    # -- checks

    def check_own_rank(self, what: str) -> None:
        """Raise ValueError for something that a process does as one rank, if it may have several."""
        if self.comm.ranks.logical:
            raise ValueError(f"{what} must be of processes that are one rank each, got {self.comm!r}")

    def checked_threshold(self, spec: StepSpec) -> int:
        """Return the threshold of a step; raise what forbids the step."""
        self.progress.check()
        if not spec.reduced:
            self.check_own_rank("a partial step")
        if self.accumulator.batches:
            self.accumulator.check(spec.reduced)
        if self.optimizer.shares_work:
            self.optimizer.check_step(spec.only is not None)
        if spec.exchange not in EXCHANGES:
            raise ValueError(f"exchange must be one of {', '.join(EXCHANGES)}, got {spec.exchange!r}")
        if spec.exchange == "nodes" and self.comm.ranks.logical:
            raise ValueError(
                f"exchange must be one of {', '.join(EXCHANGES[:-2])} with logical ranks, which depend on no host, got "
                "'nodes'"
            )
        if spec.exchange == "nodes" and self.comm.exact:
            raise ValueError(
                f"exchange must be one of {', '.join(EXCHANGES[:-2])} with deterministic='exact', got 'nodes', whose "
                "sums inside of nodes are not"
            )
        if spec.exchange == "measure" and self.options.deterministic:
            raise ValueError(
                f"exchange must be one of {', '.join(EXCHANGES[:-1])} with deterministic=True, got 'measure'"
            )
        if spec.clip_value is not None and not spec.clip_value >= 0:
            raise ValueError(f"clip_Value must be at least 0, got {spec.clip_value}")
        if spec.threshold is None:
            return self.store.threshold if self.store.sharded else self.threshold
        return check_int("threshold", spec.threshold, least=0)

    def compressor_at_this_step(self, compressor: Compressor) -> Compressor:
        """Return the compressor that the next update is made with; raise what forbids it."""
        check_compressor(compressor)
        name = type(compressor).__name__
        if compressor.traits.corrects_momentum and (momentum := self.optimizer.momentum()):
            raise ValueError(
                f"the optimizer must be without momentum, as {name} has one on each rank, got {momentum}; "
                "give the momentum to the compressor, and the optimizer none, as SGD(lr)"
            )
        if compressor.traits.corrects_momentum and self.accumulator.holds_sums:
            raise ValueError(f"sync_on_apply must be True, as {name} has one momentum per update, got False")
        found, (asked, kept) = compressor.at_step(self.progress.updates), self._asked
        if found is not asked:
            # What was planned for the last one holds, though a script makes another such object in each step.
            kept = kept if interchangeable(found, kept) else found
            self._asked = found, kept
        return kept

    # -- details of a step

    def _begin_overlap(self, attempt: Attempt) -> Overlap:
        """Begin to reduce buckets as their gradients come; the vote on the step follows the last one."""
        compressor, spec, progress = attempt.compressor, attempt.spec, self.progress
        if self.declare(spec.describe(compressor, self.reducers.two_phases(compressor, spec) is not None)):
            self.store.check_sizes(compressor)
        attempt.reducer, self.in_backward = Unreduced(self.store, compressor), True
        reducer = self.reducers.overlapped(compressor, spec, self._early)
        scale = 1.0 / self.nonfinite.policy.divisor
        if compressor.traits.stateful:
            attempt.undo = self._early
            self._early.forget()
            if self.undo:
                self.undo.on_undo(self._early.undo)

        def agree() -> None:
            self.agree(f"the start of {progress.name}", progress.calls + (1 << 30))
            self.accumulator.meet(self.agreement.live, self.agreement.all_joined)

        return Overlap(
            self._background,
            self.comm,
            self.store,
            self.step_context.travelling(compressor),
            reducer,
            agree,
            pack=lambda bucket: self.store.pack(bucket, scale, True, spec.clip_value),
        )

    def settle_call(self, spec: StepSpec) -> bool:
        """Count a call whose sums are finite; False if they are not."""
        # On a GPU the host does not know, and kernels skip the update; where they cannot, it waits.
        if not self.store.check.deferred:
            self.nonfinite.policy.passed()
            return True
        self.store.check.fetch()
        if self.optimizer.skips(spec.only):
            return True
        self.nonfinite.poll()
        refused = self.nonfinite.refused > 0
        self.resolve_last_step()
        return not refused

    def sums_are_finite(self) -> bool:
        """Tell if a call, whose sums a later one applies, was finite.  Collective if not; a GPU's host waits."""
        check = self.store.check
        if not check.deferred:
            return True
        check.fetch()
        refused = self.nonfinite.learn_if_refused()
        self.resolve_last_step()
        return not refused

    def resolve_last_step(self) -> None:
        """Learn what became of the last step on a GPU; raise as the policy does if it was refused.  Collective then."""
        try:
            self.sync_with_last_step()
            self._refuse_last_step()
        except BaseException:
            self.store.mark_stream_of_failure()
            raise

    def _refuse_last_step(self) -> None:
        """Tell all ranks that the last step on a GPU was refused.  Collective then."""
        entries = self.nonfinite.pop_refused()
        if entries:
            name, calls = self.progress.name, self.progress.calls
            nonfinite = self.store.buckets.nonfinite()
            report = GradientReport(nonfinite).encoded() if nonfinite else ""
            texts = self.agree(name, ~calls, report=report, part=", its outcome")
            if not texts and self.accumulator.exchanges == 1:
                # The gradients were finite, and are in the window.
                self.accumulator.reset(self.store)
            found = describe([report.nonfinite for report in decode(texts, self.comm.ranks)])
            self.nonfinite.enforce(found or f"the sum over ranks ({entries} entries)")

    def sync_with_last_step(self) -> None:
        """Make this stream follow the last step, in whatever stream of the GPU that was, and learn its outcome."""
        if self.comm.gpu is None:
            # The host knew before the step was applied.
            return
        self.store.follow_stream()
        self.nonfinite.poll()

    def hooked_and_clipped(
        self, sums: Iterable[Reduced], scale: float, spec: StepSpec
    ) -> tuple[Iterable[Reduced], float]:
        """Return the sums, and what makes means of them, after the gradient hook and clipping.  Collective."""
        means, accumulator, check_finite = self.means, self.accumulator, self.nonfinite.policy.checks_finite
        if self.agreement.joined and not spec.reduced:
            # A partial step of a rank that has no gradients.
            if means.hook:
                self.vote_on_hook(None)
            return sums, scale
        try:
            if means.hook:
                sums, scale = means.apply_hook(sums, scale, check_finite, self.vote_on_hook), 1.0
            if means.clip_norm is not None:
                sums, name, order = list(sums), self.progress.name, self.store.collector.order
                unchanged = () if spec.only is None else [n for n in order if n not in spec.only]
                same = bool(accumulator.reduced)
                scale = means.clipped_scale(name, sums, scale, check_finite, unchanged, self.add_norms, same)
        except Exception:
            accumulator.reset(self.store, self.store.skip_flag)
            raise
        return sums, scale

    def vote_on_hook(self, error: Exception | None) -> None:
        """Raise on every rank what the gradient hook of one has raised.  Collective."""
        self.agree(self.progress.name, ~self.progress.calls, error, part=", its gradient hook")

    def add_norms(self, partial: np.ndarray) -> None:
        """Replace squares of shards, in place, by their sums over ranks.  Collective."""
        with self.comm.tagged(MessageTag("update", self.progress.updates + 1)):
            self.comm.all_reduce(partial)

    def _gather_updates(self, own: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
        """Return every rank's array of what it has computed of an update, of these lengths.  Collective."""
        with self.comm.tagged(MessageTag("update", self.progress.updates + 1)):
            arrays = self.comm.all_gather(own, ragged=lengths)
        self.comm.wait()
        return arrays

    def count_update(self) -> None:
        """Count an update that has been applied."""
        self.progress.updates += 1
        recorder.first = False
        self.optimizer.step()

    def close(self) -> None:
        """Refuse everything from now on; raise FloatingPointError on all ranks if a GPU's last step was refused."""
        self.closed = True
        self.nonfinite.poll()
        entries = self.nonfinite.pop_refused()
        self.nonfinite.enforce(f"{entries} entries of gradients and sums, of all ranks" if entries else "")
