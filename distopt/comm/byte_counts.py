"""Formulas for the bytes that a rank sends and receives in a collective.

The functions ``all_reduce``, ``all_gather`` and so on return means over ranks: the same number on every rank, for
decisions that all ranks must take alike.  ``Direct`` and ``Ring`` are exact for each rank; both are bandwidth-optimal
(Chan et al., "Collective communication: theory, practice, and experience", 2007, sections 4 and 5).
"""

import abc
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple


def all_reduce(nbytes: int, size: int) -> int:
    """Return the mean bytes that a rank sends in an all-reduce of ``nbytes``: 2 (P - 1) / P of them for P ranks.

    An all-reduce counts as a reduce-scatter and an all-gather.

    Example:
        >>> all_reduce(1000, size=4)
        1500
    """
    return 2 * (size - 1) * nbytes // size


def reduce_scatter(nbytes: int, size: int) -> int:
    """Return the mean bytes that a rank sends in a reduce-scatter of ``nbytes``: (P - 1) / P of them for P ranks.

    Example:
        >>> reduce_scatter(1000, size=4)
        750
    """
    return (size - 1) * nbytes // size


def all_gather(total: int, size: int) -> int:
    """Return the mean bytes that a rank sends in an all-gather: (P - 1) / P of the ``total`` bytes of all P ranks.

    Example:
        >>> all_gather(1000, size=4)
        750
    """
    return (size - 1) * total // size


def all_to_all(total: int, local: int) -> int:
    """Return the bytes that a rank sends in an all-to-all: its ``total`` less the ``local`` part that it keeps.

    Example:
        >>> all_to_all(1000, local=100)
        900
    """
    return total - local


def broadcast(nbytes: int, size: int) -> int:
    """Return the mean bytes that a rank sends in a pipelined broadcast: all ranks but the last pass on ``nbytes``.

    Example:
        >>> broadcast(1000, size=4)
        750
    """
    return (size - 1) * nbytes // size


class Moved(NamedTuple):
    """Bytes that a rank exchanges with each other rank in one collective.

    Attributes:
        sent: bytes to each rank, ``(size,)``; 0 to itself.
        received: bytes from each rank, ``(size,)``; 0 from itself.

    Example:
        >>> Moved(sent=(0, 8, 8), received=(0, 4, 4)).between_hosts(hosts=(0, 0, 1), rank=0)
        (8, 4)
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]

    def between_hosts(self, hosts: Sequence[int], rank: int) -> tuple[int, int]:
        """Return the bytes (sent, received) that cross the network between hosts.

        Args:
            hosts: the host of each rank, as numbers.
            rank: the rank whose bytes these are.
        """
        remote = [host != hosts[rank] for host in hosts]
        return sum(itertools.compress(self.sent, remote)), sum(itertools.compress(self.received, remote))


class Algorithm(abc.ABC):
    """Routes that the bytes of collectives take between ranks.

    The methods return the bytes of rank ``rank``.  ``shares`` are the bytes of each rank's slice of an array (see the
    function ``shares``); ``parts`` are the bytes of each rank's part.

    Example:
        >>> DIRECT.all_gather([4, 8, 8], rank=0)
        Moved(sent=(0, 4, 4), received=(0, 8, 8))
        >>> RING.all_gather([4, 8, 8], rank=0)
        Moved(sent=(0, 12, 0), received=(0, 0, 16))
    """

    @abc.abstractmethod
    def all_reduce(self, shares: Sequence[int], rank: int) -> Moved:
        """Return the bytes of an all-reduce of an array with these slices."""

    @abc.abstractmethod
    def all_gather(self, parts: Sequence[int], rank: int) -> Moved:
        """Return the bytes of an all-gather to which rank r brings ``parts[r]`` bytes."""

    def reduce_scatter(self, shares: Sequence[int], rank: int) -> Moved:
        """Return the bytes of a reduce-scatter in which every rank sends each other rank the slice that it owns."""
        return Moved(_zeroed_at(shares, rank), _zeroed_at([shares[rank]] * len(shares), rank))

    def all_to_all(self, parts: Sequence[int], received: Sequence[int], rank: int) -> Moved:
        """Return the bytes of an all-to-all without detours.

        Args:
            parts: bytes that this rank has for each rank.
            received: bytes that each rank has for this one.
            rank: this rank.
        """
        return Moved(_zeroed_at(parts, rank), _zeroed_at(received, rank))

    def broadcast(self, nbytes: int, size: int, root: int, rank: int) -> Moved:
        """Return the bytes of a broadcast that is pipelined along all ranks.

        Args:
            nbytes: of the array.
            size: ranks.
            root: the rank that has it.
            rank: whose bytes are counted.
        """
        sent, received = [0] * size, [0] * size
        if (rank + 1) % size != root:
            sent[(rank + 1) % size] = nbytes
        if rank != root:
            received[(rank - 1) % size] = nbytes
        return Moved(tuple(sent), tuple(received))


class Direct(Algorithm):
    """Direct exchange between all pairs of ranks; each slice of a sum is formed by its owner, which sends it to all."""

    def all_reduce(self, shares: Sequence[int], rank: int) -> Moved:
        exchanged = _zeroed_at([share + shares[rank] for share in shares], rank)
        return Moved(exchanged, exchanged)

    def all_gather(self, parts: Sequence[int], rank: int) -> Moved:
        return Moved(_zeroed_at([parts[rank]] * len(parts), rank), _zeroed_at(parts, rank))


class Ring(Algorithm):
    """Ring, in which every rank sends only to the next one (Patarasuk and Yuan, 2009)."""

    def all_reduce(self, shares: Sequence[int], rank: int) -> Moved:
        """Return the bytes of a reduce-scatter and an all-gather around the ring."""
        # The sum of slice r + 1 is complete on rank r, which therefore sends all slices but that one in the first
        # phase, and all but slice r + 2 in the second.
        current, following, second = (shares[(rank + k) % len(shares)] for k in range(3))
        total = 2 * sum(shares)
        return self._around(len(shares), rank, total - following - second, total - current - following)

    def all_gather(self, parts: Sequence[int], rank: int) -> Moved:
        total, following = sum(parts), parts[(rank + 1) % len(parts)]
        return self._around(len(parts), rank, total - following, total - parts[rank])

    def _around(self, size: int, rank: int, sent: int, received: int) -> Moved:
        sent_to, received_from = [0] * size, [0] * size
        if size > 1:
            sent_to[(rank + 1) % size], received_from[(rank - 1) % size] = sent, received
        return Moved(tuple(sent_to), tuple(received_from))


@functools.lru_cache(1024)
def shares(n: int, itemsize: int, size: int) -> tuple[int, ...]:
    """Return the bytes of each rank's slice of an array of n elements, ``(size,)``.

    The slices differ by at most one element.

    Args:
        n: elements of the array.
        itemsize: bytes of an element.
        size: number of ranks.

    Example:
        >>> shares(10, itemsize=4, size=4)
        (8, 12, 8, 12)
    """
    bounds = [n * r // size * itemsize for r in range(size + 1)]
    return tuple(b - a for a, b in itertools.pairwise(bounds))


def _zeroed_at(values: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the values with 0 for ``rank``, which sends nothing to itself."""
    return (*values[:rank], 0, *values[rank + 1 :])


DIRECT = Direct()
RING = Ring()
