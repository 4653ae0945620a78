"""Writer of a rank's messages into its ledger, one entry for every call of a collective.

A ``Meter`` knows sizes and formulas, and no communicator: ``Metered`` calls it for messages that were sent, and
``distopt.lab`` for those of ranks that do not exist.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from weakref import WeakKeyDictionary

import numpy as np

from distopt.comm.byte_counts import Algorithm, Moved, shares
from distopt.comm.ledger import Ledger
from distopt.comm.message import LedgerEntry, MessageTag, Tagging, apportion
from distopt.kernels.breakdown import LazyBreakdown, PayloadBreakdown
from distopt.kernels.layout import BucketLayout


class Meter:
    """Writer of one rank's ledger."""

    def __init__(self, rank: int, size: int, hosts: Sequence[int], algorithm: Algorithm, ledger: Ledger):
        self.rank, self.size, self._algorithm, self.ledger = rank, size, algorithm, ledger
        # hosts: host of each rank, `(size,)`, as numbers that are equal for ranks of one host
        self._hosts, self._spans = hosts, len(set(hosts)) > 1
        self._tag = MessageTag()

    def tagged(self, tag: MessageTag) -> AbstractContextManager[None]:
        """Return a context whose messages are labelled with a phase, a step and a bucket."""
        return Tagging(self, tag)

    @property
    def knows_breakdown(self) -> bool:
        """Whether the tag tells of a gathered payload what it consists of."""
        return self._tag.breakdown is not None

    def breakdown(self, payload: np.ndarray) -> LazyBreakdown:
        """Return the breakdown of a gathered payload, computed when its entry is made."""
        # Without a `breakdown` in the tag, the payload counts as values only; lengths of gradients' payloads as none.
        nbytes = payload.nbytes
        if self._tag.phase == "gradients" and payload.dtype == np.int64:
            return lambda: PayloadBreakdown(0)
        return self._tag.breakdown(payload) if self._tag.breakdown else lambda: PayloadBreakdown(nbytes)

    def all_reduce(self, n: int, itemsize: int) -> None:
        self._sum("all_reduce", n, itemsize, lambda: self._algorithm.all_reduce(self._slices(n, itemsize), self.rank))

    def reduce_scatter(self, n: int, itemsize: int) -> None:
        cut = self._slices
        self._sum("reduce_scatter", n, itemsize, lambda: self._algorithm.reduce_scatter(cut(n, itemsize), self.rank))

    def broadcast(self, n: int, itemsize: int, root: int) -> None:
        nbytes = n * itemsize
        self._sum("broadcast", n, itemsize, lambda: self._algorithm.broadcast(nbytes, self.size, root, self.rank))

    def all_gather(self, sizes: Sequence[int], breakdown: LazyBreakdown) -> None:
        """Write an all-gather of payloads of these sizes in bytes, ``(size,)``; ``breakdown`` is of this rank's."""
        self._write("all_gather", sizes[self.rank], lambda: self._algorithm.all_gather(sizes, self.rank), breakdown)

    def all_to_all(self, sizes: Sequence[int], received: Sequence[int], breakdown: LazyBreakdown | None = None) -> None:
        """Write an all-to-all of parts of these sizes in bytes, ``(size,)``: to each rank, and from each rank."""
        # breakdown: breakdown of this rank's parts; None if they are values only, of no known members.
        moved, total = self._algorithm.all_to_all(sizes, received, self.rank), sum(sizes)
        lazy = breakdown or (lambda: PayloadBreakdown(total))
        self._write("all_to_all", total, lambda: moved, lazy, spread=breakdown is not None)

    def lengths(self) -> None:
        # 8 bytes to every other rank, which do not count as values.
        moved = self._algorithm.all_gather([8] * self.size, self.rank)
        self._write("lengths", 8, lambda: moved, lambda: PayloadBreakdown(0), spread=False)

    def _slices(self, n: int, itemsize: int) -> tuple[int, ...]:
        return shares(n, itemsize, self.size)

    def _sum(self, verb: str, n: int, itemsize: int, moved: Callable[[], Moved]) -> None:
        nbytes = n * itemsize
        self._write(verb, nbytes, moved, lambda: PayloadBreakdown(nbytes), n, itemsize)

    def _write(
        self,
        verb: str,
        payload: int,
        moved: Callable[[], Moved],
        lazy: LazyBreakdown,
        n: int | None = None,
        itemsize: int = 1,
        spread: bool = True,
    ) -> None:
        """Add a draft of an entry to the ledger."""
        # n: elements of an array that is summed or broadcast, None for other payloads.
        # spread: whether to share out the payload among the members of the bucket.
        tag = self._tag._replace(breakdown=None)  # the draft must not keep buffers alive

        def entry() -> LedgerEntry:
            wire, breakdown = moved(), lazy()
            members = tag.members if spread else None
            parts = () if members is None else member_bytes(members, breakdown, n, itemsize)
            between = wire.between_hosts(self._hosts, self.rank) if self._spans else (0, 0)
            ideal = 8 * payload if breakdown.ideal is None else breakdown.ideal
            # int(): numpy's integers cannot be written as JSON
            values, indices, ideal = int(breakdown.values), int(breakdown.indices), int(ideal)
            volume = payload, values, indices, ideal, sum(wire.sent), sum(wire.received), *between
            return LedgerEntry(tag.step, tag.phase, tag.bucket, verb, *volume, members.names if members else (), parts)

        self.ledger.write(entry)


def member_bytes(members: BucketLayout, breakdown: PayloadBreakdown, n: int | None, itemsize: int) -> np.ndarray:
    """Return the payload bytes of each member of a bucket, ``(members,)``."""
    # Of a complete bucket of n elements, these are the bytes of each array.  Where entries were chosen, their bytes are
    # shared out in proportion to the number of entries.
    # n: elements of an array that is summed or broadcast, None for other payloads.
    if n == members.extent:
        return dense_member_bytes(members, itemsize)
    counts = members.records["size"] if breakdown.counts is None else breakdown.counts
    return apportion(breakdown.values + breakdown.indices, counts)


def dense_member_bytes(members: BucketLayout, itemsize: int) -> np.ndarray:
    """Return the bytes of each member of a complete bucket, ``(members,)``, at ``itemsize`` bytes an element."""
    # The array is read-only, and the same one at every call: a ledger keeps thousands of entries that refer to it.
    cache = _dense_member_bytes.setdefault(members, {})
    if itemsize not in cache:
        cache[itemsize] = members.records["size"] * itemsize
        cache[itemsize].flags.writeable = False
    return cache[itemsize]


_dense_member_bytes: WeakKeyDictionary[BucketLayout, dict[int, np.ndarray]] = WeakKeyDictionary()
