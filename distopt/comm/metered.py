"""Communicator that counts the bytes of another one, by a ``Meter`` into a ``Ledger``; the only one that counts."""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from distopt.comm.communicator import Communicator, Ragged, Wrapper
from distopt.comm.ledger import KEEP, Ledger
from distopt.comm.message import MessageTag
from distopt.comm.meter import Meter


class Metered(Wrapper):
    """Communicator that counts the messages of another one in a ledger.

    *Payload* bytes are measured: the size of this rank's argument.  *Wire* bytes follow from the formulas of
    ``distopt.comm.byte_counts``.  These are exact for this rank where distopt or NCCL determines the routes: gathers,
    all-to-alls, reduce-scatters, sums of 16-bit numbers and sums with ``deterministic=True`` go directly from each rank
    to each other one, NCCL's collectives along a ring.  An MPI library chooses how it broadcasts, and how it adds up
    other dtypes; there the formula is the least that all ranks together need, and some may send several times as much.
    Votes (72 bytes a step) are not counted, nor are the headers of a transport and the lengths that a ragged collective
    exchanges.

    Messages of steps are counted separately from all others (``Ledger.total_of_steps``, ``Ledger.report``).  A script
    that sums up gradients itself can count them as a step's:
    ``with comm.tagged(MessageTag("gradients", step)): comm.all_reduce(gradient)``.

    Args:
        comm: the communicator.
        keep: number of entries that the ledger keeps.

    Attributes:
        ledger: the ledger.

    Example:
        >>> import numpy as np
        >>> from distopt.comm import Metered, run_ranks
        >>> def main(comm):
        ...     meter = Metered(comm)
        ...     meter.all_reduce(np.ones(4, np.float32))
        ...     return meter.report()
        >>> run_ranks(2, main)[0]
        {'other all_reduce': {'calls': 1, 'payload': 16, 'wire': 16}}
    """

    def __init__(self, comm: Communicator, keep: int = KEEP):
        super().__init__(comm)
        self.ledger = Ledger(keep)
        self._writer: tuple[int, Meter] | None = None  # an epoch, and the writer of its ranks

    def around(self, comm: Communicator) -> "Metered":
        """Return a meter of another communicator of this rank, with the same ledger."""
        duplicate = Metered(comm)
        duplicate.ledger = self.ledger
        return duplicate

    @property
    def _meter(self) -> Meter:
        """The writer for the ranks of this epoch."""
        if self._writer is None or self._writer[0] != self.epoch:
            self._writer = self.epoch, Meter(self.rank, self.size, self.hosts, self.algorithm, self.ledger)
        return self._writer[1]

    @contextlib.contextmanager
    def tagged(self, tag: MessageTag) -> Iterator[None]:
        with self._meter.tagged(tag), self.comm.tagged(tag):
            yield

    def all_reduce(self, x: np.ndarray, op: str = "sum") -> None:
        self.comm.all_reduce(x, op)
        self._meter.all_reduce(x.size, x.itemsize)

    def all_gather(self, x: np.ndarray, ragged: Ragged = False, into: np.ndarray | None = None) -> list[np.ndarray]:
        parts = self.comm.all_gather(x, ragged, into)
        self._meter.all_gather([part.nbytes for part in parts], self._meter.breakdown(x))
        return parts

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: Ragged = False) -> list[np.ndarray]:
        received = self.comm.all_to_all(parts, ragged)
        breakdown = self._meter.breakdown(parts[self.rank]) if self._meter.knows_breakdown else None
        self._meter.all_to_all([part.nbytes for part in parts], [part.nbytes for part in received], breakdown)
        return received

    def reduce_scatter(self, x: np.ndarray, op: str = "sum") -> np.ndarray:
        part = self.comm.reduce_scatter(x, op)
        self._meter.reduce_scatter(x.size, x.itemsize)
        return part

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        self.comm.broadcast(x, root)
        self._meter.broadcast(x.size, x.itemsize, root)

    def lengths(self, n: int) -> list[int]:
        lengths = self.comm.lengths(n)
        self._meter.lengths()
        return lengths

    def count_all_reduce(self, x: np.ndarray) -> None:
        self.comm.count_all_reduce(x)
        self._meter.all_reduce(x.size, x.itemsize)

    def report(self) -> dict[str, dict[str, int]]:
        """Return calls and bytes since the start or the last ``reset``, in the form of ``Ledger.report``."""
        return self.ledger.report()

    def reset(self) -> None:
        """Drop all entries and sums of the ledger."""
        self.ledger.clear()

    def moved_to(self, comm: Communicator) -> Communicator:
        """Return a meter of another communicator of this rank, with the same ledger and a separate tag."""
        return self.around(comm)
