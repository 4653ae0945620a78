"""Steps that are made again, by the ranks that are left, when one is lost."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from distopt import device
from distopt.buckets import Bucket
from distopt.comm import Communicator
from distopt.engine.accumulation import unsent
from distopt.engine.bucket_store import BucketStore
from distopt.engine.parameters import Loss, iterable
from distopt.resilience import job

TELL = 100  # updates from one to the next norm of what would be lost: it costs a pass over it
T = TypeVar("T")


class Once:
    """Make every step once: the job ends with the first rank that is lost."""

    def replayable(self, loss: Loss) -> Loss:
        """Return a loss that can be read again."""
        return loss

    def run(self, operation: Callable[[], T]) -> T:
        """Return what an operation returns that all ranks do together.  Collective."""
        return operation()

    def keep(self, *arrays: np.ndarray) -> None:
        """Remember arrays that are about to change before all ranks have the outcome."""

    def keep_states(self) -> None:
        """Remember what outlives a step, which is about to change before all ranks have its sums."""

    def tell(self, updates: int) -> None:
        """Say from time to time, where the launcher can read it, what would be lost with this rank."""


class Copies:
    """Copies of arrays that are about to change, in memory that is used again.

    Example:
        >>> x, copies = np.ones(3), Copies()
        >>> copies.keep(x)
        >>> x[:] = 2
        >>> copies.put_back()
        >>> x
        array([1., 1., 1.])
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[int, int], np.ndarray] = {}  # by the address and the bytes of what it is a copy of
        self._kept: dict[tuple[int, int], np.ndarray] = {}

    def keep(self, *arrays: np.ndarray) -> None:
        """Copy arrays that were not copied since ``forget``."""
        for array in arrays:
            place = device.address(array), array.nbytes
            if place in self._kept:
                continue
            copy = self._memory.get(place)
            if copy is None or copy.shape != array.shape or copy.dtype != array.dtype:
                self._memory[place] = device.copied(array)
            else:
                device.copy(copy, array)
            self._kept[place] = array

    def put_back(self) -> None:
        """Let the arrays be what they were when they were copied."""
        for place, array in self._kept.items():
            device.copy(array, self._memory[place])

    def forget(self) -> None:
        """Begin anew; the memory stays."""
        self._kept = {}


class Retries(Once):
    """Make a step again if a rank is lost before all have its sums (``comm.Elastic``).

    Until then a step changes counters, residuals, what was accumulated, and gradients that lie in buckets.  These are
    put back, and the plan is made anew for the ranks that are left.

    Args:
        comm: the communicator.
        store: the buckets.
        parts: objects whose attributes a step changes; arrays are not among them.
    """

    def __init__(self, comm: Communicator, store: BucketStore, parts: Iterable[object]):
        self._comm, self._store, self._parts = comm, store, list(parts)
        self._attributes: list[dict[str, Any]] = []
        self._copies = Copies()  # of arrays that a step has changed
        self._undo_states: Callable[[], None] | None = None
        store.before_packing = self._keep_views

    def replayable(self, loss: Loss) -> Loss:
        return loss if isinstance(loss, list | tuple) else Replayed(loss)

    def run(self, operation: Callable[[], T]) -> T:
        self._attributes = [dict(vars(part)) for part in self._parts]
        self._undo_states, due = None, self._store.broadcast_due
        self._copies.forget()

        def undo() -> None:
            for part, attributes in zip(self._parts, self._attributes, strict=True):
                vars(part).clear()
                vars(part).update(attributes)
            if self._undo_states:
                self._undo_states()
            self._copies.put_back()
            self._copies = Copies()  # of another plan, in other memory
            self._store.discard_outcomes()
            self._undo_states, self._store.broadcast_due = None, due

        return self._comm.transaction(operation, undo)

    def keep(self, *arrays: np.ndarray) -> None:
        self._copies.keep(*arrays)

    def keep_states(self) -> None:
        states = [(bucket, dict(bucket.state)) for bucket in self._store.buckets]
        for _, arrays in states:
            self.keep(*arrays.values())

        def undo() -> None:
            for bucket, arrays in states:
                bucket.state.clear()
                bucket.state.update(arrays)

        self._undo_states = undo

    def tell(self, updates: int) -> None:
        if updates % TELL == 0 and job.is_rank():
            held = [x for bucket in self._store.buckets for x in unsent(bucket.state).values()]
            norm = math.sqrt(sum(float(np.vdot(x, x)) for x in map(device.host_copy, held)))
            job.tell(f"its residual (norm {norm:.3g} after step {updates})" if norm else "no residual")

    def _keep_views(self, bucket: Bucket) -> None:
        """Remember gradients that lie in a bucket, where they are about to be summed."""
        if (bucket.gradients.records["data"] == bucket.own_addresses).any():
            self.keep(bucket.gradient)


class Replayed:
    """A loss that gives the pairs of its first reading at every later one, or raises the same error.

    Args:
        loss: a loss that may be read once.
    """

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
