"""A folder of checkpoints: each is a folder of files, and is one as soon as it has a manifest."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from distopt.checkpoint.error import CheckpointError
from distopt.checkpoint.pending import sync, write

MANIFEST = "manifest.json"
FORMAT = "distopt checkpoint 1"
NAME = re.compile(r"(\d{6,})-step-\d+")
MOST = 1 << 20  # bytes of a manifest
KINDS = {"save": str, "world_size": int, "step": int, "ranks_differ": bool, "window_of_sums": bool}  # in a manifest


def names(folder: Path) -> list[str]:
    """The checkpoints in a folder that were completed, newest first."""
    found = [p.parent.name for p in folder.glob(f"*/{MANIFEST}") if NAME.fullmatch(p.parent.name)]
    return sorted(found, key=_number, reverse=True)


def next_name(folder: Path, step: int) -> str:
    """What the next checkpoint is called: numbers grow, whatever was removed or never completed."""
    taken = [_number(p.name) for p in folder.glob("*-step-*") if NAME.fullmatch(p.name)]
    return f"{max(taken, default=0) + 1:06d}-step-{step}"


def file_of(place: Path, rank: int | None) -> Path:
    """What one rank alone has to go on with, or (None) what all ranks have alike."""
    return place / ("all" if rank is None else f"rank-{rank}")


def complete(place: Path, about: dict[str, Any]) -> None:
    """Make a checkpoint one: its manifest comes to its place in one stroke, after all else has reached the disk."""
    sync(place.parent)
    write(place / MANIFEST, json.dumps({"format": FORMAT, **about}).encode())


def manifest(place: Path) -> dict[str, Any]:
    """What ``complete`` was told about a checkpoint.  Raises CheckpointError for one that is not whole."""
    path = place / MANIFEST
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MOST))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(path, "manifest", f"cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(path, "manifest", f"is not of the format {FORMAT!r}")
    for name, kind in KINDS.items():
        if type(found.get(name)) is not kind or (kind is int and found[name] < (name == "world_size")):
            raise CheckpointError(path, name, f"must be {kind.__name__}, got {found.get(name)!r:.60}")
    return found


def keep(folder: Path, count: int) -> None:
    """Remove all checkpoints but the newest ``count``, and what is older than those and was never completed."""
    kept = names(folder)[:count]
    oldest = min(map(_number, kept), default=0)
    for place in folder.glob("*-step-*"):
        if NAME.fullmatch(place.name) and place.name not in kept and _number(place.name) < max(oldest, 1):
            discard(place)


def discard(place: Path) -> None:
    """Remove a checkpoint, its manifest first: half of it is none."""
    (place / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)


def _number(name: str) -> int:
    return int(name.partition("-")[0])
