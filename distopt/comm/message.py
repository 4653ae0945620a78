"""Tag of a message, the breakdown of its payload, and its entry in a ledger."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from distopt.kernels.layout import BucketLayout


class PayloadBreakdown(NamedTuple):
    """Breakdown of a payload into values and indices; its other bytes are headers and scales."""

    values: int  # bytes of values
    indices: int = 0  # bytes of indices
    # information in the payload, in bits: the logarithm of the number of ways to choose so many entries, plus the bits
    # of the values.  For codes of one or two bits it is an estimate, from 2048 bytes of them.  None: the bits of the
    # payload
    ideal: int | None = None
    # number of entries of each member of the bucket, `(members,)`; None if all of them are sent
    counts: np.ndarray | None = None


# callable after the payload's memory has been used again
LazyBreakdown = Callable[[], PayloadBreakdown]


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


@contextlib.contextmanager
def tagging(holder: Any, tag: Any) -> Iterator[None]:
    """Give ``holder._tag`` another value within a context, as communicators and meters do."""
    previous, holder._tag = holder._tag, tag
    try:
        yield
    finally:
        holder._tag = previous


class Entry(NamedTuple):
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


KEYS, VOLUME = Entry._fields[:4], Entry._fields[4:-2]


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
