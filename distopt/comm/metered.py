"""Count the bytes of a communicator, by wrapping it."""

import contextlib
import copy
from collections.abc import Iterator, Sequence

import numpy as np

from distopt.comm.communicator import Communicator, Wrapper
from distopt.comm.meter import Meter
from distopt.ledger import KEEP, Ledger, Purpose
from distopt.tables import Members


class Metered(Wrapper):
    """A communicator with a ``ledger``, in which every message is an entry; the last ``keep`` of them stay.

    *Payload* is measured: what this rank handed to the collective.  *Wire* is by formula (``cost.wire``).  That is
    exact for this rank where distopt or NCCL says who sends what: gathers, all-to-alls, reduce-scatters, sums of
    halves and those of ``deterministic=True`` go straight from each rank to each other one, NCCL's along a ring.  How
    an MPI library broadcasts, or adds up other dtypes, is its own choice: there the formula is the least that all ranks
    together need, and some may send several times as much.  Not counted are votes (72 bytes a step), and
    what a transport adds: headers, and the lengths that a ragged verb needs.

    Bytes of steps and all others are told apart (``Ledger.total_of_steps``, ``Ledger.report``).  A script that sums up
    gradients by itself says so: ``with comm.on_behalf_of(Purpose("gradients", step)): comm.all_reduce(gradient)``.
    """

    def __init__(self, comm: Communicator, keep: int = KEEP):
        super().__init__(comm)
        self.ledger = Ledger(keep)
        self._meter = Meter(self.rank, self.size, self.hosts, self.algorithm, self.ledger)

    def around(self, comm: Communicator) -> "Metered":
        """Meter another communicator of the same ranks, with the same ledger."""
        twin = Metered(comm)
        twin.ledger = twin._meter.ledger = self.ledger
        return twin

    @contextlib.contextmanager
    def on_behalf_of(self, purpose: Purpose) -> Iterator[None]:
        """Count all messages of this context with a phase, a step and a bucket."""
        with self._meter.on_behalf_of(purpose), self.comm.on_behalf_of(purpose):
            yield

    def all_reduce(self, x: np.ndarray) -> None:  # noqa: D102
        self.comm.all_reduce(x)
        self._meter.all_reduce(x.size, x.itemsize)

    def all_gather(  # noqa: D102
        self, x: np.ndarray, ragged: bool = False, into: np.ndarray | None = None
    ) -> list[np.ndarray]:
        parts = self.comm.all_gather(x, ragged, into)
        self._meter.all_gather([part.nbytes for part in parts], self._meter.look(x))
        return parts

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: bool = False) -> list[np.ndarray]:  # noqa: D102
        got = self.comm.all_to_all(parts, ragged)
        self._meter.all_to_all([part.nbytes for part in parts], [part.nbytes for part in got])
        return got

    def reduce_scatter(self, x: np.ndarray) -> np.ndarray:  # noqa: D102
        part = self.comm.reduce_scatter(x)
        self._meter.reduce_scatter(x.size, x.itemsize)
        return part

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:  # noqa: D102
        self.comm.broadcast(x, root)
        self._meter.broadcast(x.size, x.itemsize, root)

    def lengths(self, n: int) -> list[int]:  # noqa: D102
        found = self.comm.lengths(n)
        self._meter.lengths()
        return found

    def add_parts(self, members: Members, parts: Sequence[np.ndarray], bad: np.ndarray) -> None:
        """Count a sum in shared memory as the all-reduce that it stands for, although nothing goes over a wire."""
        self.comm.add_parts(members, parts, bad)
        own = parts[self.rank]
        self._meter.all_reduce(own.size, own.itemsize)

    def add_half_parts(self, members: Members, parts: Sequence[np.ndarray], total: np.ndarray, scale: float) -> None:
        """Likewise."""
        self.comm.add_half_parts(members, parts, total, scale)
        own = parts[self.rank]
        self._meter.all_reduce(own.size, own.itemsize)

    def report(self) -> dict[str, dict[str, int]]:
        """Calls and bytes since the start or the last ``reset``, steps' and others apart, as in ``Ledger.report``."""
        return self.ledger.report()

    def reset(self) -> None:
        """Start counting anew."""
        self.ledger.clear()

    def _duplicate(self) -> Communicator:
        twin = super()._duplicate()
        twin._meter = copy.copy(self._meter)  # type: ignore[attr-defined]  # the same ledger, a purpose of its own
        return twin
