"""Virtual ranks: P ranks that train one model, one after the other, in one process."""

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np

from distopt import device
from distopt.buckets import Bucket, Reduced, unsharded
from distopt.checks import check_int
from distopt.comm import Communicator, LocalCommunicator, objects
from distopt.comm.communicator import (
    Groups,
    Ragged,
    as_flat,
    check_root,
    flat_parts,
    group_of,
    reduce_in_rank_order,
    split,
)
from distopt.comm.ledger import KEEP, Ledger
from distopt.comm.local import LocalControl
from distopt.comm.message import MessageTag
from distopt.comm.meter import Meter
from distopt.compress import Compressor
from distopt.compress.state import State, prefixed
from distopt.engine.agreement import describe
from distopt.engine.engine import Engine
from distopt.engine.reducers import Reducer, Reducers, Vote
from distopt.engine.spec import GradientHook, Options, StepSpec, among, shows
from distopt.engine.undo import Undo
from distopt.exchange.all_reduce import TravellingBucket
from distopt.exchange.hierarchical import NodeExchange, node_ranks
from distopt.exchange.sharding import ShardBounds
from distopt.lab.observe.hook import QualityHook
from distopt.lab.sequential_step import SequentialBuckets, SequentialExchange, SequentialNodes, move_states
from distopt.optim import AnyOptimizer
from distopt.singa import SingaModes

Losses = Callable[[int], Any]


class VirtualControl(LocalControl):
    """Votes of ranks that all say the same, but for the one whose turn it is."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def gather_texts(self, lines: Sequence[str], make: Callable[[], str]) -> list[str]:
        """Return this rank's text once for each rank: all make the same."""
        return [make()] * self.size


class VirtualRanks(LocalCommunicator):
    """Communicator of ranks that take turns in one process.

    There is one copy of what they have alike, so a collective is one to which all of them bring the same array.  What
    they have apart, their gradients, ``SequentialReducer`` exchanges.

    Args:
        size: the number of ranks.
        hosts: the machine of each rank, as numbers; empty for one machine.
        keep: the number of entries that the ledger keeps.

    Attributes:
        in_loss: whether a rank's loss is being asked for its gradients.
        ledger: the messages of rank 0.
        meter: what writes them.
    """

    may_overlap = False  # a bucket is sent when the last rank has brought its own
    hosts_summed = 2  # as of the MPI ranks that they stand for
    in_loss = False

    def __init__(self, size: int, hosts: Sequence[int], keep: int):
        super().__init__(reason="virtual ranks")
        self.size = check_int("size", size, least=1)
        self._hosts, self.control = checked_hosts(hosts, size), VirtualControl(size)
        self.ledger = Ledger(keep)
        self.meter = Meter(0, size, self.hosts, self.algorithm, self.ledger)

    def set_rank(self, rank: int) -> None:
        """Make this the rank whose turn it is."""
        self.rank = self.control.rank = rank

    def tagged(self, tag: MessageTag) -> AbstractContextManager[None]:
        """Return a context whose messages the ledger has under this tag."""
        return self.meter.tagged(tag)

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        """Leave x as it is, since all have the one copy; the ledger has what it takes to send it."""
        as_flat(x, gpu=device.gpu_of(x))
        check_root(root, self.size)
        self.meter.broadcast(x.size, x.itemsize, root)

    def all_reduce(self, x: np.ndarray, op: str = "sum") -> None:
        """Replace x, in place, by the sum, or another reduction, of as many of it as there are ranks."""
        flat = self._alike(as_flat(x, gpu=device.gpu_of(x), op=op))
        device.copy(flat, reduce_in_rank_order([flat] * self.size, op))
        self.meter.all_reduce(x.size, x.itemsize)

    def all_gather(self, x: np.ndarray, ragged: Ragged = False, into: np.ndarray | None = None) -> list[np.ndarray]:
        """Return a flat copy of x for each rank."""
        flat = self._alike(as_flat(x, writable=False, gpu=device.gpu_of(x)))
        memory = device.empty(flat.size * self.size, flat.dtype, like=flat) if into is None else into
        parts = split(memory, [flat.size] * self.size)
        for part in parts:
            device.copy(part, flat)
        self.meter.all_gather([x.nbytes] * self.size, self.meter.breakdown(x))
        return parts

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: Ragged = False) -> list[np.ndarray]:
        """Return, from each rank, a flat copy of its part for this one."""
        flat = flat_parts(parts, self.size, device.gpu_of(parts[0]) if parts else None)
        part = self._alike(flat[self.rank])
        self.meter.all_to_all([x.nbytes for x in flat], [part.nbytes] * self.size)
        return [device.copied(part) for _ in range(self.size)]

    def make_subgroup(self, groups: Groups) -> Communicator:
        """Make virtual ranks of a group, with the same ledger."""
        members = group_of(self.rank, groups)
        group = VirtualRanks(len(members), [self.hosts[member] for member in members], KEEP)
        group.ledger = group.meter.ledger = self.ledger
        return group

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return a copy of the value, which all have alike."""
        check_root(root, self.size)
        text, arrays = objects.encode(value)
        for x in arrays.values():
            self.meter.broadcast(x.nbytes, 1, root)
        return objects.rebuilt(json.loads(text), {name: x.copy() for name, x in arrays.items()})

    def peers(self, x: np.ndarray) -> None:  # type: ignore[override]
        """Return None: the others have no memory of their own."""

    def _alike(self, x: np.ndarray) -> np.ndarray:
        """Return x, which all ranks have alike; RuntimeError where one alone may have it."""
        if self.in_loss:
            raise RuntimeError(
                "collectives of virtual ranks must be outside of their losses, got one in the middle of a step; call "
                "it before or after the step"
            )
        return x


class VirtualLosses:
    """The losses of all ranks in one step, and what compressors keep of each rank between steps.

    Args:
        engine: the engine of the steps.
        ranks: the ranks.

    Attributes:
        states: what compressors keep, by rank and bucket.
    """

    def __init__(self, engine: Engine, ranks: VirtualRanks):
        self._collector, self._ranks = engine.store.collector, ranks
        self._losses: Losses = lambda rank: ()
        self._makes_plan = True
        self.states: list[list[State]] = []
        self._undo = Undo()

    def begin(self, losses: Losses) -> None:
        """Begin a step of these losses."""
        self._losses, self._makes_plan = losses, not self._collector.order

    def states_of(self, buckets: int) -> list[list[State]]:
        """Return what compressors keep, by rank and bucket."""
        self.states = self.states or [[{} for _ in range(buckets)] for _ in range(self._ranks.size)]
        return self.states

    def keep_states(self) -> None:
        """Copy what compressors keep, before a step changes it."""
        self._undo.forget()
        for state in itertools.chain.from_iterable(self.states):
            self._undo.keep_state(state)

    def put_states_back(self) -> None:
        """Put back what compressors keep, as it was when it was copied."""
        self._undo.undo()

    def pairs(self, rank: int) -> list[Any]:
        """Return the pairs of a rank's loss."""
        self._ranks.in_loss = True
        try:
            return self._collector.read(self._losses(rank))
        finally:
            self._ranks.in_loss = False

    def collect(self, rank: int) -> None:
        """Collect gradients of the parameters that the first rank has; in the step that makes the plan, in its order.

        Raises:
            ValueError: a parameter has another array than the first rank's, or another place in that order.
        """
        pairs, collector = self.pairs(rank), self._collector
        collector.collect_again(pairs)
        if self._makes_plan:
            names = [collector.identify(param)[0] for param, _ in pairs]
            both = itertools.zip_longest(collector.order, names, fillvalue="nothing")
            for place, (expected, got) in enumerate(both):
                if got != expected:
                    raise ValueError(f"ranks differ: rank 0 has parameter {place} = {expected}, this one has {got}")


class SequentialReducer(Reducer):
    """Reducer that brings one rank after the other, and adds up what each of them sends.

    Args:
        engine: of the steps.
        ranks: the ranks.
        losses: of all ranks.
        compressor: what is sent.
        spec: what the step is.
        make: makes the exchange of a step.
    """

    def __init__(
        self,
        engine: Engine,
        ranks: VirtualRanks,
        losses: VirtualLosses,
        compressor: Compressor,
        spec: StepSpec,
        make: Callable[[], SequentialExchange],
    ):
        self._engine, self._ranks, self._losses = engine, ranks, losses
        self._compressor, self._spec, self._make = compressor, spec, make

    def reduce(self, arrays: list[np.ndarray]) -> Iterator[Reduced]:
        engine, compressor = self._engine, self._compressor
        found = self._losses.states_of(len(arrays))
        kept = [[prefixed(state, compressor.traits) for state in states] for states in found]
        exchange, nonfinite = self._make(), [dict[str, str]()]
        self._losses.keep_states()
        if compressor.traits.has_hooks:
            for x, state, context, _ in self._travelling(kept[0]):
                compressor.begin(x, state, context)
        try:
            for rank, states in enumerate(kept):
                self._ranks.set_rank(rank)
                if rank:
                    nonfinite.append(self._collect_and_pack(rank))
                if not any(nonfinite):
                    exchange.add(self._travelling(states))
            self._ranks.set_rank(0)
            engine.nonfinite.accepts(describe(nonfinite))
        except Exception:  # which P ranks raise before any of them has changed
            self._losses.put_states_back()
            engine.accumulator.reset(engine.store)
            raise
        finally:
            self._ranks.set_rank(0)
        travelling = self._travelling(kept[0])
        exchange.finish()
        exchange.write_messages(self._ranks.meter, engine.step_context.tag())
        for hook in engine.hooks:
            if isinstance(hook, QualityHook):
                hook.observer.compare(travelling, self._write_dense)
        if compressor.traits.has_hooks:
            for x, state, context, _ in travelling:
                compressor.finish(x, state, context)
        return map(unsharded, arrays)

    def _write_dense(self, dense: np.ndarray, tag: MessageTag) -> None:
        """Write the sum of gradients as they were, which is there, to the ledger."""
        with self._ranks.meter.tagged(tag):
            self._ranks.meter.all_reduce(dense.size, dense.itemsize)

    def _travelling(self, states: Sequence[State]) -> list[TravellingBucket]:
        """Return the buckets of the rank whose turn it is."""
        step = self._engine.step_context
        return [
            (bucket.gradient, state, step.exchange_context(bucket, self._ranks, self._compressor), step.tag(bucket))
            for bucket, state in zip(self._engine.store.buckets, states, strict=True)
        ]

    def nonfinite(self, sums: list[Reduced]) -> str:
        """Return a text on sums that are not finite, after a pass over each, which is little here; '' for none."""
        progress = self._engine.progress
        nonfinite = self._engine.store.check.nonfinite_sums(sums, True)
        if nonfinite and self._compressor.traits.stateful:
            lost = f"what the ranks sent in step {progress.updates + 1} is lost: {nonfinite}"
            progress.fail(f"{lost}; {progress.remedy}")
        return nonfinite

    def _collect_and_pack(self, rank: int) -> dict[str, str]:
        """Collect and pack the gradients of a rank, or raise what they raise on P ranks; say what is not finite."""
        engine, store = self._engine, self._engine.store
        store.clear_counts([0])
        try:
            self._losses.collect(rank)
            scale, clip = 1.0 / engine.nonfinite.policy.divisor, self._spec.clip_value
            store.pack_all(0, scale, True, clip, multipliers=self._compressor.traits.has_hooks)
            return (store.check.nonfinite_gradients() or [{}])[0]
        except Exception as error:
            engine.agree(engine.progress.name, engine.progress.calls, error)
            raise


class SequentialReducers(Reducers):
    """Choice of a reducer for each step, which is always the sequential one.

    Attributes:
        losses: the losses of all ranks in the present step.
    """

    all_have_voted = False  # but for rank 0 they bring their gradients later

    def __init__(self, engine: Engine, ranks: VirtualRanks):
        super().__init__(engine.comm, engine.step_context, engine.accumulator, engine.options, everywhere=True)
        self._engine, self._ranks, self.losses = engine, ranks, VirtualLosses(engine, ranks)

    def in_shared_memory(self, compressor: Compressor) -> bool:
        return False

    def settled(self, compressor: Compressor, spec: StepSpec) -> StepSpec:
        if spec.exchange == "measure":
            # There is no network.
            spec = spec._replace(exchange="auto")
        return spec if spec.exchange == "auto" and not self._in_order else super().settled(compressor, spec)

    def by_nodes(self, compressor: Compressor, spec: StepSpec) -> NodeExchange | None:
        plan = super().by_nodes(compressor, spec)
        if plan and not self._in_order:
            hosts = list(self._ranks.hosts)
            raise ValueError(f"hosts must stand one after the other for virtual ranks by nodes, got {hosts}")
        return plan

    @functools.cached_property
    def _in_order(self) -> bool:
        """Whether the ranks of each host stand one after the other."""
        hosts = list(self._ranks.hosts)
        return [host for known in dict.fromkeys(hosts) for host in [known] * hosts.count(known)] == hosts

    def choose(self, compressor: Compressor, spec: StepSpec, check_finite: bool, vote: Vote) -> Reducer:
        by_nodes, buckets = self.by_nodes(compressor, spec), list(self._engine.store.buckets)

        def make() -> SequentialExchange:
            if by_nodes:
                return self._by_nodes(by_nodes, buckets, spec)
            phases, tag = self.two_phases(compressor, spec), self._engine.step_context.tag()
            of_step = (
                [self._owned[rank] for rank in range(self._ranks.size)],
                self.bounds,
                spec.break_even,
                tag,
                self._engine.hooks,
            )
            return SequentialBuckets(compressor, phases, *of_step)

        sent = by_nodes.compressor if by_nodes else compressor
        return SequentialReducer(self._engine, self._ranks, self.losses, sent, spec, make)

    def _by_nodes(self, plan: NodeExchange, buckets: Sequence[Bucket], spec: StepSpec) -> SequentialNodes:
        """Return an exchange by nodes, once states lie where it needs them."""
        groups, kept = node_ranks(self._ranks.hosts), self.losses.states_of(len(buckets))
        sizes = [len(group) for group in groups]
        owned = [self._owned[rank] for rank in range(self._ranks.size)]
        move_states(kept, [bucket.gradient for bucket in buckets], plan.shares, sizes, owned)
        kept = [[prefixed(state, plan.compressor.traits) for state in states] for states in kept]
        columns, tag = list[SequentialBuckets](), self._engine.step_context.tag()
        for place, phases in enumerate(plan.phases):
            of_column = [owned[group[place]] for group in groups if place < len(group)]
            columns.append(SequentialBuckets(plan.compressor, phases, of_column, ShardBounds(), spec.break_even, tag))
        return SequentialNodes(plan.shares, sizes, columns, kept)


class Simulation(SingaModes):
    """A ``DistOpt`` for P ranks without P processes, whose losses are functions of the rank.

    It has ``step(losses, compressor)`` and every other step but a partial one, where ``losses(r)`` is what rank r would
    give to its own, with the same parameters for all.  The ranks go one after the other through the same packing,
    compression and decompression, bucket by bucket; there is one copy of the parameters, of the optimizer's state, of
    gradients and of their sum, and only what a compressor keeps is there P times.  Parameters have the bits that P
    ranks get with ``deterministic=True``, or by nodes where ``hosts`` are several with several ranks.

    What a compressor keeps is in no ``state_dict``, so the plan is fixed by the first step, and there are no
    checkpoints, and no tape is recorded.  A loss that raises or is not finite raises what it does on P ranks, and ends
    the simulation if it is not the first rank's: those before it have gone on.  A sum over ranks that is not finite is
    refused, and ends it too where something was left behind.

    Args:
        size: the number of ranks.
        opt: the optimizer; by default ``SGD()``.
        threshold: the number of elements that fill a bucket.
        nonfinite: 'raise' or 'propagate': what becomes of gradients that are not finite.
        allow_missing: whether parameters may have no gradient in a step.  Other than with ``DistOpt`` it counts as
            zeros also where no rank has one, since virtual ranks bring their gradients one after the other.
        clip_norm: the largest global norm of the mean gradient; None for any.
        gradient_hook: changes mean gradients, as in ``DistOpt``.
        hosts: the machine of each rank, as numbers; empty for one machine.
        keep: the number of entries that the ledger keeps.

    Attributes:
        communicator: the ranks.  A collective of theirs is one to which all bring the same array.
        ledger: the messages that rank 0 would exchange with the others, by direct exchange.  How long they would take
            is not measured but predicted (``distopt.cost``).

    Raises:
        ValueError: there is less than one rank, ``hosts`` are not one number per rank, or an option is out of range.
        TypeError: an argument has the wrong type.
    """

    def __init__(
        self,
        size: int,
        opt: AnyOptimizer | None = None,
        *,
        threshold: int = 2097152,
        nonfinite: str = "raise",
        allow_missing: bool = False,
        clip_norm: float | None = None,
        gradient_hook: GradientHook | None = None,
        hosts: Sequence[int] = (),
        keep: int = KEEP,
    ):
        asked = among(Options._fields, locals())
        self.communicator = VirtualRanks(size, hosts, keep)
        self.ledger = self.communicator.ledger
        engine = virtual_engine(opt, self.communicator, Options.checked(self.communicator, **asked), threshold)
        super().__init__(engine, asked | {"threshold": threshold})
        self._losses = virtual_losses(engine)

    @property
    def world_size(self) -> int:
        """The number of virtual ranks."""
        return self.communicator.size

    def report(self) -> dict[str, dict[str, int]]:
        """Return the bytes that rank 0 would have exchanged since the start, as ``Metered.report`` does."""
        return self.ledger.report()

    def run(self, loss: Any, spec: StepSpec) -> bool:
        """Make one step of all ranks; ``loss`` is a callable of the rank."""
        if not callable(loss):
            raise TypeError(f"the losses of virtual ranks must be a callable of the rank, got {type(loss).__name__}")
        if self.communicator.in_loss:
            raise RuntimeError(
                "steps of virtual ranks must be outside of their losses, got one in the middle of a step"
            )
        threshold, planned = spec.threshold, self.engine.store.threshold
        threshold = self.threshold if threshold is None else check_int("threshold", threshold, least=0)
        if self._losses.states and threshold != planned:
            raise ValueError(f"threshold must stay {planned} with virtual ranks, got {threshold}")
        return run_virtual(self.engine, loss, spec)


def virtual_engine(opt: AnyOptimizer | None, ranks: VirtualRanks, options: Options, threshold: int) -> Engine:
    """Return an engine whose steps are those of all virtual ranks; ``options`` are what a user has chosen."""
    if options.nonfinite not in ("raise", "propagate"):
        raise ValueError(f"nonfinite must be 'raise' or 'propagate' for virtual ranks, got {options.nonfinite!r}")
    return Engine(
        opt,
        ranks,
        options,
        threshold=threshold,
        remedy="start anew",
        make_reducers=lambda engine: SequentialReducers(engine, ranks),
    )


def virtual_losses(engine: Engine) -> VirtualLosses:
    """Return the losses of a ``virtual_engine``."""
    return cast(SequentialReducers, engine.reducers).losses


def run_virtual(engine: Engine, losses: Losses, spec: StepSpec) -> bool:
    """Make one step of all ranks of a ``virtual_engine``; tell if an update was applied.

    Args:
        engine: the engine.
        losses: returns the loss of a rank.
        spec: what the step is.
    """
    of_ranks = virtual_losses(engine)
    of_ranks.begin(losses)
    return engine.step(lambda: of_ranks.pairs(0), spec)


def checked_hosts(hosts: Sequence[int], size: int) -> list[int]:
    """Return the machine of each rank, as numbers; TypeError or ValueError for what is not one number per rank."""
    numbers = hosts.tolist() if isinstance(hosts, np.ndarray) else hosts
    if not isinstance(numbers, Sequence) or isinstance(numbers, str | bytes):
        raise TypeError(f"hosts must be a sequence of numbers, one per rank, got {hosts!r:.60}")
    if len(numbers) not in (0, size):
        raise ValueError(f"hosts must be one number per rank, {size} of them, got {len(numbers)}")
    return [check_int(f"hosts[{rank}]", host, least=0) for rank, host in enumerate(numbers)]


@shows(Simulation)
def simulate(size: int, opt: AnyOptimizer | None = None, **options: Any) -> Simulation:
    """Return virtual ranks that train with one optimizer.

    Args:
        size: the number of ranks.
        opt: the optimizer; by default ``SGD()``.
        **options: the keyword arguments of ``Simulation``.

    Raises:
        ValueError: there is less than one rank, ``hosts`` are not one number per rank, or an option is out of range.
        TypeError: an argument has the wrong type.

    Example:
        >>> import numpy as np
        >>> from distopt import Parameter, simulate
        >>> from distopt.optim import SGD
        >>> p, sim = Parameter("w", np.zeros(1, np.float32)), simulate(3, SGD(1.0))
        >>> sim(lambda rank: [(p, np.full(1, rank, np.float32))])
        True
        >>> p.data  # minus the mean of 0, 1 and 2
        array([-1.], dtype=float32)
    """
    return Simulation(size, opt, **options)
