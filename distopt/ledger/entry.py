"""One message in a ledger: its purpose, what it was made of, and its bytes on the wire."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from distopt.tables import Members


class Anatomy(NamedTuple):
    """The make-up of a payload: bytes of values and of indices; the rest are headers and scales.

    ``ideal`` is the information in it, in bits: how many ways there are to choose so many entries, and the values as
    they are; of codes of a bit or two an estimate, from 2048 bytes of them.  ``counts`` are the entries of each member,
    None if all of them are sent.
    """

    values: int
    indices: int = 0
    ideal: int | None = None
    counts: np.ndarray | None = None


Look = Callable[[], Anatomy]  # at something that may be gone: what had to be seen in time has been


class Purpose(NamedTuple):
    """The reason why messages are sent: a phase of a step, and there a bucket, with its members.

    Phases of steps are 'gradients', 'parameters' (the mean of a partial step's) and 'update' (norms of shared ones);
    all else is counted apart: 'start' (rank 0's parameters), 'quality' (of ``DistOpt.observe``), and 'other', which is
    what a script sends by the verbs of a communicator or of a ``DistOpt``.  Steps count from 1; what goes before the
    first, or belongs to none, is step 0.

    ``look`` is at a payload that is gathered; whatever is summed consists of values.
    """

    phase: str = "other"
    step: int = 0
    bucket: int | None = None
    members: Members | None = None
    look: Callable[[np.ndarray], Look] | None = None

    def __str__(self) -> str:
        return "" if self.bucket is None else f"bucket {self.bucket}"


class Entry(NamedTuple):
    """One message of one rank: bytes, but for ``ideal``, which are bits.  Steps count from 1; 0 is no step.

    *Payload* is measured: what this rank handed to the collective; ``values`` and ``indices`` are parts of it.  What
    was *sent* and *received*, and of that *between* hosts, is by formula (``cost.wire``).  ``names`` are the tensors in
    it, and ``parts`` their bytes of the payload.
    """

    step: int
    phase: str
    bucket: int | None
    verb: str
    payload: int
    values: int
    indices: int
    ideal: int
    sent: int
    received: int
    sent_between: int
    received_between: int
    names: tuple[str, ...] = ()
    parts: Sequence[int] | np.ndarray = ()

    @property
    def volume(self) -> tuple[int, ...]:
        """All amounts, in the order of ``VOLUME``."""
        return self[len(KEYS) : -2]  # type: ignore[return-value]


KEYS, VOLUME = Entry._fields[:4], Entry._fields[4:-2]


def share_out(total: int, counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Share out ``total`` bytes among members in proportion to their counts, as whole numbers that add up to it."""
    ends = np.cumsum(np.asarray(counts, np.int64))
    whole = int(ends[-1]) if ends.size else 0
    if not whole:
        return np.zeros(ends.size, np.int64)
    if total * whole >= 1 << 63:
        ends = ends.astype(object)  # Python's numbers do not overflow
    bounds = (total * ends // whole).astype(np.int64)
    bounds[1:] -= bounds[:-1].copy()
    return bounds
