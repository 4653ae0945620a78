"""All messages of a communicator: the last ones one by one, and the sums of all."""

import csv
import json
import operator
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distopt import units
from distopt.ledger.entry import KEYS, VOLUME, Entry
from distopt.numbers import whole

COLUMNS = *KEYS, "tensor"
AMOUNTS = "calls", *VOLUME
BETWEEN = VOLUME[-2:]
STEPS = "gradients", "parameters", "update"  # phases of what steps exchange: the last are norms of shared parameters
PHASES = *STEPS, "start", "quality", "other"
REST = "(gaps, headers)"  # what belongs to no tensor
KEEP = 10_000  # entries, by default: less than 100 MB, if a thousand tensors are in each
MANY = 1000  # entries that are made at once, at the latest


class Sum(NamedTuple):
    """Messages that are alike: calls and what is in ``VOLUME``, and the bytes of each of their tensors."""

    volume: tuple[int, ...] = (0,) * (1 + len(VOLUME))
    names: tuple[str, ...] = ()
    parts: Sequence[int] | np.ndarray = ()

    def plus(self, entry: Entry) -> "Sum":
        """Add one message of the same tensors."""
        volume = tuple(map(operator.add, self.volume, (1, *entry.volume)))
        parts = np.asarray(entry.parts, np.int64)
        return Sum(volume, entry.names, self.parts + parts if self.volume[0] else parts)

    def amounts(self) -> dict[str, int]:
        """All amounts by name."""
        return dict(zip(AMOUNTS, self.volume, strict=True))

    def by_tensor(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Calls and payload of each tensor, and at last of bytes that belong to none."""
        calls, payload = self.volume[:2]
        parts = np.asarray(self.parts).tolist()
        for name, part in zip((*self.names, REST), (*parts, payload - sum(parts)), strict=True):
            if part or name != REST:
                yield name, {"calls": calls, "payload": part}


NOTHING = Sum()


class Ledger:
    """All entries of the last ``keep`` messages, and the sums of all that ever were; any thread may read them.

    Entries are made many at a time, which costs a fifth of making each behind its message, where no cache knows how.
    Tensors of one name are one here: give parameters of two models on one communicator names that differ.

    Raises TypeError and ValueError for a ``keep`` that is no number of messages.
    """

    def __init__(self, keep: int = KEEP):
        self._entries: deque[Entry] = deque(maxlen=whole("keep", keep, least=0))
        self._drafts: deque[Callable[[], Entry]] = deque()
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, int | None, str, tuple[str, ...]], Sum] = {}

    @property
    def entries(self) -> list[Entry]:
        """The messages that are kept, in their order, as of now."""
        with self._lock:
            self._make()
            return list(self._entries)

    def copy(self) -> "Ledger":
        """A ledger with all there is now."""
        twin = Ledger()
        with self._lock:
            self._make()
            twin._entries, twin._sums = self._entries.copy(), self._sums.copy()
        return twin

    def write(self, draft: Callable[[], Entry]) -> None:
        """Write down one message, which is made when it is asked for."""
        self._drafts.append(draft)
        if len(self._drafts) >= MANY:
            with self._lock:
                self._make()

    def _make(self) -> None:
        """Make the entries that are drafts; the lock is held."""
        while self._drafts:
            entry = self._drafts.popleft()()
            self._entries.append(entry)
            key = entry.phase, entry.bucket, entry.verb, entry.names
            self._sums[key] = self._sums.get(key, NOTHING).plus(entry)

    def clear(self) -> None:
        """Drop all entries and sums."""
        with self._lock:
            for kept in (self._drafts, self._entries, self._sums):
                kept.clear()

    def by(self, *columns: str) -> list[dict[str, Any]]:
        """Sums of all messages, by any of phase, bucket, verb and tensor; with 'step' only of those that are kept.

        Rows of tensors have calls and payload; the rest belongs to messages.  Raises ValueError for another column.
        """
        unknown = [str(column) for column in columns if column not in COLUMNS]
        if unknown:
            raise ValueError(f"columns are {', '.join(COLUMNS)}, got {', '.join(sorted(unknown))}")
        found: dict[tuple[Any, ...], Counter[str]] = {}
        for keys, total in self._all("step" in columns):
            for tensor, amounts in total.by_tensor() if "tensor" in columns else [("", total.amounts())]:
                row = dict(zip(COLUMNS, (*keys, tensor), strict=True))
                found.setdefault(tuple(row[c] for c in columns), Counter()).update(amounts)
        return [dict(zip(columns, key, strict=True)) | sums for key, sums in found.items()]

    def _all(self, each: bool) -> list[tuple[tuple[Any, ...], Sum]]:
        """Step, phase, bucket and verb with their sums: of every message that is kept, or of all there ever were."""
        if each:
            return [(entry[: len(KEYS)], NOTHING.plus(entry)) for entry in self.entries]
        with self._lock:
            self._make()
            return [((None, *key[:-1]), total) for key, total in self._sums.items()]

    def total(self) -> dict[str, int]:
        """Sums of all messages, of steps and of everything else."""
        rows = self.by()
        return rows[0] if rows else dict.fromkeys(AMOUNTS, 0)

    def total_of_steps(self) -> dict[str, int]:
        """Sums of the messages of steps: gradients, parameters of partial steps, norms of shared parameters.

        Not among them are rank 0's parameters at the start, looks at quality, and messages that a script sends by hand.
        """
        rows = [row for row in self.by("phase") if row["phase"] in STEPS]
        return {name: sum(row[name] for row in rows) for name in AMOUNTS}

    def report(self) -> dict[str, dict[str, int]]:
        """Sums of all messages, ``{line: {'calls', 'payload', 'wire'}}``; 'wire' is what was sent.

        Messages of steps have a line for each verb, named by it.  All others have lines of their own behind these,
        named by phase and verb: 'start broadcast', 'quality all_reduce', 'other broadcast'.
        """
        found: dict[str, Counter[str]] = {}
        for row in self.by("phase", "verb"):
            line = row["verb"] if row["phase"] in STEPS else f"{row['phase']} {row['verb']}"
            counts = {"calls": row["calls"], "payload": row["payload"], "wire": row["sent"]}
            found.setdefault(line, Counter()).update(counts)
        return {line: dict(found[line]) for line in sorted(found, key=lambda line: (not of_steps(line), line))}

    def tensors(self, phase: str = "gradients") -> dict[str, int]:
        """Payload bytes of every tensor, in all messages of a phase; what belongs to no tensor comes last.

        Raises ValueError for a phase that there is not.
        """
        rows = self.by("phase", "tensor")
        phases = dict.fromkeys([*PHASES, *(row["phase"] for row in rows)])
        if phase not in phases:
            raise ValueError(f"phase must be one of {', '.join(phases)}, got {phase!r}")
        found = {row["tensor"]: row["payload"] for row in rows if row["phase"] == phase}
        rest = found.pop(REST, 0)
        return found | {REST: rest}

    def as_dict(self) -> dict[str, Any]:
        """All sums, tensors and entries, ready for JSON."""
        now = self.copy()
        return {
            "totals": now.by("phase", "bucket", "verb"),
            "tensors": {phase: now.tensors(phase) for phase in dict.fromkeys(key[0] for key in now._sums if key[-1])},
            "entries": [
                dict(zip((*KEYS, *VOLUME), entry, strict=False))
                | {"tensors": dict(zip(entry.names, np.asarray(entry.parts).tolist(), strict=True))}
                for entry in now.entries
            ],
        }

    def write_json(self, path: str | Path) -> None:
        """Write all sums, tensors and entries as one JSON object."""
        Path(path).write_text(json.dumps(self.as_dict()) + "\n")

    def write_csv(self, path: str | Path, *columns: str) -> None:
        """Write the messages that are kept, one in a line; or sums by some columns, as ``by``.

        A name that a spreadsheet would take for a formula begins with an apostrophe.
        """
        names = (*columns, *_amounts(columns)) if columns else (*KEYS, *VOLUME)
        rows = [[row[name] for name in names] for row in self.by(*columns)] if columns else self.entries
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows(map(units.cell, row[: len(names)]) for row in rows)

    def table(self, *columns: str) -> str:
        """Sums by some of the columns, default phase and verb, as text; bytes, and bits for what is ideal.

        With 'step', what is kept no more is a row of its own.
        """
        columns, now = columns or ("phase", "verb"), self.copy()
        total = now.total()
        kept = Counter(total)
        shown = [c for c in _amounts(columns) if total["sent_between"] or total["received_between"] or c not in BETWEEN]

        def line(first: Sequence[str], row: Mapping[str, int]) -> tuple[str, ...]:
            return (*first, *[""] * (len(columns) - len(first)), *(f"{row[c]:,}" for c in shown))

        lines = [(*columns, *shown), *(line([str(row[c]) for c in columns], row) for row in now.by(*columns))]
        if "step" in columns:
            for row in now.by("step"):
                kept.subtract({c: row[c] for c in AMOUNTS})
            lines += [line(["(not kept)"], kept)] if kept["calls"] else []
        lines.append(line(["total"], total))
        return "\n".join(units.table(lines, left=len(columns)))


def of_steps(line: str) -> bool:
    """Whether a line of a ``report`` counts messages of steps; no step broadcasts, nor did one of older versions."""
    return " " not in line and line != "broadcast"


def _amounts(columns: Sequence[str]) -> tuple[str, ...]:
    """Names of the amounts in rows by these columns."""
    return AMOUNTS[:2] if "tensor" in columns else AMOUNTS
