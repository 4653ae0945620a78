"""Flight records: one file per rank that says what it did last."""

import contextlib
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distopt import files, plain
from distopt.watch import place
from distopt.watch.recorder import Recorder

VARIABLE = "DISTOPT_FLIGHT"  # the folder; the current one by default
FORMAT = "distopt flight record 1"
KEYS = {"format", "rank", "reason", "host", "pid", "wall", "now", "at", "stack", "logs", "operations"}
ENTRY = {"log", "number", "text", "bytes", "began", "ended"}
LARGEST = 16 << 20  # bytes


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where records are written."""
    return Path(environ.get(VARIABLE) or ".").absolute()


def record(recorder: Recorder, rank: int, reason: str) -> dict[str, Any]:
    """Plain numbers and texts; times are seconds of this rank's own clock, which shows ``now`` at ``wall``."""
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
        "at": place.place(),
        "stack": place.stack(),
        "logs": {log.name: log.ranks for log in recorder.known()},
        "operations": [o.entry() for o in recorder.operations()],
    }


def write(recorder: Recorder, rank: int, reason: str) -> Path:
    """Write this rank's record, whole or not at all, for its owner's eyes; raises OSError."""
    name = f"distopt-flight.{rank}.json"
    there = folder()
    there.mkdir(parents=True, exist_ok=True)
    draft = there / f".{name}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(draft, flags, 0o600), "w") as file:
        json.dump(record(recorder, rank, reason), file, indent=1)
    return draft.replace(there / name)


def write_if_wanted(recorder: Recorder, rank: int, reason: str) -> None:
    """At the end by an exception: only if a folder was named, since most exceptions have nothing to do with waiting."""
    if os.environ.get(VARIABLE):
        with contextlib.suppress(OSError):
            write(recorder, rank, reason)


def read(path: Path) -> dict[str, Any]:
    """A record; ValueError for a file that is none, OSError for one that cannot be read."""
    try:
        found = plain.parse(files.read(path, LARGEST))
    except (ValueError, RecursionError):
        found = None
    if not _is_record(found):
        raise ValueError(f"{path} is no flight record")
    return dict(found)


def _is_record(x: Any) -> bool:
    if not isinstance(x, dict) or x.get("format") != FORMAT or not set(x) >= KEYS:
        return False
    kinds = {"rank": int, "reason": str, "at": str, "wall": int | float, "now": int | float, "operations": list}
    if not all(isinstance(x[key], kind) for key, kind in kinds.items()) or not isinstance(x["logs"], dict):
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
