"""Write a rank's messages into its ledger, one entry for every call of a collective."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from weakref import WeakKeyDictionary

import numpy as np

from distopt.cost import Algorithm, Moved, shares
from distopt.ledger import Anatomy, Entry, Ledger, Look, Purpose, share_out
from distopt.tables import Members


class Meter:
    """The writer of one rank's ledger.

    Args:
        rank, size: whose messages are written, and among how many.
        hosts: where each rank sits, as numbers that are equal for ranks of one machine.
        algorithm: how collectives move bytes, from which those on the wire follow.
        ledger: where entries go.
    """

    def __init__(self, rank: int, size: int, hosts: Sequence[int], algorithm: Algorithm, ledger: Ledger):
        self.rank, self.size, self._algorithm, self.ledger = rank, size, algorithm, ledger
        self._hosts, self._spans = hosts, len(set(hosts)) > 1
        self._now = Purpose()

    @contextlib.contextmanager
    def on_behalf_of(self, purpose: Purpose) -> Iterator[None]:
        """Write all messages of this context with a phase, a step and a bucket."""
        before, self._now = self._now, purpose
        try:
            yield
        finally:
            self._now = before

    def look(self, payload: np.ndarray) -> Look:
        """A function that tells what a gathered payload consists of, once somebody asks."""
        nbytes = payload.nbytes
        return self._now.look(payload) if self._now.look else lambda: Anatomy(nbytes)

    def all_reduce(self, n: int, itemsize: int) -> None:
        """Write an all-reduce of n elements; on the wire are slices, which are added up and sent to all."""
        self._sum("all_reduce", n, itemsize, lambda: self._algorithm.all_reduce(self._slices(n, itemsize), self.rank))

    def reduce_scatter(self, n: int, itemsize: int) -> None:
        """Write a reduce-scatter of n elements; on the wire are all slices but this rank's."""
        parts = self._slices
        self._sum("reduce_scatter", n, itemsize, lambda: self._algorithm.reduce_scatter(parts(n, itemsize), self.rank))

    def broadcast(self, n: int, itemsize: int, root: int) -> None:
        """Write a broadcast of n elements, which all ranks but the last one pass on."""
        nbytes = n * itemsize
        self._sum("broadcast", n, itemsize, lambda: self._algorithm.broadcast(nbytes, self.size, root, self.rank))

    def all_gather(self, sizes: Sequence[int], look: Look) -> None:
        """Write an all-gather of payloads of these ``sizes`` in bytes; ``look`` tells what this rank's consists of."""
        self._write("all_gather", sizes[self.rank], lambda: self._algorithm.all_gather(sizes, self.rank), look)

    def all_to_all(self, sizes: Sequence[int], got: Sequence[int]) -> None:
        """Write an all-to-all of parts of these ``sizes`` in bytes; on the wire are those for other ranks."""
        moved = self._algorithm.all_to_all(sizes, got, self.rank)
        self._write("all_to_all", sum(sizes), lambda: moved, lambda: Anatomy(sum(sizes)), spread=False)

    def lengths(self) -> None:
        """Write an exchange of lengths: 8 bytes, which are no values, to every other rank."""
        moved = self._algorithm.all_gather([8] * self.size, self.rank)
        self._write("lengths", 8, lambda: moved, lambda: Anatomy(0), spread=False)

    def _slices(self, n: int, itemsize: int) -> tuple[int, ...]:
        return shares(n, itemsize, self.size)

    def _sum(self, verb: str, n: int, itemsize: int, moved: Callable[[], Moved]) -> None:
        nbytes = n * itemsize
        self._write(verb, nbytes, moved, lambda: Anatomy(nbytes), n, itemsize)

    def _write(
        self,
        verb: str,
        payload: int,
        moved: Callable[[], Moved],
        look: Look,
        n: int | None = None,
        itemsize: int = 1,
        spread: bool = True,
    ) -> None:
        """Keep only what must be known now: entries are made when somebody asks for them, many at a time."""
        now = self._now._replace(look=None)  # which may hold on to buffers

        def entry() -> Entry:
            to, anatomy = moved(), look()
            members = now.members if spread else None
            parts = () if members is None else parts_of(members, anatomy, n, itemsize)
            between = to.between(self._hosts, self.rank) if self._spans else (0, 0)
            ideal = 8 * payload if anatomy.ideal is None else anatomy.ideal
            values, indices, ideal = int(anatomy.values), int(anatomy.indices), int(ideal)  # a user's may be numpy's
            volume = payload, values, indices, ideal, sum(to.sent), sum(to.received), *between
            return Entry(now.step, now.phase, now.bucket, verb, *volume, members.names if members else (), parts)

        self.ledger.write(entry)


def parts_of(members: Members, anatomy: Anatomy, n: int | None, itemsize: int) -> np.ndarray:
    """The bytes of each member: of a flat array of n elements its own, of entries in proportion to their number."""
    if n == members.extent:
        return whole_parts(members, itemsize)
    counts = members.rows["size"] if anatomy.counts is None else anatomy.counts
    return share_out(anatomy.values + anatomy.indices, counts)


def whole_parts(members: Members, itemsize: int) -> np.ndarray:
    """The bytes of each member, at so many an element: one array for all entries, of which a ledger keeps thousands."""
    known = _whole_parts.setdefault(members, {})
    if itemsize not in known:
        known[itemsize] = members.rows["size"] * itemsize
        known[itemsize].flags.writeable = False
    return known[itemsize]


_whole_parts: WeakKeyDictionary[Members, dict[int, np.ndarray]] = WeakKeyDictionary()
