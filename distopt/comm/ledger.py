"""Ledger of a communicator: its last messages one by one, and the sums of all messages.

Transports do not know it.  ``Metered`` is the only communicator that counts: it holds a ledger, and writes each message
into it by a ``Meter``.  What transports and compressors know is the tag of a message (``distopt.comm.message``).
"""

import csv
import json
import operator
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distopt import formatting
from distopt.checks import check_int
from distopt.comm.message import KEYS, VOLUME, LedgerEntry

COLUMNS = *KEYS, "tensor"
AMOUNTS = "calls", *VOLUME
BETWEEN = VOLUME[-2:]
# phases of a step; 'update' has the norms of shared parameters
STEPS = "gradients", "parameters", "update"
PHASES = *STEPS, "start", "quality", "other"
REST = "(gaps, headers)"  # name of the bytes that belong to no tensor
KEEP = 10_000  # entries, by default: less than 100 MB, if a thousand tensors are in each
MAX_DRAFTS = 1000  # drafts after which entries are made


class Total(NamedTuple):
    """Sum of messages of one kind."""

    # volume: number of calls, and the amounts in `VOLUME`, `(1 + len(VOLUME),)`
    volume: tuple[int, ...] = (0,) * (1 + len(VOLUME))
    names: tuple[str, ...] = ()
    parts: Sequence[int] | np.ndarray = ()  # payload bytes of each tensor, `(len(names),)`

    def plus(self, entry: LedgerEntry) -> "Total":
        volume = tuple(map(operator.add, self.volume, (1, *entry.volume)))
        parts = np.asarray(entry.parts, np.int64)
        return Total(volume, entry.names, self.parts + parts if self.volume[0] else parts)

    def amounts(self) -> dict[str, int]:
        return dict(zip(AMOUNTS, self.volume, strict=True))

    def by_tensor(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Yield calls and payload bytes of each tensor, and last of the bytes that belong to none, if there are any."""
        calls, payload = self.volume[:2]
        parts = np.asarray(self.parts).tolist()
        for name, part in zip((*self.names, REST), (*parts, payload - sum(parts)), strict=True):
            if part or name != REST:
                yield name, {"calls": calls, "payload": part}


NOTHING = Total()


class Report(dict[str, dict[str, int]]):
    """The lines of ``Ledger.report``, and which steps are in them."""

    # steps: the first and the last step of which there is a message; None if there is none.  After a checkpoint was
    # loaded, or the ledger was cleared, the first one is not 1
    steps: tuple[int, int] | None = None


class Ledger:
    """Record of a rank's messages: entries of the last ones, and sums of all.  Any thread may read it.

    Entries are made many at a time.  That takes a fifth of the time of making each one after its message, when the code
    that makes it is in no cache.  Tensors are told apart by name: on one communicator, give the parameters of two
    models different names.

    Args:
        keep: number of entries that are kept.

    Raises:
        TypeError: ``keep`` is no integer.
        ValueError: ``keep`` is negative.

    Example:
        >>> import numpy as np
        >>> from distopt.comm import LocalCommunicator, Metered
        >>> comm = Metered(LocalCommunicator())
        >>> comm.all_reduce(np.ones(4, np.float32))
        >>> comm.ledger.by("phase", "verb")[0]["payload"]
        16
    """

    def __init__(self, keep: int = KEEP):
        self._entries: deque[LedgerEntry] = deque(maxlen=check_int("keep", keep, least=0))
        self._drafts: deque[Callable[[], LedgerEntry]] = deque()
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, int | None, str, tuple[str, ...]], Total] = {}
        # the first and the last one that has sent something
        self._steps: tuple[int, int] | None = None

    @property
    def entries(self) -> list[LedgerEntry]:
        with self._lock:
            self._make()
            return list(self._entries)

    def copy(self) -> "Ledger":
        """Return a ledger with the entries and sums of this one."""
        duplicate = Ledger()
        with self._lock:
            self._make()
            duplicate._entries, duplicate._sums = self._entries.copy(), self._sums.copy()
            duplicate._steps = self._steps
        return duplicate

    def write(self, draft: Callable[[], LedgerEntry]) -> None:
        """Add one message."""
        # draft: makes the entry; called when the ledger is read, or after `MAX_DRAFTS` drafts.
        self._drafts.append(draft)
        if len(self._drafts) >= MAX_DRAFTS:
            with self._lock:
                self._make()

    def _make(self) -> None:
        """Make the entries of all drafts; the caller must hold the lock."""
        while self._drafts:
            entry = self._drafts.popleft()()
            self._entries.append(entry)
            key = entry.phase, entry.bucket, entry.verb, entry.names
            self._sums[key] = self._sums.get(key, NOTHING).plus(entry)
            if entry.phase in STEPS and entry.step:
                first, last = self._steps or (entry.step, entry.step)
                self._steps = min(first, entry.step), max(last, entry.step)

    def clear(self) -> None:
        """Drop all entries and sums."""
        with self._lock:
            for container in (self._drafts, self._entries, self._sums):
                container.clear()
            self._steps = None

    def by(self, *columns: str) -> list[dict[str, Any]]:
        """Return sums of messages, grouped by some columns.

        Args:
            columns: any of 'step', 'phase', 'bucket', 'verb' and 'tensor'.  With 'step' the sums are of the messages
                that are kept, without it of all messages.

        Returns:
            One row per group, with its columns and its amounts.  With 'tensor' these are 'calls' and 'payload' only,
            since all other amounts are known by message.

        Raises:
            ValueError: there is no such column.
        """
        unknown = [str(column) for column in columns if column not in COLUMNS]
        if unknown:
            raise ValueError(f"columns must be among {', '.join(COLUMNS)}, got {', '.join(sorted(unknown))}")
        groups: dict[tuple[Any, ...], Counter[str]] = {}
        for keys, total in self._all("step" in columns):
            for tensor, amounts in total.by_tensor() if "tensor" in columns else [("", total.amounts())]:
                row = dict(zip(COLUMNS, (*keys, tensor), strict=True))
                groups.setdefault(tuple(row[c] for c in columns), Counter()).update(amounts)
        return [dict(zip(columns, key, strict=True)) | sums for key, sums in groups.items()]

    def _all(self, by_message: bool) -> list[tuple[tuple[Any, ...], Total]]:
        """Return pairs of (step, phase, bucket, verb) and a sum."""
        # by_message: one pair per message that is kept; else one per kind, of all messages, with step None.
        if by_message:
            return [(entry[: len(KEYS)], NOTHING.plus(entry)) for entry in self.entries]
        with self._lock:
            self._make()
            return [((None, *key[:-1]), total) for key, total in self._sums.items()]

    def total(self) -> dict[str, int]:
        """Return the sums of all messages, by the names in ``AMOUNTS``."""
        rows = self.by()
        return rows[0] if rows else dict.fromkeys(AMOUNTS, 0)

    def total_of_steps(self) -> dict[str, int]:
        """Sums of the messages of steps: gradients, parameters of partial steps, norms of shared parameters."""
        # Left out are rank 0's parameters at the start, measurements of quality, and messages that a script sends
        # itself.
        rows = [row for row in self.by("phase") if row["phase"] in STEPS]
        return {name: sum(row[name] for row in rows) for name in AMOUNTS}

    def report(self) -> Report:
        """Return the sums of all messages in lines, ``{line: {'calls', 'payload', 'wire'}}``.

        Messages of steps have a line for each verb, named by it.  All other messages come in lines after these, named
        by phase and verb: 'start broadcast', 'quality all_reduce', 'other broadcast'.  'payload' and 'wire' are bytes;
        'wire' is what was sent.
        """
        lines: dict[str, Counter[str]] = {}
        snapshot = self.copy()
        for row in snapshot.by("phase", "verb"):
            line = row["verb"] if row["phase"] in STEPS else f"{row['phase']} {row['verb']}"
            counts = {"calls": row["calls"], "payload": row["payload"], "wire": row["sent"]}
            lines.setdefault(line, Counter()).update(counts)
        report = Report((n, dict(lines[n])) for n in sorted(lines, key=lambda line: (not of_steps(line), line)))
        report.steps = snapshot._steps
        return report

    def tensors(self, phase: str = "gradients") -> dict[str, int]:
        """Return the payload bytes of every tensor in all messages of a phase; bytes that belong to none come last."""
        rows = self.by("phase", "tensor")
        phases = dict.fromkeys([*PHASES, *(row["phase"] for row in rows)])
        if phase not in phases:
            raise ValueError(f"phase must be one of {', '.join(phases)}, got {phase!r}")
        payloads = {row["tensor"]: row["payload"] for row in rows if row["phase"] == phase}
        unassigned = payloads.pop(REST, 0)
        return payloads | {REST: unassigned}

    def as_dict(self) -> dict[str, Any]:
        """Return all sums, tensors and entries, in types that JSON has."""
        snapshot = self.copy()
        return {
            "totals": snapshot.by("phase", "bucket", "verb"),
            "tensors": {
                phase: snapshot.tensors(phase) for phase in dict.fromkeys(key[0] for key in snapshot._sums if key[-1])
            },
            "entries": [
                dict(zip((*KEYS, *VOLUME), entry, strict=False))
                | {"tensors": dict(zip(entry.names, np.asarray(entry.parts).tolist(), strict=True))}
                for entry in snapshot.entries
            ],
        }

    def write_json(self, path: str | Path) -> None:
        """Write all sums, tensors and entries as one JSON object."""
        Path(path).write_text(json.dumps(self.as_dict()) + "\n")

    def write_csv(self, path: str | Path, *columns: str) -> None:
        """Write a CSV file.

        A name that a spreadsheet would take for a formula is written with an apostrophe before it.

        Args:
            path: the file.
            columns: write sums by these columns (see ``by``); without columns, the messages that are kept.
        """
        names = (*columns, *_amounts(columns)) if columns else (*KEYS, *VOLUME)
        rows = [[row[name] for name in names] for row in self.by(*columns)] if columns else self.entries
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows(map(formatting.cell, row[: len(names)]) for row in rows)

    def table(self, *columns: str) -> str:
        """Return a table of sums as text; amounts are bytes, but for 'ideal', which is in bits.

        Args:
            columns: group by these (see ``by``), by default by phase and verb.  With 'step', messages that are not
                kept any more are summed up in one row.
        """
        columns, snapshot = columns or ("phase", "verb"), self.copy()
        total = snapshot.total()
        dropped = Counter(total)
        shown = [c for c in _amounts(columns) if total["sent_between"] or total["received_between"] or c not in BETWEEN]

        def line(first: Sequence[str], row: Mapping[str, int]) -> tuple[str, ...]:
            return (*first, *[""] * (len(columns) - len(first)), *(f"{row[c]:,}" for c in shown))

        lines = [(*columns, *shown), *(line([str(row[c]) for c in columns], row) for row in snapshot.by(*columns))]
        if "step" in columns:
            for row in snapshot.by("step"):
                dropped.subtract({c: row[c] for c in AMOUNTS})
            lines += [line(["(not kept)"], dropped)] if dropped["calls"] else []
        lines.append(line(["total"], total))
        return "\n".join(formatting.table(lines, left=len(columns)))


def of_steps(line: str) -> bool:
    """Return whether a line of a ``report`` counts messages of steps, which never broadcast in any version.

    Example:
        >>> of_steps("all_reduce"), of_steps("start broadcast"), of_steps("broadcast")
        (True, False, False)
    """
    return " " not in line and line != "broadcast"


def _amounts(columns: Sequence[str]) -> tuple[str, ...]:
    return AMOUNTS[:2] if "tensor" in columns else AMOUNTS
