"""A folder of checkpoints: each is a folder of files, and is one as soon as it has a manifest."""

import hashlib
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distopt import files
from distopt.checkpoint import file
from distopt.checkpoint.error import CheckpointError, Misfit
from distopt.checkpoint.pending import prepare, sync
from distopt.checkpoint.strict import parse

MANIFEST = "manifest.json"
FORMAT = "distopt checkpoint 1"
NAME = re.compile(r"(\d{6,})-step-\d+")
FILE = re.compile(rf"(all|rank-\d+|{re.escape(MANIFEST)})(\.tmp\.\d+)?|\.nfs.*")  # what a checkpoint's folder has
MOST = 1 << 20  # bytes of a manifest
VALUES = 10_000  # in it
KINDS = {"save": str, "world_size": int, "step": int, "ranks_differ": bool, "window_of_sums": bool}  # in a manifest


def names(folder: Path) -> list[str]:
    """The checkpoints in a folder, newest first: those that were completed, or of which this user cannot tell.

    "." is the folder itself, if it is a checkpoint.  None is in a folder that is not there.  Raises OSError for one
    that cannot be read, CheckpointError for a file and for a checkpoint that was never completed.
    """
    try:
        mode = os.stat(folder).st_mode
    except FileNotFoundError:
        if folder.is_symlink():
            raise
        return []
    if not stat.S_ISDIR(mode):
        raise CheckpointError(folder, "folder", "must be a folder of checkpoints, or one of them")
    if _completed(folder):
        return ["."]
    found = [name for name in _numbered(folder) if _may_be_completed(folder / name)]
    if not found and NAME.fullmatch(folder.name):
        raise CheckpointError(folder, "manifest", "is not there: this checkpoint was never completed")
    return sorted(found, key=_number, reverse=True)


def uncompleted(folder: Path) -> list[str]:
    """What has the name of a checkpoint, and no manifest."""
    return sorted(name for name in _numbered(folder) if not _may_be_completed(folder / name))


def next_name(folder: Path, step: int) -> str:
    """What the next checkpoint is called: numbers grow, whatever was removed or never completed."""
    return f"{max(map(_number, _numbered(folder)), default=0) + 1:06d}-step-{step}"


def file_of(place: Path, rank: int | None) -> Path:
    """What one rank alone has to go on with, or (None) what all ranks have alike."""
    return place / ("all" if rank is None else f"rank-{rank}")


def complete(place: Path, about: dict[str, Any]) -> None:
    """Make a checkpoint one: its manifest comes to its place in one stroke, after all else has reached the disk."""
    sync(place.parent)
    said = {"format": FORMAT, **about}
    prepare(place / MANIFEST, json.dumps({"seal": _seal(said), **said}).encode()).commit()


def manifest(place: Path) -> dict[str, Any]:
    """What ``complete`` was told about a checkpoint.  Raises CheckpointError for one that is not whole.

    Older ones have no seal: what they say is to be compared with the files (``compare``).
    """
    path = place / MANIFEST
    try:
        found = parse(files.read(path, MOST).decode(), "manifest", VALUES)
    except (OSError, ValueError) as error:
        raise CheckpointError(path, "manifest", f"cannot be read: {error}") from error
    except Misfit as error:
        raise CheckpointError(path, error.field, error.reason) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(path, "manifest", f"is not of the format {FORMAT!r}")
    if found.pop("seal", None) not in (None, _seal(found)):
        raise CheckpointError(path, "manifest", "is damaged: its checksum differs")
    for name, kind in KINDS.items():
        if type(found.get(name)) is not kind or (kind is int and found[name] < (name == "world_size")):
            raise CheckpointError(path, name, f"must be {kind.__name__}, got {found.get(name)!r:.60}")
    return found


def compare(path: Path, about: dict[str, Any], said: dict[str, Any]) -> None:
    """CheckpointError if what a file says about itself is not what the manifest of its checkpoint ``said``."""
    if about.get("save") != said["save"]:
        raise CheckpointError(path, "save", "belongs to another checkpoint")
    for name in KINDS:
        if type(about.get(name)) is not KINDS[name] or about[name] != said[name]:
            raise CheckpointError(path, name, f"is {about.get(name)!r:.60}, and the manifest says {said[name]!r:.60}")


def verify(place: Path) -> dict[str, Any]:
    """What the manifest of a checkpoint says, after all of its files have been read to the last byte.

    Raises CheckpointError or OSError for the first that is missing, damaged, or of another checkpoint.
    """
    said = manifest(place)
    for rank in itertools.chain([None], range(said["world_size"])):
        path = file_of(place, rank)
        about = file.header(path).about
        compare(path, about, said)
        if about.get("rank") != rank:
            raise CheckpointError(path, "rank", f"must be {rank}, got {about.get('rank')!r:.60}")
        for tensor, whole in file.check(path):
            if not whole:
                raise CheckpointError(path, tensor.name, "is damaged: its checksum differs")
    return said


def keep(place: Path, count: int) -> None:
    """Remove the checkpoints beside ``place`` but for the newest ``count``, of which it is one.

    And what is older than those and was never completed.  Links, and folders of another owner or with anything in them
    that no checkpoint has, are nobody's checkpoints: they stay, and do not count.
    """
    owner = os.lstat(place).st_uid
    ours = [name for name in _numbered(place.parent) if _owned(place.parent / name, owner)]
    whole = sorted((name for name in ours if _is_whole(place.parent / name)), key=_number, reverse=True)
    oldest = min(map(_number, [place.name, *whole[:count]]))
    for name in ours:
        if _number(name) < oldest:
            discard(place.parent / name)


def discard(place: Path) -> None:
    """Remove a checkpoint, its manifest first: half of it is none."""
    (place / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)


def _numbered(folder: Path) -> Iterator[str]:
    """What has the name of a checkpoint, whatever it is.  Raises OSError."""
    with os.scandir(folder) as entries:
        yield from (entry.name for entry in entries if NAME.fullmatch(entry.name))


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def _completed(place: Path) -> bool:
    """Has it a manifest?  Raises OSError where nobody may look."""
    try:
        os.stat(place / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _may_be_completed(place: Path) -> bool:
    """The same, True where nobody may look: whoever reads it learns why."""
    try:
        return _completed(place)
    except OSError:
        return True


def _owned(place: Path, owner: int) -> bool:
    """Is it a folder of this owner's, and no link, with nothing in it but what a checkpoint has?"""
    try:
        found = os.lstat(place)
        mine = stat.S_ISDIR(found.st_mode) and found.st_uid == owner
        return mine and all(map(FILE.fullmatch, os.listdir(place)))
    except OSError:
        return False


def _is_whole(place: Path) -> bool:
    """By its manifest."""
    try:
        manifest(place)
    except CheckpointError:
        return False
    return True


def _seal(said: dict[str, Any]) -> str:
    text = json.dumps(said, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()
