"""Bytes by formula: what one rank sends and receives in a collective, to and from whom.

``all_reduce``, ``all_gather`` and so on are means over ranks, the same number on all of them, for decisions that all
must take alike.  ``Direct`` and ``Ring`` are exact, rank by rank; both are bandwidth-optimal (Chan et al., "Collective
communication: theory, practice, and experience", 2007, sections 4 and 5).
"""

import abc
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple


def all_reduce(nbytes: int, size: int) -> int:
    """A reduce-scatter and an all-gather, 2 (P - 1) / P of the data each rank holds."""
    return 2 * (size - 1) * nbytes // size


def reduce_scatter(nbytes: int, size: int) -> int:
    """(P - 1) / P of the data each rank holds."""
    return (size - 1) * nbytes // size


def all_gather(total: int, size: int) -> int:
    """(P - 1) / P of the parts of all ranks, ``total`` bytes together."""
    return (size - 1) * total // size


def all_to_all(total: int, own: int) -> int:
    """All parts but the one that stays here."""
    return total - own


def broadcast(nbytes: int, size: int) -> int:
    """Pipelined: every rank but the last passes the data on once."""
    return (size - 1) * nbytes // size


class Moved(NamedTuple):
    """Bytes that a rank sends to each rank, and gets from each."""

    sent: tuple[int, ...]
    received: tuple[int, ...]

    def between(self, hosts: Sequence[int], rank: int) -> tuple[int, int]:
        """The bytes (sent, received) that leave this rank's host or come to it; ``hosts`` are those of all ranks."""
        others = [host != hosts[rank] for host in hosts]
        return sum(itertools.compress(self.sent, others)), sum(itertools.compress(self.received, others))


class Algorithm(abc.ABC):
    """How collectives are done.  ``shares`` of an array are its cut into one slice per rank, in bytes."""

    @abc.abstractmethod
    def all_reduce(self, shares: Sequence[int], rank: int) -> Moved:
        """Every rank has an array with these slices, and gets the sum."""

    @abc.abstractmethod
    def all_gather(self, parts: Sequence[int], rank: int) -> Moved:
        """Rank r has a part of ``parts[r]`` bytes; every rank gets all of them."""

    def reduce_scatter(self, shares: Sequence[int], rank: int) -> Moved:
        """Every rank sends each other one its slice."""
        return Moved(_but(shares, rank), _but([shares[rank]] * len(shares), rank))

    def all_to_all(self, parts: Sequence[int], got: Sequence[int], rank: int) -> Moved:
        """Each part goes to its rank, without detour."""
        return Moved(_but(parts, rank), _but(got, rank))

    def broadcast(self, nbytes: int, size: int, root: int, rank: int) -> Moved:
        """Pipelined, along all ranks from the root on."""
        sent, received = [0] * size, [0] * size
        if (rank + 1) % size != root:
            sent[(rank + 1) % size] = nbytes
        if rank != root:
            received[(rank - 1) % size] = nbytes
        return Moved(tuple(sent), tuple(received))


class Direct(Algorithm):
    """Every rank talks to all others: the slices of a sum are added up where they belong, and sent from there."""

    def all_reduce(self, shares: Sequence[int], rank: int) -> Moved:
        """A reduce-scatter of the slices, and an all-gather of their sums."""
        both = _but([share + shares[rank] for share in shares], rank)
        return Moved(both, both)

    def all_gather(self, parts: Sequence[int], rank: int) -> Moved:
        """The part goes to every other rank."""
        return Moved(_but([parts[rank]] * len(parts), rank), _but(parts, rank))


class Ring(Algorithm):
    """Every rank sends to the next one only (Patarasuk and Yuan, 2009)."""

    def all_reduce(self, shares: Sequence[int], rank: int) -> Moved:
        """The sum of slice r + 1 comes together on rank r: all but that are sent on, and then all but the next one."""
        following = [shares[(rank + k) % len(shares)] for k in range(3)]
        whole = 2 * sum(shares)
        return self._around(len(shares), rank, whole - following[1] - following[2], whole - following[0] - following[1])

    def all_gather(self, parts: Sequence[int], rank: int) -> Moved:
        """All parts pass by, but for the next rank's own."""
        whole, following = sum(parts), parts[(rank + 1) % len(parts)]
        return self._around(len(parts), rank, whole - following, whole - parts[rank])

    def _around(self, size: int, rank: int, sent: int, received: int) -> Moved:
        to, source = [0] * size, [0] * size
        if size > 1:
            to[(rank + 1) % size], source[(rank - 1) % size] = sent, received
        return Moved(tuple(to), tuple(source))


@functools.lru_cache(1024)
def shares(n: int, itemsize: int, size: int) -> tuple[int, ...]:
    """The bytes of each rank's slice of n elements, cut as evenly as can be."""
    bounds = [n * r // size * itemsize for r in range(size + 1)]
    return tuple(b - a for a, b in itertools.pairwise(bounds))


def _but(values: Sequence[int], rank: int) -> tuple[int, ...]:
    """Nothing goes from a rank to itself."""
    return (*values[:rank], 0, *values[rank + 1 :])


DIRECT, RING = Direct(), Ring()
