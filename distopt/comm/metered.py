"""Count what goes over the wire, by wrapping the wire."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from distopt import cost
from distopt.comm.communicator import Communicator, Wrapper
from distopt.tables import Members


class Metered(Wrapper):
    """A communicator that counts, per verb, its calls, the payload bytes and the wire bytes.

    *Payload* is measured: what this rank handed to the collective.  *Wire* is by formula (``distopt.cost``): what this
    rank sends when the collective is done by the bandwidth-optimal algorithm.  Votes (48 bytes a step) are not counted.
    """

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        self.calls: Counter[str] = Counter()
        self.payload: Counter[str] = Counter()
        self.wire: Counter[str] = Counter()

    def all_reduce(self, x: np.ndarray) -> None:
        """Counted: the array, and a ring's 2 (P - 1) / P of it."""
        self.comm.all_reduce(x)
        self._count("all_reduce", x.nbytes, cost.all_reduce(x.nbytes, self.size))

    def all_gather(self, x: np.ndarray, ragged: bool = False, into: np.ndarray | None = None) -> list[np.ndarray]:
        """Counted: the array, and a ring's (P - 1) / P of all parts together."""
        parts = self.comm.all_gather(x, ragged, into)
        self._count("all_gather", x.nbytes, cost.all_gather(sum(p.nbytes for p in parts), self.size))
        return parts

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: bool = False) -> list[np.ndarray]:
        """Counted: all parts, and all but the one that stays here."""
        got, total = self.comm.all_to_all(parts, ragged), sum(p.nbytes for p in parts)
        self._count("all_to_all", total, cost.all_to_all(total, parts[self.rank].nbytes))
        return got

    def reduce_scatter(self, x: np.ndarray) -> np.ndarray:
        """Counted: the array, and (P - 1) / P of it."""
        part = self.comm.reduce_scatter(x)
        self._count("reduce_scatter", x.nbytes, cost.reduce_scatter(x.nbytes, self.size))
        return part

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        """Counted: the array, and (P - 1) / P of it."""
        self.comm.broadcast(x, root)
        self._count("broadcast", x.nbytes, cost.broadcast(x.nbytes, self.size))

    def add_parts(self, members: Members, parts: Sequence[np.ndarray], bad: np.ndarray) -> None:
        """Counted as the all-reduce that it stands for, although in shared memory nothing goes over a wire."""
        self.comm.add_parts(members, parts, bad)
        nbytes = parts[self.rank].nbytes
        self._count("all_reduce", nbytes, cost.all_reduce(nbytes, self.size))

    def report(self) -> dict[str, dict[str, int]]:
        """``{verb: {'calls', 'payload', 'wire'}}`` since the start or the last ``reset``, in bytes."""
        return {
            verb: {"calls": n, "payload": self.payload[verb], "wire": self.wire[verb]}
            for verb, n in sorted(self.calls.items())
        }

    def reset(self) -> None:
        """Start counting anew."""
        for counter in (self.calls, self.payload, self.wire):
            counter.clear()

    def _count(self, verb: str, payload: int, wire: int) -> None:
        self.calls[verb] += 1
        self.payload[verb] += payload
        self.wire[verb] += wire
