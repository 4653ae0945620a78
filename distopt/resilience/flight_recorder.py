"""Flight records: one file per rank with its last operations."""

import contextlib
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distopt.io import files, pending, strict_json
from distopt.resilience.operation_log import OperationRecorder
from distopt.resilience.script_line import script_line, stack

VARIABLE = "DISTOPT_FLIGHT"  # the folder; the current one by default
FORMAT = "distopt flight record 1"
KEYS = {"format", "rank", "reason", "host", "pid", "wall", "now", "at", "stack", "logs", "operations"}
ENTRY = {"log", "number", "text", "bytes", "began", "ended"}
RANGE = {"phase": str, "bucket": int | None, "bytes": int, "thread": str, "began": int | float, "ended": int | float}
MAX_BYTES = 16 << 20  # of a file


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder in which records are written: ``DISTOPT_FLIGHT``, or the current folder."""
    return Path(environ.get(VARIABLE) or ".").absolute()


def record(recorder: OperationRecorder, rank: int, reason: str) -> dict[str, Any]:
    """Return this rank's record as plain numbers and texts."""
    # Times are seconds of this rank's monotonic clock, which shows `now` when the wall clock shows `wall`.
    # rank: the number of this process in the job.
    wall, monotonic = recorder.anchor
    now = time.monotonic()
    return {
        "format": FORMAT,
        "rank": rank,
        "reason": reason,
        "host": platform.node(),
        "pid": os.getpid(),
        "wall": wall + now - monotonic,
        "now": now,
        "at": script_line(),
        "stack": stack(),
        "logs": {log.name: log.ranks for log in recorder.known()},
        "operations": [o.entry() for o in recorder.operations()],
        "ranges": [r._asdict() for r in recorder.ranges.copy()],
    }


def write(recorder: OperationRecorder, rank: int, reason: str) -> Path:
    """Write this rank's record, whole or not at all, to a file that only its owner can read; return its path."""
    # No disk is waited for.
    path = folder() / f"distopt-flight.{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    pending.sweep(path.parent, path.name)  # of a rank that was ended while it wrote
    text = json.dumps(record(recorder, rank, reason), indent=1)
    pending.prepare(path, text.encode(), durable=False).commit()
    return path


def write_if_wanted(recorder: OperationRecorder, rank: int, reason: str) -> None:
    """Write a record at the end by an exception, if ``DISTOPT_FLIGHT`` names a folder; errors are ignored."""
    # Without the variable there is none, since most exceptions have nothing to do with waiting.
    if os.environ.get(VARIABLE):
        with contextlib.suppress(OSError):
            write(recorder, rank, reason)


def read(path: Path) -> dict[str, Any]:
    """Return the record in a file; ValueError if it is no flight record."""
    try:
        content = strict_json.parse(files.read(path, MAX_BYTES))
    except (ValueError, RecursionError):
        content = None
    if not _is_record(content):
        raise ValueError(f"{path} must be a flight record, got another file; give those that a job wrote to {VARIABLE}")
    return dict(content)


def _is_record(x: Any) -> bool:
    if not isinstance(x, dict) or x.get("format") != FORMAT or not set(x) >= KEYS:
        return False
    kinds = {"rank": int, "reason": str, "at": str, "wall": int | float, "now": int | float, "operations": list}
    if not all(isinstance(x[key], kind) for key, kind in kinds.items()) or not isinstance(x["logs"], dict):
        return False
    ranges = x.get("ranges", [])  # which older records lack
    if not isinstance(ranges, list) or not all(map(_is_range, ranges)):
        return False
    members = x["logs"].values()
    return all(isinstance(m, list) and all(isinstance(r, int) for r in m) for m in members) and all(
        map(_is_entry, x["operations"])
    )


def _is_entry(x: Any) -> bool:
    if not isinstance(x, dict) or not set(x) >= ENTRY:
        return False
    words = all(isinstance(x[key], str) for key in ("log", "text"))
    return words and all(isinstance(x[key], int | float) for key in ("number", "bytes", "began", "ended"))


def _is_range(x: Any) -> bool:
    return isinstance(x, dict) and set(x) >= set(RANGE) and all(isinstance(x[key], kind) for key, kind in RANGE.items())
