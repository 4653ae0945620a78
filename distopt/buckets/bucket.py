"""The memory of a plan: a flat gradient for each bucket, and the state that outlives a step beside it."""

import copy
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from distopt import device, kernels
from distopt.buckets.plan import BucketSpec, Plan, merge
from distopt.device import HUGE_PAGE
from distopt.kernels.dispatch import HostArrays
from distopt.kernels.layout import ArrayMatcher, BucketLayout

Alloc = Callable[[int, Any], np.ndarray]
# state name -> parameter name -> array
States = dict[str, dict[str, np.ndarray]]
# Kept by a bucket: more than one step uses, fewer than a slowly falling density has values.
CONSTANTS = 64


class Shard(NamedTuple):
    """A piece of a bucket's sum."""

    number: int
    of: int
    # of the bucket's size; only this share is valid
    flat: np.ndarray


# The pieces of a bucket's sum.
Reduced = Sequence[Shard]


def unsharded(flat: np.ndarray) -> Reduced:
    """Return a sum that lies in one array."""
    return [Shard(0, 1, flat)]


def sharded(parts: Sequence[np.ndarray]) -> list[Shard]:
    """Return a sum of which each rank has its own share in its own memory, ``parts`` by rank."""
    return [Shard(r, len(parts), flat) for r, flat in enumerate(parts)]


def local_shard(total: Reduced, rank: int, size: int) -> Reduced:
    """Return the part of a sum that one rank applies if each of ``size`` ranks applies its own share."""
    return [Shard(rank, size, total[rank if len(total) > 1 else 0].flat)]


class Allocator(Protocol):
    """Memory that ranks may share: the part of a communicator that buckets use."""

    rank: int
    size: int

    def alloc(self, n: int, dtype: Any) -> np.ndarray:
        """Return memory for ``n`` elements that ``peers`` can share."""

    def register(self, x: np.ndarray) -> None:
        """Tell the network of memory of ``alloc``, which collectives will use."""

    def peers(self, x: np.ndarray) -> list[np.ndarray] | None:
        """Return this array on every rank, by rank; None if other ranks' memory cannot be read directly."""

    def first_of_peers(self, x: np.ndarray) -> np.ndarray | None:
        """Return this array on the first rank; None if other ranks' memory cannot be read directly."""


class Bucket:
    """The flat arrays of one bucket, and the tables by which kernels reach its members."""

    def __init__(
        self, number: int, spec: BucketSpec, shapes: Sequence[tuple[int, ...]], gradient: np.ndarray, bad: np.ndarray
    ):
        # The index in the plan; the flat gradient, `(size,)` of the bucket's dtype; and how many entries of each
        # member's packed gradient are not finite, int64.
        self.number, self.spec, self.gradient, self.bad = number, spec, gradient, bad
        # Where gradients are shared.  peers: every rank's.  lasts: those of the last rank of each process, where sums
        # are written; own: this process's one of these; peer_shards: the shard that each process has summed up.
        self.peers: HostArrays | None = None
        self.lasts, self.own, self.peer_shards = HostArrays(), HostArrays(), list[Shard]()
        # flat arrays that outlive a step, by name: a compressor's residual, for example
        self.state: dict[str, np.ndarray] = {}
        kinds = (spec.stored, spec.stored, spec.dtype, spec.dtype)
        tables = (BucketLayout(spec.names, shapes, spec.offsets, kind) for kind in kinds)
        self.gradients, self.parameters, self.means, self.sums = tables
        self.layout = ArrayMatcher(list(self.views(gradient).values()), spec.stored)
        # of their sums, in the bucket's dtype
        self.wide_layout = ArrayMatcher(list(self.views(gradient).values()))
        offsets = self.gradients.records["offset"] * spec.dtype.itemsize
        # of the members' views
        self.own_addresses = (device.address(gradient) + offsets).astype(np.uintp)
        # whether all gradients lie in the flat array already
        self.in_place = False
        self.largest = float(np.finfo(spec.dtype).max)
        # whether the last pack saw a gradient above the headroom
        self.near_overflow = False
        # None for this one: a cycle would keep its memory until a collection
        self._group: Bucket | None = None
        # a row per rank, the last one for the sum
        self.bad_parts = np.zeros((1, len(spec.names)), np.int64)
        # of what a compressor enqueues on a GPU at every step, by name
        self.recordings: dict[str, device.Recording] = {}
        # the compressor of the last exchange, and the bytes of its payload; None if they depend on the data
        self.payload: tuple[object, int | None] = (None, None)
        self._scratch: dict[str, list[np.ndarray]] = {}
        self._constants: dict[str, device.DeviceMirror] = {}

    @property
    def group(self) -> "Bucket":
        """The bucket of ``BucketSet.groups`` that it is part of; else itself."""
        return self if self._group is None else self._group

    def views(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return the members' parts of a flat array of this bucket, by name, in their shapes."""
        return {name: self.gradients.view(flat, row) for row, name in enumerate(self.spec.names)}

    def views_of(self, names: Container[str], flat: np.ndarray) -> list[np.ndarray]:
        """Return these members' parts of a flat array of this bucket."""
        return [view for name, view in self.views(flat).items() if name in names]

    def state_array(self, state: str) -> np.ndarray:
        """Return a flat array that outlives the step, zeros at first."""
        if state not in self.state:
            self.state[state] = device.persistent_zeros(self.spec.size, self.spec.dtype, self.gradient)
        return self.state[state]

    def scratch(self, name: str, nbytes: int) -> np.ndarray:
        """Return scratch memory of so many bytes, the same at every step until more are wanted."""
        # Memory that has become too small is not freed: a stream of a GPU other than the one it would go back to may
        # still use it.
        pieces = self._scratch.setdefault(name, [])
        if not pieces or pieces[-1].size < nbytes:
            room = max(nbytes, 2 * pieces[-1].size if pieces else 0)
            pieces.append(device.persistent_zeros(room, np.uint8, self.gradient))
        return pieces[-1][:nbytes]

    def constant(self, name: str, make: Callable[[], np.ndarray]) -> device.DeviceMirror:
        """Return a few numbers for kernels on either side; ``make`` is called if they were not asked for lately."""
        mirror = self._constants.pop(name, None) or device.DeviceMirror(make())
        # It is the most recently used one.
        self._constants[name] = mirror
        if len(self._constants) > CONSTANTS:
            del self._constants[next(iter(self._constants))]
        return mirror

    def point_to_gradients(self, addresses: np.ndarray) -> None:
        """Point the table of gradients to these addresses; a missing one, at 0, is zeros."""
        missing = (addresses == 0).nonzero()[0].tolist()
        self.gradients.records["data"] = addresses
        for row in missing:
            self.gradients.records["data"][row] = self.own_addresses[row]
            device.clear(self.gradients.view(self.gradient, row))
        self.in_place = bool(((addresses == self.own_addresses) | (self.gradients.records["size"] == 0)).all())

    def pack(self, check_in_place: bool, scale: float = 1.0, headroom: float = 1.0) -> None:
        """Copy the gradients, times ``scale``, to the flat array, unless they are there already and ``scale`` is 1."""
        # `bad` grows by the number of entries that are not finite.  On the host `near_overflow` becomes whether a
        # gradient times `headroom` is not finite: one pass finds both, and a second pass tells them apart if there is
        # one.
        if check_in_place or not self.in_place or scale != 1.0:
            kernels.pack(self.gradients, self.gradient, scale, self.bad, self.largest / headroom)
        rows = self.bad.nonzero()[0].tolist() if headroom > 1 else []
        self.near_overflow = bool(rows)
        for row in rows:
            self.bad[row] = np.count_nonzero(~np.isfinite(self.gradients.view(self.gradient, row)))

    def mean(self, total: Reduced, scale: float) -> dict[str, np.ndarray]:
        """Return ``scale`` times a sum, by name; in place, unless other ranks may still read the sum."""
        return self.views(self.flat_mean(total, scale))

    def flat_mean(self, total: Reduced, scale: float) -> np.ndarray:
        """Return ``scale`` times a sum as one flat array; in place, unless other ranks may still read the sum."""
        if len(total) == 1:
            flat = total[0].flat
        else:
            flat = self.scratch("mean", self.spec.nbytes).view(self.spec.dtype)
        self.means.point_to(list(self.views(flat).values()))
        for piece in total:
            kernels.unpack(self.means.shard(piece.number, piece.of), piece.flat, scale)
        return flat


class BucketSet(list[Bucket]):
    """All buckets of a plan; their gradients lie in one piece of memory."""

    def __init__(
        self,
        plan: Plan,
        values: Mapping[str, np.ndarray],
        alloc: Alloc,
        state: Callable[[int], dict[str, np.ndarray]] = lambda number: {},
    ):
        # state: makes, or finds, what outlives a step of the bucket of this number.
        starts, members = _starts(plan.buckets), sum(len(b.names) for b in plan.buckets)
        self.memory = alloc(max(1, starts[-1]), np.uint8)
        # per member of all buckets; the last number is of all ranks
        self.bad = device.zeros(members + 1, np.int64, self.memory)
        self._last_step = device.StreamEvent() if device.on_gpu(self.memory) else None
        # in plan order
        self._shapes = {name: value.shape for name, value in values.items()}
        self.num_parameters = len(self._shapes)
        # whether every rank can read the gradients of all
        self.shared = False
        # Of parameters, if they are shared: their views by name, the memory, and the part of it of each one's bucket.
        self.parameters: dict[str, np.ndarray] = {}
        self._shared_memory = self.memory[:0]
        self._flat_parameters: dict[str, np.ndarray] = {}
        # by rank; empty if not shared, None before
        self._halves: list[np.ndarray] | None = None
        self._cut(plan, starts)
        for bucket in self:
            bucket.state = state(bucket.number)

    def _cut(self, plan: Plan, starts: list[int]) -> None:
        """Make the buckets, which begin at ``starts``, in bytes of the common memory."""
        self.plan, self._starts = plan, starts
        members = np.cumsum([0, *(len(b.names) for b in plan.buckets)]).tolist()
        self[:] = [
            Bucket(k, b, [self._shapes[n] for n in b.names], flat, self.bad[members[k] : members[k + 1]])
            for k, (b, flat) in enumerate(zip(plan.buckets, self._flats(self.memory), strict=True))
        ]
        self._views = {name: v for b in self for name, v in b.views(b.gradient).items()}
        place = {name: k for k, name in enumerate(self._shapes)}
        # each member's index in `values`
        self.places = [np.array([place[n] for n in b.names]) for b in plan.buckets]
        # versions of the arrays that the tables point to
        self._gradients_version = self.parameters_version = -1
        # copies of gradients that lie in the memory of others
        self._copies: dict[int, np.ndarray] = {}
        # None for these ones
        self._groups: BucketSet | None = None
        # the buckets of the plan of which each was merged
        self.runs = [[bucket] for bucket in self]

    @property
    def groups(self) -> "BucketSet":
        """The buckets over the same memory in which gradients are packed, and parameters updated."""
        return self if self._groups is None else self._groups

    def merged(self, nbytes: int) -> "BucketSet":
        """Return larger buckets over the same memory, for work that does not ask where a bucket ends."""
        # Neighbours of one dtype are merged as long as they take up to `nbytes` together; a larger one stays alone.
        # What outlives a step stays with the buckets of the plan.
        runs: list[list[Bucket]] = []
        for bucket in self:
            first = runs[-1][0] if runs else bucket
            end = self._starts[bucket.number] + bucket.spec.nbytes
            fits = end - self._starts[first.number] <= nbytes and first.spec.stored == bucket.spec.stored
            runs[-1:] = [[*runs[-1], bucket]] if runs and fits else [*runs[-1:], [bucket]]
        starts = [self._starts[run[0].number] for run in runs]
        specs = [
            merge([b.spec for b in run], [(self._starts[b.number] - start) // b.spec.dtype.itemsize for b in run])
            for run, start in zip(runs, starts, strict=True)
        ]
        twin = copy.copy(self)
        twin._cut(replace(self.plan, buckets=tuple(specs), payload=()), [*starts, self._starts[-1]])
        twin.runs = runs
        return twin

    def group(self, nbytes: int) -> None:
        """Make ``groups`` of ``merged(nbytes)``: for a GPU, where every launch costs the host's time."""
        self._groups = self.merged(nbytes)
        for group, run in zip(self._groups, self._groups.runs, strict=True):
            for bucket in run:
                bucket._group = group

    def grouped(self, sums: Iterable[Reduced]) -> tuple["BucketSet", Iterable[Reduced]]:
        """Return ``groups`` and their sums, if each bucket's sum lies where its gradient was; else these buckets'."""
        if self._groups is None:
            return self, sums
        sums = list(sums)
        in_place = [len(total) == 1 and total[0].flat is b.gradient for b, total in zip(self, sums, strict=True)]
        if all(in_place):
            return self._groups, [unsharded(group.gradient) for group in self._groups]
        return self, sums

    def wait_for_last_step(self) -> None:
        """Make the current stream wait for the last step, on whatever stream of a GPU that was enqueued."""
        if self._last_step:
            self._last_step.wait()

    def end(self) -> None:
        """Mark the end of a step, after all of it has been enqueued."""
        if self._last_step:
            self._last_step.record()

    def wait_for_last_use(self, poll: Callable[[], None]) -> None:
        """Wait until the current stream is done with this memory; ``poll`` is called meanwhile, and may raise."""
        device.wait_for_last_use(self.memory, poll)

    def _flats(self, memory: np.ndarray) -> list[np.ndarray]:
        """Return the buckets' flat arrays in such a piece of memory."""
        return [memory[s : s + b.nbytes].view(b.dtype) for s, b in zip(self._starts, self.plan.buckets, strict=False)]

    def view(self, name: str) -> np.ndarray:
        """Return the place of a parameter's gradient in its bucket, in the parameter's shape."""
        return self._views[name]

    def connect(self, comm: Allocator, memories: tuple[list[np.ndarray], list[np.ndarray]] | None) -> None:
        """Register the gradients; ``memories``: of all ranks, and of the last one of each process, if shared.  Once."""
        comm.register(self.memory)
        for k, bucket in enumerate(self):
            if memories is not None:
                bucket.peers, bucket.lasts = (HostArrays(self._flats(m)[k] for m in of) for of in memories)
                bucket.own, bucket.peer_shards = HostArrays([bucket.lasts[comm.rank]]), sharded(bucket.lasts)
                bucket.bad_parts = np.zeros((len(bucket.peers) + 1, len(bucket.spec.names)), np.int64)
        self.shared = memories is not None

    def share_halves(self, comm: Allocator) -> bool:
        """Make room for the 16-bit numbers that all ranks read; False if memory is not shared.  Collective, once."""
        if self._halves is None:
            memories = comm.peers(comm.alloc(self.memory.size, np.uint8))
            self._halves = memories or []
        return bool(self._halves)

    def halves(self, bucket: Bucket, dtype: np.dtype) -> list[np.ndarray]:
        """Return a bucket's 16-bit arrays of all ranks, by rank."""
        start = self._starts[bucket.number]
        end = start + bucket.spec.size * dtype.itemsize
        return [memory[start:end].view(dtype) for memory in self._halves or ()]

    def share_parameters(self, comm: Allocator) -> bool:
        """Place all parameters in the first rank's memory; False if memory is not shared.  Collective."""
        # Ranks that share them already keep them where they are; others share them too from then on.
        memory = comm.first_of_peers(self._shared_memory if self.parameters else comm.alloc(self.memory.size, np.uint8))
        if self.parameters:
            return True
        if memory is None:
            return False
        self._shared_memory, flats = memory, self._flats(memory)
        self.parameters = {n: v for b, flat in zip(self, flats, strict=True) for n, v in b.views(flat).items()}
        self._flat_parameters = {n: flat for b, flat in zip(self, flats, strict=True) for n in b.spec.names}
        self.parameters_version = -1
        return True

    def adopt_parameters(self, previous: "BucketSet") -> None:
        """Take over the memory in which other ranks have shared the parameters of the same plan."""
        # It outlives the rank that has allocated it.
        self.parameters, self._flat_parameters = previous.parameters, previous._flat_parameters
        self._shared_memory = previous._shared_memory

    def flat_parameters(self, members: BucketLayout) -> np.ndarray:
        """Return the shared memory of a bucket's parameters, or of a section of them, as a flat array of its layout."""
        return members.part_of(self._flat_parameters[members.names[0]])

    def try_point_to(self, number: int, grads: Sequence[Any]) -> bool:
        """Point a bucket's table to these gradients; return False, and change nothing, if they must be copied first."""
        bucket = self[number]
        addresses = bucket.layout.addresses(grads)
        if addresses is None or self.in_other_views(addresses, bucket.own_addresses).any():
            return False
        bucket.point_to_gradients(addresses)
        self._gradients_version = -1
        return True

    def in_other_views(self, addresses: np.ndarray, home: Any) -> np.ndarray:
        """Tell which addresses lie in these buckets, but in another gradient's view than ``home``; (n,), bool."""
        start = device.address(self.memory)
        inside = (addresses >= start) & (addresses < start + self.memory.nbytes)
        foreign: np.ndarray = inside & (addresses != home)
        return foreign

    def point_to_gradients(
        self, grads: Sequence[np.ndarray | None], addresses: np.ndarray, version: int, sent: int = 0
    ) -> None:
        """Point the tables to these gradients, in plan order; one that is None, at address 0, is zeros."""
        # version: changes when an array changes.
        # sent: the number of buckets, from the first on, that are on their way already.
        if version != self._gradients_version:
            same_next = 0 not in addresses
            addresses = self._untangled(grads, addresses, sent)
            for bucket, places in zip(self, self.places, strict=True):
                bucket.point_to_gradients(addresses[places])
            # Copies and zeros are made anew at every step.
            self._gradients_version = version if same_next and not self._copies else -1

    def point_to_parameters(self, addresses: np.ndarray, version: int) -> None:
        """Point the tables to the parameters at these addresses, in plan order."""
        for name, address in zip(self._shapes, addresses, strict=True) if self.parameters else ():
            shared = self.parameters[name]
            if shared.size and device.address(shared) != address:
                raise ValueError(
                    f"{name}: data must be the array that parameter_views returned for it, got another one"
                )
        for bucket, places in zip(self, self.places, strict=True):
            bucket.parameters.records["data"] = addresses[places]
        self.parameters_version = version

    def _untangled(self, grads: Sequence[np.ndarray | None], addresses: np.ndarray, sent: int) -> np.ndarray:
        """Return the addresses; a gradient in the memory of another, which packing would overwrite, is copied first."""
        home = np.empty_like(addresses)
        for bucket, places in zip(self, self.places, strict=True):
            home[places] = bucket.own_addresses
        overlapping = self.in_other_views(addresses, home).nonzero()[0].tolist()
        sent_until = device.address(self.memory) + self._starts[sent]
        for k in overlapping:
            if addresses[k] < sent_until:
                raise ValueError(
                    f"{list(self._shapes)[k]}: the gradient must be an array of its own, got the view of another "
                    "parameter, which was sent already; copy it"
                )
        self._copies = {k: device.copied(grads[k]) for k in overlapping}
        if self._copies:
            addresses = addresses.copy()
            addresses[list(self._copies)] = [device.address(c) for c in self._copies.values()]
        return addresses

    def nonfinite(self) -> dict[str, str]:
        """Return the names of packed gradients that are not finite, with a text on how many entries are not."""
        bad = device.host_copy(self.bad) if device.on_gpu(self.bad) else self.bad
        if not np.count_nonzero(bad):
            return {}
        members = ((name, size) for b in self.plan.buckets for name, size in zip(b.names, b.sizes, strict=True))
        counts = zip(members, bad.tolist(), strict=False)
        return {name: f"{count} of {size} entries" for (name, size), count in counts if count}

    def states(self) -> States:
        """Return views of the state that outlives a step, by state and parameter."""
        states: States = {}
        for bucket in self:
            for state, flat in bucket.state.items():
                states.setdefault(state, {}).update(bucket.views(flat))
        return states

    def check(self, states: States) -> None:
        """Raise ValueError for the state of an unknown parameter, or of another shape or dtype."""
        for state, arrays in states.items():
            for name, a in arrays.items():
                if name not in self._views:
                    raise ValueError(f"names in state {state} must be those of parameters, got {name!r}")
                view = self._views[name]
                if a.shape != view.shape:
                    raise ValueError(f"state {state} of {name} must be of shape {view.shape}, got {a.shape}")
                if a.dtype != view.dtype:
                    raise ValueError(f"state {state} of {name} must be of dtype {view.dtype}, got {a.dtype}")

    def restore(self, states: States) -> None:
        """Replace the state that outlives a step by ``states``, from another plan or from a checkpoint."""
        for bucket in self:
            bucket.state.clear()
            for state, arrays in states.items():
                for name in arrays.keys() & set(bucket.spec.names):
                    device.copy(bucket.views(bucket.state_array(state))[name], arrays[name])


def _starts(buckets: Sequence[BucketSpec]) -> list[int]:
    """Return the start of each bucket in the common memory, in bytes, and the end; large ones at multiples of 2 MiB."""
    starts = [0]
    for b in buckets:
        align = HUGE_PAGE if b.nbytes >= HUGE_PAGE else 64
        starts[-1] = -(-starts[-1] // align) * align
        starts.append(starts[-1] + b.nbytes)
    return starts
