"""Tag of a message, the breakdown of its payload, and its entry in a ledger."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from distopt.kernels.breakdown import LazyBreakdown, total
from distopt.kernels.layout import BucketLayout


class MessageTag(NamedTuple):
    """Label of messages in ledgers and reports.

    Attributes:
        phase: in a step 'gradients', 'parameters' (means of the parameters of a partial step) or 'update' (norms of
            shared parameters).  Other phases are counted separately: 'start' (rank 0's parameters), 'buddy' (copies of
            what one rank alone has), 'quality' (``DistOpt.observe``), and 'other', for messages that a script sends by
            a communicator or by the collectives of a ``DistOpt``.
        step: the step, from 1; 0 for messages outside of steps.
        bucket: number of the bucket, None for messages without one.
        members: layout of the bucket, among whose arrays bytes are shared out.
        breakdown: returns the breakdown of a payload that is gathered; a payload that is summed has values only.

    Example:
        >>> import numpy as np
        >>> from distopt.comm import LocalCommunicator, Metered
        >>> from distopt.comm.message import MessageTag
        >>> comm = Metered(LocalCommunicator())
        >>> with comm.tagged(MessageTag("gradients", step=1)):
        ...     comm.all_reduce(np.ones(4, np.float32))
        >>> list(comm.report())
        ['all_reduce']
    """

    phase: str = "other"
    step: int = 0
    bucket: int | None = None
    members: BucketLayout | None = None
    breakdown: Callable[[np.ndarray], LazyBreakdown] | None = None

    def __str__(self) -> str:
        return "" if self.bucket is None else f"bucket {self.bucket}"


UNTAGGED = MessageTag()


def of_several(tags: Sequence[MessageTag]) -> MessageTag:
    """Return the tag of a message that has payloads of several ranks, each with its own tag."""

    def breakdown(payload: np.ndarray) -> LazyBreakdown:
        known = [tag.breakdown(payload) for tag in tags if tag.breakdown]
        return lambda: total([lazy() for lazy in known])

    return tags[-1]._replace(breakdown=breakdown)


ALIGNED = 8  # an array of bytes among several in a message begins at a multiple of so many


def message_starts(lengths: Iterable[int]) -> list[int]:
    """Return where arrays of so many bytes begin in a message of all, and where it ends.

    Example:
        >>> message_starts([19, 4])
        [0, 24, 28]
    """
    starts, end = list[int](), 0
    for nbytes in lengths:
        starts.append(-(-end // ALIGNED) * ALIGNED)
        end = starts[-1] + nbytes
    return [*starts, end]


def message_bytes(lengths: Iterable[int]) -> int:
    """Return the bytes of a message with arrays of these."""
    return message_starts(lengths)[-1]


class Tagging:
    """A context in which ``holder._tag`` has another value, as of communicators and meters."""

    def __init__(self, holder: Any, tag: Any):
        self._holder, self._tag = holder, tag

    def __enter__(self) -> None:
        self._previous, self._holder._tag = self._holder._tag, self._tag

    def __exit__(self, *error: object) -> None:
        self._holder._tag = self._previous


class LedgerEntry(NamedTuple):
    """One message of one rank in a ledger.  Amounts are bytes, but for ``ideal``."""

    step: int  # the step, from 1; 0 for messages outside of steps
    phase: str
    bucket: int | None  # number of the bucket, None for messages without one
    verb: str
    payload: int
    values: int
    indices: int
    ideal: int  # information in the payload, in bits
    sent: int  # sent by this rank, by formula (`byte_counts`)
    received: int
    sent_between: int
    received_between: int  # part of `received` that comes from other hosts
    names: tuple[str, ...] = ()
    parts: Sequence[int] | np.ndarray = ()  # payload bytes of each tensor, `(len(names),)`

    @property
    def volume(self) -> tuple[int, ...]:
        """Amounts of the message, in the order of ``VOLUME``."""
        return self[len(KEYS) : -2]  # type: ignore[return-value]


KEYS, VOLUME = LedgerEntry._fields[:4], LedgerEntry._fields[4:-2]


def apportion(total: int, counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Share out ``total`` bytes among members in proportion to their counts.

    Example:
        >>> apportion(10, [1, 2, 0]).tolist()
        [3, 7, 0]
    """
    # Returns integers that add up to `total`, `(members,)`; zeros if all counts are 0.
    ends = np.cumsum(np.asarray(counts, np.int64))
    entries = int(ends[-1]) if ends.size else 0
    if not entries:
        return np.zeros(ends.size, np.int64)
    if total * entries >= 1 << 63:
        ends = ends.astype(object)  # Python's integers do not overflow
    bounds = (total * ends // entries).astype(np.int64)
    bounds[1:] -= bounds[:-1].copy()
    return bounds
