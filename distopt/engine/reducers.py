"""The ways in which the buckets of a step are reduced over ranks, and which one a step takes."""

import abc
import collections
import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np

from distopt import device, kernels
from distopt.buckets import Bucket, BucketSet, Reduced, unsharded
from distopt.checks import check_float
from distopt.comm import Communicator
from distopt.comm.communicator import UNDER_WAY
from distopt.comm.message import MessageTag
from distopt.compress import BucketContext, Compressor, Dense, DeviceContext, ExchangeContext, Half
from distopt.compress.base import payload_nbytes
from distopt.compress.context import Senders
from distopt.compress.shards import ElementShards
from distopt.compress.state import OWED, State, pending, prefixed, settle, shared
from distopt.engine.accumulation import GradientAccumulator
from distopt.engine.bucket_store import BucketStore
from distopt.engine.hooks import StepHook
from distopt.engine.measured import MeasuredExchanges
from distopt.engine.progress import Progress
from distopt.engine.spec import Options, StepSpec
from distopt.engine.undo import Undo
from distopt.exchange import (
    TwoPhase,
    choose,
    program_of,
    reduce_everywhere,
    reduce_half_shards,
    reduce_shards,
    two_phases,
)
from distopt.exchange.all_reduce import TravellingBucket
from distopt.exchange.budget import within
from distopt.exchange.choice import reason
from distopt.exchange.hierarchical import (
    NodeExchange,
    Nodes,
    adds_inside,
    fits_nodes,
    move_states,
    node_exchange,
    node_sizes,
    nodes_of,
    of_round,
    rounds,
    share_inside,
    sum_inside,
)
from distopt.exchange.program import Exchange, OfArray, in_turn, run, run_together
from distopt.exchange.sharding import ShardBounds
from distopt.exchange.shared_memory import describe, nonfinite
from distopt.exchange.two_phase import Owned, two_phase_program

OVER = ("ranks", "senders")
# Votes on a report about the sums, and returns those of all ranks.
Vote = Callable[[str], list[str]]
# None stands for a bucket that will take a while.
Stream = Iterable[tuple[Bucket, np.ndarray] | None]


class Reducer(abc.ABC):
    """One way to replace the flat gradient of each bucket by its sum over ranks."""

    # May a rank update by its shard of a sum before it has the next bucket's?
    shards_are_final = False

    @abc.abstractmethod
    def reduce(self, arrays: list[np.ndarray]) -> Iterator[Reduced]:
        """Yield the sum over ranks of each bucket's array, reduced when it is asked for.  Collective."""

    @abc.abstractmethod
    def nonfinite(self, sums: list[Reduced]) -> str:
        """Describe what is not finite in the sums, the same on all ranks; '' if all is, or if only a GPU knows."""


class Unreduced(Reducer):
    """Take arrays that need no reduction, or have had it."""

    def __init__(self, store: BucketStore, compressor: Compressor):
        self._store, self._may_overflow = store, compressor.traits.may_overflow

    def reduce(self, arrays: list[np.ndarray]) -> Iterator[Reduced]:
        return map(unsharded, arrays)

    def nonfinite(self, sums: list[Reduced]) -> str:
        return self._store.check.nonfinite_sums(sums, self._may_overflow)


class CollectiveReducer(Unreduced):
    """Reduce each bucket by the collective that the compressor's payloads ask for (``exchange.choose``)."""

    # On the host, between machines, a bucket may be compressed while another one is on its way.

    def __init__(self, compressor: Compressor, spec: StepSpec, comm: Communicator, step_context: "StepContext"):
        super().__init__(step_context.store, compressor)
        self._compressor, self._comm, self._step_context = compressor, comm, step_context
        # A dense sum has no senders.
        self._break_even = spec.break_even and spec.over == "ranks"
        self._algorithm = choose(compressor, self._break_even)
        self._text = repr(compressor) if comm.gpu is not None and compressor.traits.recordable else ""
        for hook in step_context.hooks:
            self._algorithm = hook.wrap_exchange(self._algorithm, compressor)
        # Of ragged payloads ranks are told the lengths, between which nothing else may begin.
        pipelined = comm.pipelines and not (compressor.traits.ragged or compressor.traits.has_hooks)
        self.pipelined = pipelined and not step_context.payloads_wanted

    def reduce(self, arrays: list[np.ndarray]) -> Iterator[Reduced]:
        with self._step_context.counted_entries(self._compressor, arrays):
            if self._comm.gpu is None:
                yield from self.stream(zip(self._store.buckets, arrays, strict=True))
            else:
                # Buckets that leave together are enqueued together.
                for _ in self.stream((b, b.gradient) for b in self._step_context.travelling(self._compressor)):
                    pass
                yield from map(unsharded, arrays)

    def exchange(self, buckets: Sequence[tuple[Bucket, np.ndarray]]) -> None:
        """Replace the arrays of these buckets by their sums.  Collective."""
        for _ in self.stream(buckets):
            pass

    def stream(self, buckets: Stream) -> Iterator[Reduced]:
        """Yield the sum over ranks of each bucket, as they come.  Collective."""
        if not self.pipelined:
            return (self._exchange(*bucket) for bucket in buckets if bucket)
        return map(unsharded, in_turn((pair and self.program(*pair) for pair in buckets), self._comm))

    def program(self, bucket: Bucket, x: np.ndarray) -> OfArray:
        """Return a bucket's array, the tag of its messages, and what this rank does to replace it by its sum."""
        travelling = self._travelling(bucket, x)
        return x, travelling[-1], program_of(travelling, self._compressor, self._break_even)

    def _travelling(self, bucket: Bucket, x: np.ndarray) -> TravellingBucket:
        """Return a bucket as exchanges take it; nobody owns a shard of it, so what was owed waits with the rest."""
        travelling = self._step_context.travelling_bucket(bucket, x, self._comm, self._compressor, self._text)
        _, state, context, _ = travelling
        if OWED in state and self._compressor.traits.stateful:
            settle(x, state, skip_flag=context.skip_flag)
        return travelling

    def _exchange(self, bucket: Bucket, x: np.ndarray) -> Reduced:
        comm, compressor = self._comm, self._compressor
        _, state, context, tag = self._travelling(bucket, x)
        with comm.tagged(tag):
            if compressor.traits.has_hooks:
                with comm.on_comm_stream():
                    begin = partial(compressor.begin, x, state, context)
                    context.repeat("begin", begin, (x, *state.values()))
            self._algorithm(x, compressor, comm, state, context, tag)
            if compressor.traits.has_hooks:
                with comm.on_comm_stream():
                    finish = partial(compressor.finish, x, state, context)
                    context.repeat("finish", finish, (x, *state.values()))
        return unsharded(x)


class TwoPhaseReducer(Unreduced):
    """Reduce buckets by owners of shards, which add up what the ranks send, and send the sums."""

    # All buckets have their shards, and their messages, together.  With `by_bucket`, which changes no bit of a
    # compressor that has the trait ``of_sums``, each has its own, and need not wait for the others.

    def __init__(
        self,
        phases: TwoPhase,
        compressor: Compressor,
        comm: Communicator,
        step_context: "StepContext",
        owned: Owned,
        bounds: ShardBounds,
        otherwise: CollectiveReducer,
        by_bucket: bool,
    ):
        # otherwise: takes the buckets that are no part of the two phases.
        super().__init__(step_context.store, compressor)
        self._phases, self._compressor, self._comm, self._step_context = phases, compressor, comm, step_context
        self._owned, self._bounds, self._otherwise, self._by_bucket = owned, bounds, otherwise, by_bucket

    def reduce(self, arrays: list[np.ndarray]) -> Iterator[Reduced]:
        with self._step_context.counted_entries(self._compressor, arrays):
            yield from self.stream(zip(self._store.buckets, arrays, strict=True))

    def stream(self, buckets: Stream) -> Iterator[Reduced]:
        """Yield the sum over ranks of each bucket, as they come; all at the end unless ``by_bucket``.  Collective."""
        # Where all elements are sent, all know how long messages are.
        if self._by_bucket and self._otherwise.pipelined and isinstance(self._phases.codec, ElementShards):
            numbers = itertools.count()

            def program(bucket: Bucket, x: np.ndarray) -> OfArray:
                if next(numbers) in self._phases.buckets:
                    return x, self._step_context.tag(bucket), self._program([(bucket, x)])
                return self._otherwise.program(bucket, x)

            yield from map(unsharded, in_turn((pair and program(*pair) for pair in buckets), self._comm))
            return
        numbered = enumerate(filter(None, buckets))
        for part in ([pair] for pair in numbered) if self._by_bucket else [list(numbered)]:
            if together := [pair for k, pair in part if k in self._phases.buckets]:
                run(self._program(together), self._comm)
            if alone := [pair for k, pair in part if k not in self._phases.buckets]:
                self._otherwise.exchange(alone)
            yield from map(unsharded, [x for _, (_, x) in part])

    def _program(self, together: Sequence[tuple[Bucket, np.ndarray]]) -> Exchange:
        """What this rank does to replace the arrays of these buckets by their sums, in the same messages."""
        compressor, step, comm = self._compressor, self._step_context, self._comm
        text = repr(compressor) if comm.gpu is not None and compressor.traits.recordable else ""
        travelling = [step.travelling_bucket(bucket, x, comm, compressor, text) for bucket, x in together]
        if compressor.traits.has_hooks:
            for x, state, context, _ in travelling:
                compressor.begin(x, state, context)
        watches = [watch for hook in step.hooks if (watch := hook.watch_shards(compressor))]
        own = self._owned, self._bounds
        yield from two_phase_program(travelling, compressor, self._phases.codec, comm, *own, step.tag(), watches)
        for hook in step.hooks:
            hook.after_two_phases(travelling, comm)
        if compressor.traits.has_hooks:
            for x, state, context, _ in travelling:
                compressor.finish(x, state, context)


class TogetherReducer(Unreduced):
    """Reduce the buckets of all ranks that live in this process, whose programs go on in lock step."""

    # The sums lie in the last rank's buckets.

    def __init__(
        self,
        phases: TwoPhase | None,
        compressor: Compressor,
        spec: StepSpec,
        comm: Communicator,
        step_context: "StepContext",
        owned: Mapping[int, Owned],
        bounds: ShardBounds,
    ):
        # owned: by rank.
        super().__init__(step_context.store, compressor)
        self._phases, self._compressor, self._comm, self._step_context = phases, compressor, comm, step_context
        self._break_even, self._owned, self._bounds = spec.break_even and spec.over == "ranks", owned, bounds

    def reduce(self, arrays: list[np.ndarray]) -> Iterator[Reduced]:
        compressor, comm, step, phases = self._compressor, self._comm, self._step_context, self._phases
        of_ranks = {
            rank: [step.travelling_bucket(bucket, bucket.gradient, comm, compressor, rank=rank) for bucket in buckets]
            for rank, buckets in self._store.of_ranks.items()
        }
        last = of_ranks[comm.ranks.here[-1]]
        if compressor.traits.has_hooks:
            for number, (x, state, context, _) in enumerate(last):
                compressor.begin(x, state, context)
                for travelling, (name, array) in itertools.product(of_ranks.values(), shared(state).items()):
                    travelling[number][1][name] = array
        together = phases.buckets if phases else ()
        if phases:
            programs = [
                two_phase_program(
                    [travelling[k] for k in together],
                    compressor,
                    phases.codec,
                    comm,
                    self._owned[rank],
                    self._bounds,
                    step.tag(),
                )
                for rank, travelling in of_ranks.items()
            ]
            run_together(programs, comm)
        for number in set(range(len(last))).difference(together):
            buckets = [travelling[number] for travelling in of_ranks.values()]
            for x, state, context, _ in buckets if compressor.traits.stateful else ():
                settle(x, state, skip_flag=context.skip_flag)
            with comm.tagged(last[number][-1]):
                run_together([program_of(bucket, compressor, self._break_even) for bucket in buckets], comm)
        if compressor.traits.has_hooks:
            for x, state, context, _ in last:
                compressor.finish(x, state, context)
        return map(unsharded, arrays)


class NodeReducer(Unreduced):
    """Sum inside each node, and exchange the sums between nodes; each rank of a node does so for its own buckets."""

    # Where that is in two phases, shards are always of as many elements: ranks of a node have different buckets, so
    # that bounds would move differently on them, while all ranks save the same ones.

    def __init__(
        self,
        plan: NodeExchange,
        nodes: Nodes,
        step_context: "StepContext",
        between: CollectiveReducer | TwoPhaseReducer,
        together: bool,
    ):
        # together: all buckets of a rank are exchanged at once.
        super().__init__(step_context.store, plan.compressor)
        self._plan, self._nodes, self._step_context, self._between = plan, nodes, step_context, between
        self._together = together

    def reduce(self, arrays: list[np.ndarray]) -> Iterator[Reduced]:
        return self.stream(zip(self._store.buckets, arrays, strict=True))

    def stream(self, buckets: Stream) -> Iterator[Reduced]:
        """Yield the sum over ranks of each bucket, as they come.  Collective.

        While the buckets of a round travel between nodes, those of the next one are added up inside.
        """
        plan, (inside, between), step = self._plan, self._nodes, self._step_context
        mine = plan.shares[inside.rank]
        # Of each round that is added up, the buckets, and the arrays by rank; then the results of those that have come.
        under_way = collections.deque[tuple[list[tuple[Bucket, np.ndarray]], list[np.ndarray]]]()
        finished = collections.deque[Reduced]()

        def finish_round() -> None:
            """Give this rank's result of the oldest round to its neighbours, and take theirs."""
            pairs, arrays = under_way.popleft()
            between.wait()
            with inside.tagged(step.tag()):
                share_inside(arrays, inside)
            inside.wait()
            for bucket, x in pairs:
                if plan.compressor.traits.has_hooks and bucket.number not in mine:
                    # What is the same on all ranks goes on everywhere.
                    _, state, context, _ = step.travelling_bucket(bucket, x, between, plan.compressor)
                    plan.compressor.begin(x, state, context)
            finished.extend(unsharded(x) for _, x in pairs)

        def sums() -> Iterator[tuple[Bucket, np.ndarray]]:
            """Add up the buckets of each round inside the node, and yield this rank's."""
            # Ranks of a node take turns by the number of rounds alone, as what has arrived differs between them.
            turns, pairs = iter(rounds(plan.shares[: inside.size])), list[tuple[Bucket, np.ndarray]]()
            numbers = next(turns, ())
            # Before a gap nothing is sent to its end sooner: a rank that waited for that would wait for one whose
            # neighbour may wait likewise, in a circle.
            for pair in filter(None, buckets):
                pairs.append(pair)
                if len(pairs) < len(numbers) - numbers.count(None):
                    continue
                there = {bucket.number: x for bucket, x in pairs}
                arrays = of_round(there, numbers)
                with inside.tagged(step.tag()):
                    sum_inside(arrays, inside)
                inside.wait()
                under_way.append((pairs, arrays))
                if len(under_way) > UNDER_WAY and not self._together:
                    finish_round()
                yield from (pair for pair in pairs if pair[0].number in mine)
                pairs, numbers = [], next(turns, ())

        own = iter(list(sums())) if self._together else sums()
        with step.counted_entries(plan.compressor, [x for pairs, _ in under_way for _, x in pairs]):
            for _ in self._between.stream(own):
                while finished:
                    yield finished.popleft()
            # Before entries are sent: they were counted on that stream.
            between.wait()
        while under_way:
            finish_round()
        yield from finished


class SharedMemoryReducer(Reducer):
    """Add dense gradients up in memory that all ranks share; each process forms its shard of the sum."""

    # What is not finite is found in the shards, and a vote says so, so that gradients need not be checked before.

    shards_are_final = True

    def __init__(
        self,
        comm: Communicator,
        step_context: "StepContext",
        check_finite: bool,
        vote: Vote,
        everywhere: bool,
        unchanged: Set[str],
    ):
        # everywhere: sums are written to every rank's memory; unchanged: parameters whose sums need not be finite.
        self._comm, self._step_context, self._check_finite, self._vote = comm, step_context, check_finite, vote
        self._unchanged = unchanged
        self._reduce = reduce_everywhere if everywhere else reduce_shards

    def reduce(self, arrays: list[np.ndarray]) -> Iterator[Reduced]:
        for bucket in self._step_context.store.buckets:
            with self._comm.tagged(self._step_context.tag(bucket)):
                total = self._reduce(bucket, self._comm)
            yield total

    def nonfinite(self, sums: list[Reduced]) -> str:
        """Vote; when this returns all ranks have added up their shards.  Collective."""
        store = self._step_context.store
        reports = self._vote(nonfinite(store.buckets, self._unchanged) if self._check_finite else "")
        return describe(reports, store.collector.order, self._comm.ranks.size) if reports else ""


class SharedHalfReducer(Unreduced):
    """Write 16-bit payloads to memory that all ranks share; each rank adds up its shard."""

    def __init__(self, compressor: Half, comm: Communicator, step_context: "StepContext", otherwise: Reducer):
        super().__init__(step_context.store, compressor)
        self._compressor, self._comm, self._step_context, self._otherwise = compressor, comm, step_context, otherwise

    def reduce(self, arrays: list[np.ndarray]) -> Iterator[Reduced]:
        def context(bucket: Bucket) -> ExchangeContext:
            return self._step_context.exchange_context(bucket, self._comm, self._compressor)

        sums = reduce_half_shards(self._store.buckets, self._compressor, self._comm, context, self._step_context.tag)
        # None: there is no such memory.
        return self._otherwise.reduce(arrays) if sums is None else iter(sums)


class KeepStates(Reducer):
    """Reduce as another reducer does, but keep what outlives the step of parameters that the step leaves alone."""

    # What would be sent of their residuals is not applied, and so stays, and takes no place of other entries.

    def __init__(
        self, reducer: Reducer, compressor: Compressor, comm: Communicator, store: BucketStore, names: Set[str]
    ):
        self._reducer, self._compressor, self._comm, self._store, self._names = reducer, compressor, comm, store, names

    def reduce(self, arrays: list[np.ndarray]) -> Iterator[Reduced]:
        undo, known = Undo(), list[set[str]]()
        for bucket in self._store.all_buckets:
            if not self._names.isdisjoint(bucket.spec.names) and self._compressor.traits.stateful:
                state = prefixed(bucket.state, self._compressor.traits)
                settle(bucket.gradient, state, skip_flag=self._store.skip_flag)
            # After it was settled: what an owner owed may have gone, and a residual come.
            known.append(set(bucket.state))
            for place in self._places(bucket, bucket.state.values()):
                undo.keep(place)
                device.clear(place)
        yield from self._reducer.reduce(arrays)
        self._comm.wait()
        undo.undo()
        for bucket, before in zip(self._store.all_buckets, known, strict=True):
            for place in self._places(bucket, [flat for kind, flat in bucket.state.items() if kind not in before]):
                device.clear(place)

    def _places(self, bucket: Bucket, flats: Iterable[np.ndarray]) -> list[np.ndarray]:
        return [place for flat in flats for place in bucket.views_of(self._names, flat)]

    def nonfinite(self, sums: list[Reduced]) -> str:
        return self._reducer.nonfinite(sums)


class EarlyStates:
    """Reduce as another reducer does, before the vote on the step, which may put back what outlives it."""

    def __init__(
        self, reducer: CollectiveReducer | TwoPhaseReducer | NodeReducer, undo: Undo, begin: Callable[[], float]
    ):
        # begin: is called when ranks have agreed to begin, and returns the weight of ``WeighStates``.
        self._reducer, self._undo, self._begin = reducer, undo, begin

    def stream(self, buckets: Stream) -> Iterator[Reduced]:
        """Yield the sum over ranks of each bucket, as they come.  Collective."""
        weight, states = self._begin(), list[State]()

        def kept() -> Iterator[tuple[Bucket, np.ndarray] | None]:
            for pair in buckets:
                if pair:
                    states.append(pair[0].state)
                    self._undo.keep_state(states[-1])
                    weigh(states[-1], weight)
                yield pair

        yield from self._reducer.stream(kept())
        for state in states:
            weigh(state, 1 / weight)


def weigh(state: State, factor: float) -> None:
    """Multiply what waits to be sent."""
    for x in pending(state).values() if factor != 1 else ():
        kernels.scale(x, factor)


class WeighStates(Reducer):
    """Reduce as another reducer does, where ranks that have joined bring no gradients."""

    # What was not sent belongs to means over all ranks, and arrives as a part of those, although this step's sum of
    # fewer gradients is divided by fewer.

    def __init__(self, reducer: Reducer, comm: Communicator, store: BucketStore, weight: float):
        # weight: this step's divisor, relative to that of a step to which all ranks bring gradients.
        self._reducer, self._comm, self._store, self._weight = reducer, comm, store, weight

    def reduce(self, arrays: list[np.ndarray]) -> Iterator[Reduced]:
        for bucket in self._store.buckets:
            weigh(bucket.state, self._weight)
        yield from self._reducer.reduce(arrays)
        self._comm.wait()
        for bucket in self._store.buckets:
            weigh(bucket.state, 1 / self._weight)

    def nonfinite(self, sums: list[Reduced]) -> str:
        return self._reducer.nonfinite(sums)


class LocalGradients(Reducer):
    """Take this rank's own gradients, in a partial step; no other rank has the same."""

    def reduce(self, arrays: list[np.ndarray]) -> Iterator[Reduced]:
        return map(unsharded, arrays)

    def nonfinite(self, sums: list[Reduced]) -> str:
        return ""


class StepContext:
    """The facts of the present step that the exchange of a bucket needs."""

    def __init__(
        self,
        comm: Communicator,
        store: BucketStore,
        progress: Progress,
        accumulator: GradientAccumulator,
        hooks: Sequence[StepHook],
    ):
        self.store, self.hooks = store, hooks
        self._comm, self._progress, self._accumulator = comm, progress, accumulator
        self._divisor: float | None = None
        self._counts_senders = False

    def begin(self, spec: StepSpec) -> None:
        """Begin a call of a step with this specification; tell the hooks of the first one."""
        self._divisor, self._counts_senders = spec.divisor, spec.over == "senders"
        if not self._accumulator.batches:
            for hook in self.hooks:
                hook.begin(self._progress.updates + 1, spec, self._accumulator.exchanges)

    def resume(self, spec: StepSpec) -> None:
        """Go on with a step of which the hooks have heard: its gradients have been reduced."""
        self._divisor, self._counts_senders = spec.divisor, spec.over == "senders"

    @property
    def divisor(self) -> float:
        """The number that divides the sums over ranks, to make means of them."""
        accumulator = self._accumulator
        # Buckets that leave before the vote are of no call that was counted.
        return (accumulator.num_gradients or accumulator.brought) if self._divisor is None else self._divisor

    @property
    def payloads_wanted(self) -> bool:
        """Whether a hook sees each bucket's exchange."""
        return any([hook.wants_payloads for hook in self.hooks])

    def travelling(self, compressor: Compressor) -> BucketSet:
        """The buckets that leave one after the other: on a GPU neighbours together, unless a hook sees each of them."""
        messages = None if self.payloads_wanted or not compressor.traits.elementwise else self.store.messages
        return self.store.buckets if messages is None else messages

    def counted_entries(
        self, compressor: Compressor, arrays: list[np.ndarray]
    ) -> contextlib.AbstractContextManager[None]:
        """Tell the ranks how many entries each wants to send, where a GPU must know before.  Collective."""
        capacity = self.store.capacity
        if capacity is None or not compressor.traits.bounded:
            return contextlib.nullcontext()
        return capacity.counted(compressor, arrays)

    def tag(self, bucket: Bucket | None = None) -> MessageTag:
        """The tag of the messages of a bucket; without one, of those of all buckets."""
        if bucket is None:
            return MessageTag("gradients", self._progress.updates + 1)
        return MessageTag("gradients", self._progress.updates + 1, bucket.number, bucket.gradients)

    def travelling_bucket(
        self,
        bucket: Bucket,
        x: np.ndarray,
        comm: Communicator,
        compressor: Compressor,
        text: str = "",
        rank: int | None = None,
    ) -> TravellingBucket:
        """Return a bucket as exchanges take it, of a rank that lives here, by default the process's own."""
        context = self.exchange_context(bucket, comm, compressor, text)
        if rank is not None:
            context = context._replace(rank=rank, size=comm.ranks.size)
        return x, prefixed(bucket.state, compressor.traits), context, self.tag(bucket)

    def exchange_context(
        self, bucket: Bucket, comm: Communicator, compressor: Compressor, text: str = ""
    ) -> ExchangeContext:
        """Return the context of a call of the compressor; ``text``: its ``repr`` where launches are recorded."""
        if bucket.payload[0] is not compressor:
            # The size is asked for once, not at every step.
            nbytes = payload_nbytes(compressor, bucket.gradient.size, bucket.gradient.itemsize, bucket.gradients)
            bucket.payload = compressor, None if compressor.traits.ragged else nbytes
        capacity = self.store.capacity if compressor.traits.bounded else None
        number, accumulator = bucket.number, self._accumulator
        on_device = (
            DeviceContext(self.store.skip_flag, capacity[number], capacity.wanted(number))
            if capacity
            else DeviceContext(self.store.skip_flag)
        )
        divisor, batches = self.divisor, accumulator.num_batches if accumulator.sync_on_apply else 1
        senders = Senders(accumulator.brought, accumulator.joined) if self._counts_senders else None
        if comm.size < self._comm.size:
            # Between nodes a gradient is the sum of those of a node.
            batches *= self._comm.hosts.count(self._comm.hosts[self._comm.rank])
        if text and comm.gpu is not None:
            numbers = text, senders, comm.size, divisor, batches, on_device.capacity
            memory = [0 if a is None else device.address(a) for a in (on_device.skip_flag, on_device.wanted)]
            recorder = device.Recorder(bucket.recordings, (*numbers, *memory), comm.gpu)
            on_device = on_device._replace(recorder=recorder)
        return ExchangeContext(
            self._progress.updates,
            comm.rank,
            comm.size,
            divisor,
            batches,
            BucketContext(
                bucket.gradients, bucket.parameters, bucket.scratch, bucket.constant, number, bucket.payload[1]
            ),
            on_device,
            senders,
        )


class Reducers:
    """Choose how a step is reduced."""

    # Does the vote before an exchange tell of the gradients of all ranks?
    all_have_voted = True

    def __init__(
        self,
        comm: Communicator,
        step_context: StepContext,
        accumulator: GradientAccumulator,
        options: Options,
        everywhere: bool,
    ):
        # everywhere: an update reads whole sums, and not shards where other ranks have formed them.
        self._comm, self._step_context, self._accumulator = comm, step_context, accumulator
        self.overlap, self._deterministic = options.overlap, options.deterministic
        self._everywhere, self.bounds = everywhere, ShardBounds()
        # What the last choice of an exchange depended on.
        self._asked: tuple[Any, ...] = (None,) * 4
        self._phases: TwoPhase | None = None
        # The last compressor of a budget, and what it depended on.
        self._fitted: tuple[Any, ...] = (None,) * 4
        # Of each rank that lives here, what it owned of each bucket in the last exchange of two phases.
        self._owned = collections.defaultdict[int, Owned](dict)
        # What the last exchange by nodes depended on.
        self._node_asked: tuple[Any, ...] = (None,) * 3
        self._node_plan: NodeExchange | None = None
        # The last choice between nodes and all ranks, and what it depended on.
        self._settled: tuple[Any, ...] = (None,) * 4
        # For exchange='measure'.
        self.measured = MeasuredExchanges(comm)
        # Whose nodes buckets may be sent to while gradients are computed.
        self._beside: Communicator | None = None

    def in_shared_memory(self, compressor: Compressor) -> bool:
        """Tell if dense gradients are added up in shared memory, where what is not finite is found in the sums."""
        # Not before all ranks have agreed on a plan, and opened its memory.
        dense = isinstance(compressor, Dense) and self._accumulator.num_batches == 1
        return dense and not self.overlap and self._step_context.store.buckets.shared

    def settled(self, compressor: Compressor, spec: StepSpec) -> StepSpec:
        """Return what a step is with the ranks that there are: whether gradients are added up inside of nodes first."""
        comm, exchange = self._comm, spec.exchange
        if exchange == "measure":
            return self.settled(compressor, self._tried(compressor, spec._replace(exchange="auto")))
        if exchange == "nodes":
            # Where an elastic job has lost a rank, or let one in, nodes may have more and fewer.
            fits = not comm.epoch or fits_nodes(compressor, node_sizes(comm.hosts))
            return spec if fits else spec._replace(exchange="auto", chosen_by="auto")
        if exchange != "auto" or not compressor.traits.of_sums or not spec.reduced or not comm.spans_hosts:
            return spec
        buckets = self._step_context.store.buckets_if_any
        if buckets is None or self._deterministic or any([hook.observes for hook in self._step_context.hooks]):
            return spec
        if comm.gpu is not None and compressor.traits.summable:
            # NCCL's own sums go by nodes.
            return spec
        asked = (buckets, compressor, comm.hosts)
        if not all(map(operator.is_, asked, self._settled)):
            plan = [bucket.gradients for bucket in buckets]
            self._settled = (*asked, adds_inside(exchange, compressor, plan, comm.hosts, comm.hosts_summed))
        return spec._replace(exchange="nodes", chosen_by=spec.chosen_by or "auto") if self._settled[3] else spec

    def _tried(self, compressor: Compressor, usual: StepSpec) -> StepSpec:
        """Return a step with the exchange that is to be measured next, or was the fastest."""
        comm, traits, store = self._comm, compressor.traits, self._step_context.store
        observed = any([hook.observes for hook in self._step_context.hooks])
        if not usual.reduced or store.buckets_if_any is None or comm.size == 1 or observed:
            return usual
        settled = self.settled(compressor, usual)
        # A gather of what is added on the wire is the sum over all ranks.
        others = ["gather", *["two_phase"] * (not traits.summable and compressor.sharded() is not None)]
        # NCCL's own sums go by nodes.
        if traits.of_sums and comm.spans_hosts and not (traits.summable and comm.gpu is not None):
            others += ["nodes"] * (len(set(comm.hosts)) < comm.size)
        phases = self.two_phases(compressor, settled)
        chosen = "nodes" if settled.exchange == "nodes" else "two_phase" if phases else "gather"
        exchanges = ["auto", *(other for other in others if other != chosen)]
        exchange = self.measured.exchange(repr(compressor), exchanges)
        by = "measuring" if self.measured.trying else "measured" * (len(exchanges) > 1)
        return usual._replace(exchange=exchange, chosen_by=by)

    def may_overlap(self, compressor: Compressor, spec: StepSpec, threshold: int) -> bool:
        """Tell if buckets may leave before the vote: they are the last step's, and can leave one by one."""
        store = self._step_context.store
        if (
            not (self.overlap and spec.reduced and self._accumulator.num_batches == 1)
            # The last rank here has brought its gradients when the others' have long been packed.
            or self._comm.ranks.by_process
            or compressor.traits.budget is not None
            # Which reads parameters, and their multipliers: where these are is known with the last gradient.
            or compressor.traits.has_hooks
        ):
            return False
        if not store.started or store.stale or threshold != store.threshold:
            return False
        if self._comm.gpu is not None and (compressor.traits.stateful or compressor.traits.bounded):
            return False
        if plan := self.by_nodes(compressor, spec):
            # A GPU enqueues bucket by bucket; and nodes are made where all ranks have agreed to make them.
            beside = self._comm.gpu is None and self._beside is self._comm.duplicate()
            return beside and not self._together(plan)
        return not self.two_phases(compressor, spec) or self._by_bucket(compressor)

    def overlapped(
        self, compressor: Compressor, spec: StepSpec, undo: Undo
    ) -> CollectiveReducer | TwoPhaseReducer | NodeReducer | EarlyStates:
        """Return the reducer of buckets that leave before the vote; ``undo``: puts back what outlives the step."""
        # Over a communicator that a loss does not use.
        beside, plan = self._comm.duplicate(), self.by_nodes(compressor, spec)
        reducer: CollectiveReducer | TwoPhaseReducer | NodeReducer
        if plan is None:
            reducer = self._exchange(self.two_phases(compressor, spec), compressor, spec, beside, self.bounds)
        else:
            reducer = self._of_nodes(plan, spec, nodes_of(beside))
        if not compressor.traits.stateful:
            return reducer

        def begin() -> float:
            if plan:
                self._move_states(plan, nodes_of(beside))
            weighs = spec.divisor is None and spec.over == "ranks"
            return self._accumulator.brought / self._comm.ranks.size if weighs else 1.0

        return EarlyStates(reducer, undo, begin)

    def _by_bucket(self, compressor: Compressor) -> bool:
        """Tell if an exchange in two phases is one of each bucket, which may leave before the others."""
        # Other shards have the same codes, unless these are rounded at random.
        same = compressor.traits.of_sums and not compressor.traits.changes_with_step
        return self.overlap and same and self._comm.gpu is None

    def _together(self, plan: NodeExchange) -> bool:
        """Tell if all buckets of a rank are exchanged between nodes at once."""
        if plan.compressor.traits.bounded and self._comm.gpu is not None:
            # Entries are counted before.
            return True
        return any(plan.phases) and not self._by_bucket(plan.compressor)

    def within_budget(self, compressor: Compressor, spec: StepSpec, k: int) -> Compressor:
        """Return a compressor at the density of which update k sends no more bytes than it may."""
        budget = compressor.traits.budget
        assert budget is not None
        nbytes = check_float(f"bytes at update {k}", budget(k) if callable(budget) else budget, least=1.0)
        buckets, asked = self._step_context.store.buckets, (nbytes, spec.break_even, spec.exchange)
        if self._fitted[0] is not compressor or self._fitted[1] is not buckets or self._fitted[2] != asked:
            plan = [bucket.gradients for bucket in buckets]
            sizes = node_sizes(self._comm.hosts) if spec.exchange == "nodes" else ()
            fitted = within(nbytes, compressor, plan, self._comm.ranks.size, spec.break_even, spec.exchange, sizes)
            self._fitted = compressor, buckets, asked, fitted
        found: Compressor = self._fitted[3]
        return found

    def two_phases(self, compressor: Compressor, spec: StepSpec) -> TwoPhase | None:
        """Return the exchange in two phases that a step takes; None if it takes another one."""
        if compressor.traits.summable or spec.exchange in ("gather", "nodes") or not spec.reduced:
            return None
        buckets = self._step_context.store.buckets
        asked = (buckets, compressor, spec.exchange, spec.break_even)
        if not all(map(operator.is_, asked, self._asked)):
            plan = [bucket.gradients for bucket in buckets]
            self._phases = two_phases(spec.exchange, compressor, plan, self._comm.ranks.size, spec.break_even)
            self._asked = asked
        return self._phases

    def check_senders(self, compressor: Compressor, spec: StepSpec) -> None:
        """Raise ValueError for a mean over others than ranks, unless over senders that can be counted."""
        if spec.over not in OVER:
            raise ValueError(f"over must be one of {', '.join(OVER)}, got {spec.over!r}")
        if not compressor.traits.counts_senders:
            raise ValueError(f"over must be 'ranks' for {compressor!r}, which sends no entries, got 'senders'")
        if spec.exchange == "nodes":
            raise ValueError(
                "over must be 'ranks' with exchange='nodes', whose entries are those of sums over a node, got 'senders'"
            )

    def by_nodes(self, compressor: Compressor, spec: StepSpec) -> NodeExchange | None:
        """Return the exchange by nodes that a step takes; None if it takes another one."""
        if spec.exchange != "nodes" or not spec.reduced or self.in_shared_memory(compressor):
            return None
        if self._step_context.payloads_wanted:
            raise ValueError(
                "exchange must be 'auto', 'gather' or 'two_phase' where payloads are observed, got 'nodes', whose "
                "payloads are those of sums over a node"
            )
        buckets = self._step_context.store.buckets
        asked = (buckets, compressor, spec.break_even)
        if not all(map(operator.is_, asked, self._node_asked)):
            plan = [bucket.gradients for bucket in buckets]
            self._node_plan = node_exchange(compressor, plan, node_sizes(self._comm.hosts), spec.break_even)
            self._node_asked = asked
        return self._node_plan

    def describe(self, compressor: Compressor, spec: StepSpec) -> str:
        """Say how payloads are exchanged; '' for those that are added on the wire by all ranks, or without a plan."""
        if not spec.reduced or self._step_context.store.buckets_if_any is None:
            return ""
        spec = self.settled(compressor, spec) if spec.exchange == "nodes" else spec
        nodes, by_bucket = self.by_nodes(compressor, spec), self._by_bucket(compressor)
        if compressor.traits.summable and not nodes:
            return ""
        phases, size = self.two_phases(compressor, spec), self._comm.ranks.size
        plan = [bucket.gradients for bucket in self._step_context.store.buckets]
        if nodes:
            taken, found = "nodes", nodes.describe(plan, node_sizes(self._comm.hosts), by_bucket)
        elif phases:
            taken, found = "two_phase", phases.describe(plan, size, self.bounds.starts, by_bucket)
        else:
            taken = found = "gather"
        by = spec.chosen_by or ("auto" if spec.exchange == "auto" else "")
        why = f"auto: {reason(taken, compressor, plan, size)}" if by == "auto" else by
        return f"{found} ({why})" if why else found

    def choose(self, compressor: Compressor, spec: StepSpec, check_finite: bool, vote: Vote) -> Reducer:
        """Return the reducer of a step whose buckets have not left before the vote.  Collective by nodes."""
        # Sums in shared memory are checked if `check_finite`; `vote` tells all ranks what is not finite in them.
        step, store = self._step_context, self._step_context.store
        reducer: Reducer
        if not spec.reduced:
            return LocalGradients()
        ranks = self._comm.ranks
        alone = ranks.size == 1 and type(compressor) is Dense and not step.payloads_wanted
        # A wrapper's ledger has the sums of one rank too.
        if alone and self._comm.unwrapped is self._comm:
            return Unreduced(store, compressor)
        unchanged = frozenset[str]() if spec.only is None else store.collector.order.keys() - set(spec.only)
        if self.in_shared_memory(compressor):
            reducer = SharedMemoryReducer(self._comm, step, check_finite, vote, self._everywhere, unchanged)
        elif ranks.by_process:
            phases = self.two_phases(compressor, spec)
            reducer = TogetherReducer(phases, compressor, spec, self._comm, step, self._owned, self.bounds)
        elif plan := self.by_nodes(compressor, spec):
            nodes = nodes_of(self._comm)
            if compressor.traits.stateful:
                self._move_states(plan, nodes)
            reducer = self._of_nodes(plan, spec, nodes)
            if self.overlap and self._comm.gpu is None:
                self._beside = self._comm.duplicate()
                nodes_of(self._beside)
        else:
            reducer = self._exchange(self.two_phases(compressor, spec), compressor, spec, self._comm, self.bounds)
            # Halves are added up in shared memory where they are neither checked nor observed.
            if (
                isinstance(compressor, Half)
                and not (compressor.traits.may_overflow or store.check.doubted or step.payloads_wanted)
                and not (self._accumulator.num_batches > 1 or self.overlap)
                and store.buckets.shared
            ):
                reducer = SharedHalfReducer(compressor, self._comm, step, reducer)
        if compressor.traits.stateful and spec.divisor is None and spec.over == "ranks":
            weight = self._accumulator.expected / (ranks.size * self._accumulator.num_batches)
            reducer = reducer if weight == 1 else WeighStates(reducer, self._comm, store, weight)
        return KeepStates(reducer, compressor, self._comm, store, unchanged) if unchanged else reducer

    def _move_states(self, plan: NodeExchange, nodes: Nodes) -> None:
        """Have states where an exchange by nodes needs them.  Collective."""
        if move_states(list(self._step_context.store.buckets), plan.shares, nodes.inside):
            # There may be debts of what a rank does not own.
            self._owned.clear()

    def _of_nodes(self, plan: NodeExchange, spec: StepSpec, nodes: Nodes) -> NodeReducer:
        """Return the reducer of an exchange by nodes."""
        # Bounds of this step alone, so that they never move.
        phases, even = plan.phases[nodes.inside.rank], ShardBounds()
        between = self._exchange(phases, plan.compressor, spec, nodes.between, even)
        return NodeReducer(plan, nodes, self._step_context, between, self._together(plan))

    def _exchange(
        self,
        phases: TwoPhase | None,
        compressor: Compressor,
        spec: StepSpec,
        comm: Communicator,
        bounds: ShardBounds,
    ) -> CollectiveReducer | TwoPhaseReducer:
        """Return the reducer of an exchange in two phases, or of one by a collective per bucket."""
        collective = CollectiveReducer(compressor, spec, comm, self._step_context)
        if phases is None:
            return collective
        alone = self._by_bucket(compressor)
        owned = self._owned[self._comm.rank]
        return TwoPhaseReducer(phases, compressor, comm, self._step_context, owned, bounds, collective, alone)
