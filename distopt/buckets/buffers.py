"""The memory of a plan: a flat gradient per bucket, and what outlives a step beside it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from distopt import device, kernels
from distopt.buckets.piece import Sum
from distopt.buckets.plan import Bucket, Plan
from distopt.device import HUGE_PAGE
from distopt.tables import Layout, Members

Alloc = Callable[[int, Any], np.ndarray]
States = dict[str, dict[str, np.ndarray]]  # state name -> parameter name -> array
CONSTANTS = 64  # that a bucket keeps: more than a step asks for, and fewer than a density that falls slowly has values


class Wire(Protocol):
    """What buffers ask of a communicator."""

    size: int

    def alloc(self, n: int, dtype: Any) -> np.ndarray:
        """Memory that ``peers`` can share."""

    def peers(self, x: np.ndarray) -> list[np.ndarray] | None:
        """The same array on every rank, if it can be read directly."""


class Buffer:
    """One bucket's flat arrays, and the tables by which kernels reach its members."""

    def __init__(
        self, number: int, bucket: Bucket, shapes: Sequence[tuple[int, ...]], gradient: np.ndarray, bad: np.ndarray
    ):
        self.number, self.bucket, self.gradient, self.bad = number, bucket, gradient, bad
        self.peers: list[np.ndarray] | None = None  # every rank's gradient, if they are shared
        self.state: dict[str, np.ndarray] = {}
        kinds = (bucket.stored, bucket.stored, bucket.dtype, bucket.dtype)
        tables = (Members(bucket.names, shapes, bucket.offsets, kind) for kind in kinds)
        self.gradients, self.parameters, self.means, self.sums = tables
        self.layout = Layout(list(self.views(gradient).values()), bucket.stored)
        self.wide_layout = Layout(list(self.views(gradient).values()))  # of their sums
        self.home = (device.address(gradient) + self.gradients.rows["offset"] * bucket.dtype.itemsize).astype(np.uintp)
        self.at_home = False  # do all gradients live here?
        self.largest = float(np.finfo(bucket.dtype).max)
        self.near_overflow = False  # did the last look find a gradient above the headroom that it was asked for?
        self.bad_parts = np.zeros((1, len(bucket.names)), np.int64)  # per rank, and in the last row of the sum
        self._scratch: dict[str, list[np.ndarray]] = {}
        self._constants: dict[str, device.Mirror] = {}

    def views(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """The members' parts of a flat array of this bucket, by name, in their shapes."""
        return {name: self.gradients.view(flat, row) for row, name in enumerate(self.bucket.names)}

    def kept(self, state: str) -> np.ndarray:
        """The flat array that outlives a step, zeros at first."""
        if state not in self.state:
            self.state[state] = device.lasting_zeros(self.bucket.size, self.bucket.dtype, self.gradient)
        return self.state[state]

    def scratch(self, name: str, nbytes: int) -> np.ndarray:
        """Memory of so many bytes, the same at every step until more are wanted.

        What has become too small stays: a stream of a GPU other than the one it would go back to may still use it.
        """
        pieces = self._scratch.setdefault(name, [])
        if not pieces or pieces[-1].size < nbytes:
            room = max(nbytes, 2 * pieces[-1].size if pieces else 0)
            pieces.append(device.lasting_zeros(room, np.uint8, self.gradient))
        return pieces[-1][:nbytes]

    def constant(self, name: str, make: Callable[[], np.ndarray]) -> device.Mirror:
        """A few numbers, for kernels on either side, that are made when they have not been asked for lately."""
        found = self._constants.pop(name, None) or device.Mirror(make())
        self._constants[name] = found  # the last
        if len(self._constants) > CONSTANTS:
            del self._constants[next(iter(self._constants))]
        return found

    def take(self, addresses: np.ndarray) -> None:
        """Gradients are at these addresses from now on; a missing one, at 0, is zeros."""
        missing = addresses == 0
        self.gradients.rows["data"] = np.where(missing, self.home, addresses)
        for row in np.flatnonzero(missing).tolist():
            device.clear(self.gradients.view(self.gradient, row))
        self.at_home = bool(((addresses == self.home) | (self.gradients.rows["size"] == 0)).all())

    def pack(self, look_at_home: bool, scale: float = 1.0, headroom: float = 1.0) -> None:
        """Bring ``scale`` times the gradients to their places, unless they live there as they are.

        ``bad`` grows by what is not finite.  On the host ``near_overflow`` becomes whether a gradient, times
        ``headroom``, is not finite: one pass finds both, and another one tells them apart where there is such a one.
        """
        if look_at_home or not self.at_home or scale != 1.0:
            kernels.pack(self.gradients, self.gradient, scale, self.bad, self.largest / headroom)
        self.near_overflow = headroom > 1 and bool(np.count_nonzero(self.bad))  # a third of the time of any()
        if self.near_overflow:
            for row in np.flatnonzero(self.bad).tolist():
                self.bad[row] = np.count_nonzero(~np.isfinite(self.gradients.view(self.gradient, row)))

    def mean(self, total: Sum, scale: float) -> dict[str, np.ndarray]:
        """``scale`` times a sum, by name; in place, unless other ranks may still read it."""
        return self.views(self.flat_mean(total, scale))

    def flat_mean(self, total: Sum, scale: float) -> np.ndarray:
        """The same in one flat array."""
        if len(total) == 1:
            flat = total[0].flat
        else:
            flat = self.scratch("mean", self.bucket.nbytes).view(self.bucket.dtype)
        self.means.point_to(list(self.views(flat).values()))
        for piece in total:
            kernels.unpack(self.means.share(piece.number, piece.of), piece.flat, scale)
        return flat


class Buffers:
    """All buckets of a plan; their gradients lie in one piece of memory."""

    def __init__(self, plan: Plan, values: Mapping[str, np.ndarray], alloc: Alloc):
        self.plan = plan
        self._starts = _starts(plan.buckets)
        self._memory = alloc(max(1, self._starts[-1]), np.uint8)
        members = np.cumsum([0, *(len(b.names) for b in plan.buckets)]).tolist()
        self.bad = device.zeros(members[-1] + 1, np.int64, self._memory)  # per member; the last number is of all ranks
        self._turn = device.Order() if device.on_gpu(self._memory) else None
        self._buffers = [
            Buffer(k, b, [values[n].shape for n in b.names], flat, self.bad[members[k] : members[k + 1]])
            for k, (b, flat) in enumerate(zip(plan.buckets, self._flats(self._memory), strict=True))
        ]
        self._views = {name: v for b in self for name, v in b.views(b.gradient).items()}
        self._order = tuple(values)
        place = {name: k for k, name in enumerate(self._order)}
        self.places = [np.array([place[n] for n in b.names]) for b in plan.buckets]  # of its members in the order
        self._gradients_version = self._parameters_version = -1  # of the arrays that the tables point to
        self._copies: dict[int, np.ndarray] = {}  # of gradients that lie in the memory of others
        self.parameters: dict[str, np.ndarray] = {}  # that all ranks share, if they do
        self._halves: list[np.ndarray] | None = None  # of all ranks; none if they are not shared, None before they are

    def follow(self) -> None:
        """What follows comes behind the last step, whatever stream of a GPU that was in."""
        if self._turn:
            self._turn.follow()

    def end(self) -> None:
        """All of a step has been enqueued."""
        if self._turn:
            self._turn.mark()

    def last_read(self, look: Callable[[], None]) -> None:
        """As ``device.last_read``, of all memory of these buffers."""
        device.last_read(self._memory, look)

    def _flats(self, memory: np.ndarray) -> list[np.ndarray]:
        """The buckets' flat arrays in such a piece of memory."""
        return [memory[s : s + b.nbytes].view(b.dtype) for s, b in zip(self._starts, self.plan.buckets, strict=False)]

    def __len__(self) -> int:
        """Parameters."""
        return len(self._views)

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self._buffers)

    def view(self, name: str) -> np.ndarray:
        """Where a parameter's gradient lives."""
        return self._views[name]

    @property
    def shared(self) -> bool:
        """Can every rank read the gradients of all?"""
        return all(b.peers is not None for b in self)

    def connect(self, wire: Wire) -> None:
        """Look whether the gradients of other ranks can be read from here; collective, once."""
        memories = wire.peers(self._memory) if wire.size > 1 else None
        for k, buffer in enumerate(self):
            buffer.peers = None if memories is None else [self._flats(m)[k] for m in memories]
            buffer.bad_parts = np.zeros((len(memories or ()) + 1, len(buffer.bucket.names)), np.int64)

    def share_halves(self, wire: Wire) -> bool:
        """Make room for the 16-bit numbers that all ranks read; collective, once; False if that cannot be."""
        if self._halves is None:
            memories = wire.peers(wire.alloc(self._memory.size, np.uint8))
            self._halves = memories or []
        return bool(self._halves)

    def halves(self, buffer: Buffer, dtype: np.dtype) -> list[np.ndarray]:
        """Those of a bucket, per rank."""
        start = self._starts[buffer.number]
        end = start + buffer.bucket.size * dtype.itemsize
        return [memory[start:end].view(dtype) for memory in self._halves or ()]

    def share_parameters(self, wire: Wire) -> bool:
        """Make room for all ranks' parameters in the first rank's memory; collective; False if that cannot be."""
        own = wire.alloc(self._memory.size, np.uint8)
        memories = wire.peers(own)
        if memories is None:
            return False
        flats = self._flats(memories[0])
        self.parameters = {n: v for b, flat in zip(self, flats, strict=True) for n, v in b.views(flat).items()}
        self._parameters_version = -1
        return True

    def take(self, number: int, grads: Sequence[Any]) -> bool:
        """Gradients of one bucket are these from now on; False if they cannot be packed as they are."""
        buffer = self._buffers[number]
        addresses = buffer.layout.addresses(grads)
        if addresses is None or self.strange(addresses, buffer.home).any():
            return False
        buffer.take(addresses)
        self._gradients_version = -1
        return True

    def strange(self, addresses: np.ndarray, home: Any) -> np.ndarray:
        """Which of these lie in the memory of another gradient."""
        start = device.address(self._memory)
        inside = (addresses >= start) & (addresses < start + self._memory.nbytes)
        found: np.ndarray = inside & (addresses != home)
        return found

    def point_to_gradients(
        self, grads: Sequence[np.ndarray | None], addresses: np.ndarray, version: int, sent: int = 0
    ) -> None:
        """Gradients, in plan order, are these arrays from now on; one that is None is zeros.

        The first ``sent`` buckets are on their way already: ValueError for a gradient that lies in the memory of one of
        them and is another parameter's.
        """
        if version != self._gradients_version or (addresses == 0).any():
            addresses = self._untangled(grads, addresses, sent)
            for buffer, places in zip(self, self.places, strict=True):
                buffer.take(addresses[places])
            self._gradients_version = -1 if self._copies else version  # copies are made anew at every step

    def point_to_parameters(self, addresses: np.ndarray, version: int) -> None:
        """Parameters, in plan order, are at these addresses from now on; if they are shared, at no others."""
        if version != self._parameters_version:
            for name, address in zip(self._order, addresses, strict=True) if self.parameters else ():
                shared = self.parameters[name]
                if shared.size and device.address(shared) != address:
                    raise ValueError(f"{name}: its data must be the array that parameter_views returned for it")
            for buffer, places in zip(self, self.places, strict=True):
                buffer.parameters.rows["data"] = addresses[places]
            self._parameters_version = version

    def _untangled(self, grads: Sequence[np.ndarray | None], addresses: np.ndarray, sent: int) -> np.ndarray:
        """The addresses, but of a copy for a gradient in the memory of another one, which packing would overwrite."""
        home = np.empty_like(addresses)
        for buffer, places in zip(self, self.places, strict=True):
            home[places] = buffer.home
        strange = np.flatnonzero(self.strange(addresses, home)).tolist()
        gone = device.address(self._memory) + self._starts[sent]
        for k in strange:
            if addresses[k] < gone:
                raise ValueError(f"{self._order[k]}: its gradient lies in the view of another, which was sent already")
        self._copies = {k: device.copied(grads[k]) for k in strange}
        if self._copies:
            addresses = addresses.copy()
            addresses[list(self._copies)] = [device.address(c) for c in self._copies.values()]
        return addresses

    def nonfinite(self) -> str:
        """Which of the packed gradients are not finite, '' if all are."""
        bad = device.host_copy(self.bad) if device.on_gpu(self.bad) else self.bad
        if not np.count_nonzero(bad):
            return ""
        members = ((name, size) for b in self.plan.buckets for name, size in zip(b.names, b.sizes, strict=True))
        found = zip(members, bad.tolist(), strict=False)
        return ", ".join(f"{name} ({count} of {size} entries)" for (name, size), count in found if count)

    def states(self) -> States:
        """What outlives a step, as views, cut by parameter."""
        found: States = {}
        for buffer in self:
            for state, flat in buffer.state.items():
                found.setdefault(state, {}).update(buffer.views(flat))
        return found

    def check(self, states: States) -> None:
        """ValueError for the state of a parameter that is not here, or is of another shape or dtype."""
        for state, arrays in states.items():
            for name, a in arrays.items():
                if name not in self._views:
                    raise ValueError(f"state {state} of {name} has shape {a.shape}; here is no such parameter")
                here = self._views[name]
                if a.shape != here.shape:
                    raise ValueError(f"state {state} of {name} has shape {a.shape}; here is shape {here.shape}")
                if a.dtype != here.dtype:
                    raise ValueError(f"state {state} of {name} has dtype {a.dtype}; here is {here.dtype}")

    def copied_states(self) -> list[dict[str, np.ndarray]]:
        """What outlives a step, per bucket, for ``put_back``."""
        return [{state: device.copied(flat) for state, flat in buffer.state.items()} for buffer in self]

    def put_back(self, copies: list[dict[str, np.ndarray]]) -> None:
        """Let what outlives a step be as it was; what was not there then is zeros."""
        for buffer, states in zip(self, copies, strict=True):
            for state, flat in buffer.state.items():
                if state in states:
                    device.copy(flat, states[state])
                else:
                    device.clear(flat)

    def restore(self, states: States) -> None:
        """Let ``states`` be what outlives a step; they come from another plan, or from a checkpoint."""
        for buffer in self:
            buffer.state.clear()
            for state, arrays in states.items():
                for name, view in buffer.views(buffer.kept(state)).items():
                    if name in arrays:
                        device.copy(view, arrays[name])


def _starts(buckets: Sequence[Bucket]) -> list[int]:
    """Where each bucket starts in the memory of all, in bytes, and its end: large ones at multiples of 2 MiB."""
    starts = [0]
    for b in buckets:
        align = HUGE_PAGE if b.nbytes >= HUGE_PAGE else 64
        starts[-1] = -(-starts[-1] // align) * align
        starts.append(starts[-1] + b.nbytes)
    return starts
