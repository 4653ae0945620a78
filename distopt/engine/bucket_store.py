"""The parameters of a model, the plan of their buckets, and the memory of both."""

import contextlib
import itertools
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from distopt import device, kernels
from distopt.buckets import Bucket, BucketSet, Plan, States, plan
from distopt.buckets.shared_state import SharedState, StateFolder
from distopt.comm import Communicator
from distopt.comm.control import agreed
from distopt.comm.logical import peers_of_ranks
from distopt.comm.message import MessageTag
from distopt.comm.threads import ThreadCommunicator
from distopt.compress import Compressor
from distopt.compress.base import payload_nbytes
from distopt.compress.state import shared
from distopt.engine.capacity import PayloadCapacity
from distopt.engine.finite_check import DeviceFlag, HostCheck, NoCheck
from distopt.engine.parameters import GradientCollector
from distopt.engine.undo import Undo
from distopt.optim.adapters import OptimizerAdapter

# Bytes that one launch packs or updates: 16-bit parameters need as much to be updated in.
GROUP = 256 << 20
# Bytes of an all-reduce between GPUs, as DDP's bucket: where NVLink comes near its bandwidth.
MESSAGE = 25_000_000

# Buckets that leave one after the other, and how many of these are on their way already.
Leaving = tuple[BucketSet, int]


class NoPlanError(RuntimeError, AttributeError):
    """There is no plan yet; an AttributeError too, so that ``hasattr`` and ``inspect.getmembers`` can ask."""


class PlanMemory(NamedTuple):
    """A plan with all that is made for it."""

    # Of the ranks (``Communicator.epoch``).
    epoch: int = 0
    buckets: BucketSet | None = None
    # Of each rank that lives here, ascending; ``buckets`` are those of the last one.
    of_ranks: Mapping[int, BucketSet] = {}
    # Larger buckets over the same memory, which are packed and updated as a whole; on the host the same.
    groups: BucketSet | None = None
    # Those that leave as a whole, if neighbours may leave together; on the host the same.
    messages: BucketSet | None = None
    check: NoCheck = NoCheck()
    # Of payloads whose length depends on the data; None on the host, where they need none.
    capacity: PayloadCapacity | None = None


class BucketStore:
    """Hold a model's parameters and gradients in buckets."""

    # A plan is *proposed* by each rank alone, *committed* when a vote has shown that all ranks have it, and *rolled
    # back* when the vote has failed.  What outlives a step moves from plan to plan by parameter name.

    # Before there is a plan: NoPlanError.
    buckets: BucketSet

    def __init__(
        self,
        comm: Communicator,
        optimizer: OptimizerAdapter,
        undo: Undo | None,
        *,
        threshold: int,
        allow_missing: bool,
        broadcast: bool,
        overlaps: bool,
        checked: int,
    ):
        # checked: gradients of a rank in a sum that must be finite, 0 if nobody checks.
        self._comm, self._optimizer, self._overlaps, self._checked = comm, optimizer, overlaps, checked
        self._undo = undo
        self.collector = GradientCollector(allow_missing, comm.gpu)
        # Elements that fill a bucket, in the committed plan.
        self.threshold = threshold
        # Rank 0's parameters are still to be sent.
        self.broadcast_due = broadcast
        # A vote has succeeded.
        self.started = False
        # Of what outlives a step of logical ranks, for who takes them over; None if they end with their process.
        self.state_folder: StateFolder | None = None
        # Brings what a lost rank alone had to the others, once all have a plan without it, and is collective; None if
        # nobody can.
        self.recover: Callable[[], object] | None = None
        self._committed = PlanMemory()
        self._use(self._committed)
        # States of a checkpoint, by rank, until there are buckets.
        self._restored: dict[int, States] = {}
        self._restored_capacity: list[int] = []
        # All ranks are still to look for parameters that two of them have in one place.
        self.apart_due = False

    # -- what there is

    def __getattr__(self, name: str) -> Any:
        """Raise NoPlanError for ``buckets``, which are an attribute from the first plan on."""
        if name == "buckets":
            raise NoPlanError("the plan of buckets is not made yet; make a step or call gradient_views(params) first")
        raise AttributeError(name)

    @property
    def buckets_if_any(self) -> BucketSet | None:
        """The buckets of the plan, None if there is none."""
        return self._memory.buckets

    @property
    def all_buckets(self) -> Iterator[Bucket]:
        """Those of all ranks that live here."""
        return itertools.chain.from_iterable(self.of_ranks.values())

    @property
    def values(self) -> dict[str, np.ndarray]:
        """The parameters' arrays by name."""
        return {name: known.value for name, known in self.collector.order.items()}

    @property
    def stale(self) -> bool:
        """Whether other ranks have made the plan than there are now."""
        return self._memory.buckets is not None and self._memory.epoch != self._comm.epoch

    @property
    def _may_move(self) -> bool:
        """Whether ranks may go on in other processes, which then share no memory."""
        return bool(self._comm.ranks.logical and self._comm.membership)

    def lines(self) -> list[str]:
        """The parameters in their order, and the threshold, for ranks to compare."""
        order = self.collector.order.items()
        parameters = [f"parameter {k} = {n} {p.value.shape} {p.value.dtype}" for k, (n, p) in enumerate(order)]
        return [*parameters, f"threshold={self.buckets.plan.threshold}"]

    def plan(self, compressor: Compressor, exchange: str) -> Plan | None:
        """The plan, with what ``compressor`` sends of each bucket, and how; None if there is none."""
        if self._memory.buckets is None:
            return None
        flats = ((b.gradient.size, b.gradient.itemsize, b.gradients) for b in self.buckets)
        return self.buckets.plan.with_payload([compressor.payload_bytes(*flat) for flat in flats], exchange)

    # -- a plan: propose, commit or roll back

    def propose(self, threshold: int) -> bool:
        """Make a plan of the collected parameters and its buckets, unless they are there; tell if it did."""
        previous, order = self._memory.buckets, self.collector.order
        known = previous and (previous.plan.threshold, previous.num_parameters, self._memory.epoch)
        if known == (threshold, len(order), self._comm.epoch):
            return False
        if self.stale and (self.sharded or self._optimizer.shares_work) and self.recover is None:
            raise RuntimeError(
                "a rank was lost that alone had its share of the optimizer's state, so that training cannot go on; "
                "load a checkpoint in a new job"
            )
        if self.sharded and (threshold != self.threshold or not self.stale):
            raise ValueError(f"threshold must stay {self.threshold} once parameters are shared, got {threshold}")
        values = self.values
        sizes, dtypes = [v.size for v in values.values()], [v.dtype for v in values.values()]
        made, ranks = plan(list(values), sizes, dtypes, threshold), self._comm.ranks
        alloc = device.zeros if self._may_move else self._comm.alloc
        lasting = previous is not None and repr(previous.plan) == repr(made) and bool(ranks.by_process)
        known_ranks = self.of_ranks if lasting else {}
        new = {
            rank: BucketSet(made, values, alloc, self._state_of(rank, made))
            for rank in ranks.here
            if rank not in known_ranks
        }
        of_ranks = {rank: known_ranks[rank] if rank in known_ranks else new[rank] for rank in ranks.here}
        # No rank lives in a process that waits to be let in.
        buckets = of_ranks[ranks.here[-1]] if ranks.here else BucketSet(made, values, alloc, lambda number: {})
        if self.sharded and previous:
            buckets.adopt_parameters(previous)
        states = self._with_states(new, self.states())
        for of_rank, kept in states:
            of_rank.check(kept)
        self._optimizer.check(buckets)
        for of_rank, kept in states:
            of_rank.restore(kept)
        check, capacity, messages, on_gpu = NoCheck(), None, buckets, self._comm.gpu is not None
        if on_gpu:
            buckets.group(GROUP)
            messages = buckets.merged(MESSAGE)
        if self._checked:
            gradients = self._checked * ranks.size
            check = DeviceFlag(buckets, self._comm) if on_gpu else HostCheck(list(of_ranks.values()), gradients)
        if on_gpu:
            capacity = PayloadCapacity(buckets, self._comm)
            if self.stale and self.capacity:
                # These ranks were more, before one was lost.
                capacity.restore(self.capacity.state())
            capacity.restore(self._restored_capacity)
            self._restored_capacity = []
        self._use(PlanMemory(self._comm.epoch, buckets, of_ranks, buckets.groups, messages, check, capacity))
        return True

    def _state_of(self, rank: int, made: Plan) -> Callable[[int], dict[str, np.ndarray]]:
        """Return what makes, or finds, what outlives a step of a bucket of a rank."""
        folder = self.state_folder
        if folder is None:
            return lambda number: {}
        owner = f"{rank}-{zlib.crc32(repr(made).encode()):08x}"
        return lambda number: SharedState(folder, f"{owner}-{number}")

    def _use(self, memory: PlanMemory) -> None:
        """Make this the plan of the next step."""
        self._memory = memory
        # There is a plan to commit, or to roll back.
        self.proposed = memory is not self._committed
        if memory.buckets is None:
            vars(self).pop("buckets", None)
        else:
            self.buckets = memory.buckets
        self.messages, self.check, self.capacity = memory.messages, memory.check, memory.capacity
        # The buckets of each rank that lives here, ascending; ``buckets`` are those of the last one.
        self.of_ranks = memory.of_ranks
        self.skip_flag = memory.check.skip_flag
        self.sharded = memory.buckets is not None and bool(memory.buckets.parameters)

    def commit(self) -> None:
        """Make what a step with the ``proposed`` plan needs, which all ranks have, and free the old.  Collective."""
        buckets, error = self.buckets, None
        if not self._may_move:
            memories = [of_rank.memory for of_rank in self.of_ranks.values()]
            buckets.connect(self._comm, peers_of_ranks(self._comm, memories) if self._comm.ranks.size > 1 else None)
        if self._overlaps:
            # Made here, where all ranks come by.
            _ = self._comm.duplicate()
        if self._committed.buckets is not None:
            self._committed.buckets.wait_for_last_use(self._comm.check)
        try:
            self._optimizer.reserve(buckets)
        except MemoryError as e:
            error = e
        self._committed, self.threshold = self._memory, buckets.plan.threshold
        self.proposed, self.apart_due = False, True
        if not self.started:
            self.started, self._restored = True, {}
        self._comm.control.vote("making the optimizer's state", 1, lambda: ["the optimizer's state"], error)
        if self.recover:
            self.recover()

    def discard_outcomes(self) -> None:
        """Forget what a GPU would tell of a call that is made again."""
        self.check.discard()
        if self.capacity:
            self.capacity.discard()

    def roll_back(self) -> None:
        """Go back to the committed plan and its parameters; if there is none, the next step may bring others."""
        committed = self._committed.buckets
        if committed is not self._memory.buckets or not self.started:
            self.collector.forget({name for b in committed.plan.buckets for name in b.names} if committed else ())
        self._use(self._committed)

    def share_parameters(self) -> dict[str, np.ndarray]:
        """Make all ranks share the parameters' memory, by name; some may already.  Collective."""
        # Where they cannot, ranks that do not share it already raise RuntimeError alone.
        if not self.buckets.share_parameters(self._comm):
            raise RuntimeError(f"ranks must be able to share memory for parameter_views, got {self._comm!r}")
        self.sharded = bool(self.buckets.parameters)
        return self.buckets.parameters

    def unshare_parameters(self) -> None:
        """Give every rank its own parameters again."""
        self.buckets.parameters, self.sharded = {}, False

    # -- a step

    def check_sizes(self, compressor: Compressor) -> None:
        """Raise TypeError or ValueError for a bucket that the compressor cannot take, or has no length for."""
        for bucket in self.buckets:
            payload_nbytes(compressor, bucket.gradient.size, bucket.gradient.itemsize, bucket.gradients)

    def point_to_parameters(self) -> None:
        """Point the buckets' tables to the parameters, wherever these are now."""
        values = self.collector.values
        for buckets in (*self.of_ranks.values(), self._memory.groups):
            assert buckets is not None
            if buckets.parameters_version != values.version:
                buckets.point_to_parameters(values.addresses, values.version)

    def pack_all(
        self,
        rank: int,
        scale: float,
        counts: bool,
        clip: float | None,
        multipliers: bool = False,
        leaving: Leaving | None = None,
    ) -> None:
        """Bring the collected gradients to their places in a rank's buckets (``pack``)."""
        # multipliers: write the optimizer's multipliers into the buckets' tables, for a compressor that reads them.
        grads, buckets = self.collector.grads, self.of_ranks[rank]
        groups = self._memory.groups if buckets is self.buckets else buckets.groups
        assert groups is not None
        self.point_to_parameters()
        if multipliers:
            self._optimizer.multiply(buckets)
        travelling, sent = leaving or (groups, 0)
        packed = travelling if sent else groups
        packed.point_to_gradients(grads.arrays, grads.addresses, grads.version, sent)
        for bucket in packed[sent:]:
            self.pack(bucket, scale, counts, clip)

    def upload_tables(self, travelling: BucketSet) -> None:
        """Bring the tables of buckets that leave early to the GPU: a step that is recorded can upload nothing."""
        # To where they are packed, and to where they are compressed.
        grads = self.collector.grads
        travelling.point_to_gradients(grads.arrays, grads.addresses, grads.version)
        for stream in (contextlib.nullcontext(), self._comm.on_comm_stream()):
            with stream:
                for bucket in travelling:
                    bucket.gradients.table(self._comm.gpu)
        self._comm.wait()

    def pack(self, bucket: Bucket, scale: float, counts: bool, clip: float | None) -> None:
        """Bring a bucket's gradients, times ``scale``, to their places."""
        # counts: what is not finite is counted now; else it is found in the sums.
        # clip: every element is held between -clip and clip.
        if self._undo and _lies_in_place(bucket):
            # It is scaled and summed there.
            self._undo.keep(bucket.gradient)
        bucket.pack(counts and self._checked > 0, scale, self.check.headroom if counts else 1.0)
        if clip is not None:
            kernels.clip(bucket.gradient, clip)

    def lie_in_place(self, rank: int) -> bool:
        """Tell if a rank's last gradients, or some, are views of its buckets, where an undo puts back what was."""
        return any(map(_lies_in_place, self.of_ranks[rank]))

    def bring_nothing(self, names: Collection[str]) -> None:
        """Bring zeros for parameters, after gradients of them were packed."""
        for bucket in self.all_buckets:
            for view in bucket.views_of(names, bucket.gradient):
                device.clear(view)
            for row, name in enumerate(bucket.spec.names):
                if name in names:
                    device.clear(bucket.bad[row : row + 1])

    def clear_counts(self, ranks: Iterable[int]) -> None:
        """Clear the counts of what is not finite, before gradients of these ranks are packed."""
        for rank in ranks:
            if rank in self.of_ranks:
                device.clear(self.of_ranks[rank].bad)

    def broadcast_parameters(self, step: int) -> None:
        """Send rank 0's parameters to all ranks, before the first update: ``broadcast_due``.  Collective."""
        if self._undo:
            self._undo.keep(*self.values.values())
        with self._comm.tagged(MessageTag("start", step)):
            for value in self.values.values():
                self._comm.broadcast(value)
        self._comm.wait()
        self.broadcast_due = False

    def check_values_apart(self) -> None:
        """Raise ValueError, on all ranks, for a parameter in the memory of another thread's.  Collective."""
        # Both would update it.  Looked at in the first step of a plan; `parameter_views` are meant to be shared.
        if not self.sharded:
            check_apart(self._comm, self.values)
            self.apart_due = False

    def follow_stream(self) -> None:
        """Make what comes next, in any stream of the GPU, come after the last step."""
        if self._memory.buckets is not None:
            self._memory.buckets.wait_for_last_step()

    def mark_stream(self) -> None:
        """Make what comes next, in any stream of the GPU, come after what was enqueued so far."""
        if self._memory.buckets is not None:
            self._memory.buckets.end()

    def mark_stream_of_failure(self) -> None:
        """Make what comes next come after what a call has enqueued that failed."""
        # The first error counts: CUDA may refuse all that follows.
        with contextlib.suppress(Exception):
            self._comm.wait()
            self.mark_stream()

    # -- what outlives a step

    def states(self) -> dict[int, States]:
        """The buckets' states, by rank and parameter: those of a checkpoint until all ranks have agreed on a plan."""
        return {rank: b.states() for rank, b in self.of_ranks.items()} if self.started else self._restored

    def check_states(self, states: dict[int, States]) -> None:
        """Raise ValueError for states that do not fit the parameters."""
        for buckets, kept in self._with_states(self.of_ranks, states) if self.started else ():
            buckets.check(kept)

    def restore(self, states: dict[int, States], capacity: list[int]) -> None:
        """Take the states of a checkpoint; rank 0's parameters are not sent any more."""
        if self.started:
            for buckets, kept in self._with_states(self.of_ranks, states):
                buckets.restore(kept)
            self.check.reset()
        self._restored, self.broadcast_due = {} if self.started else states, False
        if self.capacity:
            self.capacity.restore(capacity)
        else:
            self._restored_capacity = list(capacity)

    def _with_states(
        self, of_ranks: Mapping[int, BucketSet], states: Mapping[int, States]
    ) -> list[tuple[BucketSet, States]]:
        """Return the buckets of each rank with what is known of its states."""
        if not self._comm.ranks.logical:
            # A process that is one rank may have another number than before.
            return list(zip(of_ranks.values(), states.values(), strict=False))
        # Those of a process that is gone are found in the memory of its machine, or are lost, but for the shared ones.
        others = shared(next(iter(states.values()), {}))
        return [
            (buckets, states.get(rank, others))
            for rank, buckets in of_ranks.items()
            if not any(bucket.state for bucket in buckets) or rank in states
        ]

    def restored_names(self) -> set[str]:
        """Names of the parameters of which a checkpoint has a state, until there is a plan."""
        return {name for states in self._restored.values() for arrays in states.values() for name in arrays}


def _lies_in_place(bucket: Bucket) -> bool:
    """Tell if a gradient of the last loss lies where it is packed, or is missing."""
    return bool((bucket.gradients.records["data"] == bucket.own_addresses).any())


def check_apart(comm: Communicator, values: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError, on all ranks, for an array in the memory of another thread's.  Collective."""
    if not isinstance(comm.unwrapped, ThreadCommunicator):
        return
    lengths = [value.nbytes for value in values.values()]
    addresses = np.array([device.address(value) for value in values.values()], np.int64)
    starts = np.stack(comm.unwrapped.all_gather(addresses))
    ends = starts + np.array(lengths, np.int64)
    ranks, rows = np.nonzero(ends > starts)
    starts, ends = starts[ranks, rows], ends[ranks, rows]
    order = np.argsort(starts, kind="stable")
    overlapping = np.flatnonzero(starts[order][1:] < ends[order][:-1])
    if overlapping.size:
        # The first ones in the plan.
        names, at = list(values), min(overlapping, key=lambda k: rows[order[k]])
        first, second = (f"{names[rows[k]]} of rank {ranks[k]}" for k in sorted(order[at : at + 2]))
        text = f"{first} and {second} are in one memory: each rank must make parameters of its own, inside main(comm)"
        raise agreed(ValueError(text), comm.rank == 0)
