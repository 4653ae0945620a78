"""The ledger of a communicator: for every message what it was for, what it was made of, and what went over the wire."""

import csv
import json
import operator
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distopt import units
from distopt.tables import Members

VOLUME = ("payload", "values", "indices", "ideal", "sent", "received", "sent_between", "received_between")
KEYS = ("step", "phase", "bucket", "verb")
NOTHING = (0,) * (1 + len(VOLUME))
REST = "(gaps, headers)"  # what belongs to no tensor


class Anatomy(NamedTuple):
    """What a payload consists of: bytes of values and of indices; the rest are headers and scales.

    ``ideal`` is the information in it, in bits: how many ways there are to choose so many entries, and the values as
    they are; of codes of a bit or two an estimate, from 4096 bytes of them.  ``counts`` are the entries of each member,
    None if all of them are sent.
    """

    values: int
    indices: int = 0
    ideal: int | None = None
    counts: np.ndarray | None = None


Look = Callable[[], Anatomy]  # at something that may be gone: what had to be seen in time has been


class Purpose(NamedTuple):
    """What goes over the wire is part of something: a phase of a step, and there a bucket, with its members.

    Steps count from 1; what goes before the first, or belongs to none, is step 0.

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


KEEP = 10_000  # entries, by default: less than 100 MB, if a thousand tensors are in each
MANY = 1000  # entries that are made at once, at the latest
FIRST = Entry._fields.index(VOLUME[0])


class Ledger:
    """All entries of the last ``keep`` messages, and the sums of all that ever were; any thread may read them.

    Entries are made many at a time, which costs a fifth of making each behind its message, where no cache knows how.
    """

    def __init__(self, keep: int = KEEP):
        self._entries: deque[Entry] = deque(maxlen=keep)
        self._drafts: deque[Callable[[], Entry]] = deque()
        self._lock = threading.Lock()
        self._totals: dict[tuple[str, int | None, str], tuple[int, ...]] = {}  # calls, and what is in VOLUME
        self._tensors: dict[tuple[str, tuple[str, ...]], np.ndarray] = {}

    @property
    def entries(self) -> list[Entry]:
        """The messages that are kept, in their order, as of now."""
        with self._lock:
            self._make()
            return list(self._entries)

    def write(self, draft: Callable[[], Entry]) -> None:
        """Write down one message, which is made when it is asked for."""
        self._drafts.append(draft)
        if len(self._drafts) >= MANY:
            with self._lock:
                self._make()

    def _make(self) -> None:
        """Make the entries that are drafts; the lock is held."""
        while self._drafts:
            self._add(self._drafts.popleft()())

    def _add(self, entry: Entry) -> None:
        self._entries.append(entry)
        key = entry.phase, entry.bucket, entry.verb
        volume = entry[FIRST : FIRST + len(VOLUME)]
        self._totals[key] = tuple(map(operator.add, self._totals.get(key, NOTHING), (1, *volume)))
        if entry.names:
            place = entry.phase, entry.names
            self._tensors[place] = self._tensors.get(place, 0) + np.asarray(entry.parts, np.int64)

    def clear(self) -> None:
        """Begin anew."""
        with self._lock:
            for kept in (self._drafts, self._entries, self._totals, self._tensors):
                kept.clear()

    def by(self, *columns: str) -> list[dict[str, Any]]:
        """Sums of all messages, by any of phase, bucket and verb; with 'step' only of those that are kept.

        Raises ValueError for another column.
        """
        unknown = set(columns) - set(KEYS)
        if unknown:
            raise ValueError(f"columns are {', '.join(KEYS)}, got {', '.join(sorted(unknown))}")
        found: dict[tuple[Any, ...], Counter[str]] = {}
        for row in self._rows("step" in columns):
            sums = found.setdefault(tuple(row[c] for c in columns), Counter())
            sums.update({name: row[name] for name in ("calls", *VOLUME)})
        return [dict(zip(columns, key, strict=True)) | sums for key, sums in found.items()]

    def total(self) -> dict[str, int]:
        """Sums of all messages."""
        rows = self.by()
        return rows[0] if rows else dict.fromkeys(("calls", *VOLUME), 0)

    def tensors(self, phase: str = "gradients") -> dict[str, int]:
        """Payload bytes of every tensor, in all messages of a phase; what belongs to no tensor comes last."""
        found: Counter[str] = Counter()
        with self._lock:
            self._make()
            tensors = list(self._tensors.items())
        for (here, names), parts in tensors:
            if here == phase:
                found.update(dict(zip(names, parts.tolist(), strict=True)))
        whole = sum(row["payload"] for row in self.by("phase") if row["phase"] == phase)
        return dict(found) | {REST: whole - sum(found.values())}

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "totals": self.by("phase", "bucket", "verb"),
            "tensors": {phase: self.tensors(phase) for phase in dict.fromkeys(key[0] for key in list(self._tensors))},
            "entries": [dict(zip((*KEYS, *VOLUME), entry, strict=False)) for entry in self.entries],
        }

    def write_json(self, path: str | Path) -> None:
        """Everything, as one object."""
        Path(path).write_text(json.dumps(self.as_dict()) + "\n")

    def write_csv(self, path: str | Path) -> None:
        """The messages that are kept, one in a line."""
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow((*KEYS, *VOLUME))
            writer.writerows(entry[: len(KEYS) + len(VOLUME)] for entry in self.entries)

    def table(self, *columns: str) -> str:
        """Sums by some of the columns, default phase and verb, as text; bytes, and bits for what is ideal."""
        columns, total = columns or ("phase", "verb"), self.total()
        apart = total["sent_between"] or total["received_between"]
        shown = [c for c in ("calls", *VOLUME) if apart or not c.endswith("between")]
        lines = [(*columns, *shown)]
        lines += [(*(str(row[c]) for c in columns), *(f"{row[c]:,}" for c in shown)) for row in self.by(*columns)]
        lines.append((*["total", *[""] * (len(columns) - 1)], *(f"{total[c]:,}" for c in shown)))
        return "\n".join(units.table(lines, left=len(columns)))

    def _rows(self, each: bool) -> list[dict[str, Any]]:
        """Every message that is kept, or the sums of all."""
        if each:
            return [entry._asdict() | {"calls": 1} for entry in self.entries]
        with self._lock:
            self._make()
            totals = list(self._totals.items())
        names = *KEYS[1:], "calls", *VOLUME
        return [dict(zip(names, (*key, *total), strict=True)) for key, total in totals]


def share_out(total: int, counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """``total`` bytes among members in proportion to their counts, whole numbers that add up to it."""
    ends = np.cumsum(np.asarray(counts, np.int64))
    whole = int(ends[-1]) if ends.size else 0
    if not whole:
        return np.zeros(ends.size, np.int64)
    if total * whole >= 1 << 63:
        ends = ends.astype(object)  # Python's numbers do not overflow
    bounds = (total * ends // whole).astype(np.int64)
    bounds[1:] -= bounds[:-1].copy()
    return bounds
