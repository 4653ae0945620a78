"""A folder of checkpoints: each is a folder of files, and is complete as soon as it has a manifest."""

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

from distopt.checkpoint import file
from distopt.checkpoint.error import DAMAGED, REMEDY, CheckpointError, Misfit
from distopt.checkpoint.head import parse
from distopt.io import files
from distopt.io.pending import prepare, sync

MANIFEST = "manifest.json"
FORMAT = "distopt checkpoint 1"
NAME = re.compile(r"(\d{6,})-step-\d+")
# the files of a checkpoint's folder
FILE = re.compile(rf"(all|rank-\d+|{re.escape(MANIFEST)})(\.tmp\.\d+)?|\.nfs.*")
# of a manifest
MAX_MANIFEST_BYTES = 1 << 20
# in a manifest
VALUES = 10_000
# in a manifest
KINDS = {"save": str, "world_size": int, "step": int, "ranks_differ": bool, "window_of_sums": bool}
# the fields of a manifest of an older version
UNSEALED = {"format", "options", "optimizer", *KINDS}


def names(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder, newest first; "." is the folder itself, if it is one."""
    # They are those that were completed, and those of which this user cannot tell.
    try:
        mode = os.stat(folder).st_mode
    except FileNotFoundError:
        if folder.is_symlink():
            raise
        return []
    if not stat.S_ISDIR(mode):
        raise CheckpointError(folder, "folder", "must be a folder of checkpoints, or one of them, got a file")
    if _completed(folder):
        return ["."]
    completed = [name for name in _numbered(folder) if _may_be_completed(folder / name)]
    if not completed and NAME.fullmatch(folder.name):
        raise CheckpointError(
            folder, "manifest", "must be there, got none: this checkpoint was never completed; use an older one"
        )
    return sorted(completed, key=_number, reverse=True)


def uncompleted(folder: Path) -> list[str]:
    """Return the sorted names of folders that are named like checkpoints and have no manifest."""
    return sorted(name for name in _numbered(folder) if not _may_be_completed(folder / name))


def next_name(folder: Path, step: int) -> str:
    """Return the name of the next checkpoint in a folder: its number is above all that are there, complete or not."""
    return f"{max(map(_number, _numbered(folder)), default=0) + 1:06d}-step-{step}"


def file_of(checkpoint_dir: Path, rank: int | None) -> Path:
    """Return the path of the file with one rank's own state, or (``rank`` None) with the state that all ranks share."""
    return checkpoint_dir / ("all" if rank is None else f"rank-{rank}")


def complete(checkpoint_dir: Path, about: dict[str, Any]) -> None:
    """Complete a checkpoint: write its manifest at once, after all of its files have reached the disk."""
    sync(checkpoint_dir.parent)
    fields = {"format": FORMAT, **about}
    prepare(checkpoint_dir / MANIFEST, json.dumps({"seal": _seal(fields), **fields}).encode()).commit()


def manifest(checkpoint_dir: Path) -> dict[str, Any]:
    """Return the fields that ``complete`` wrote for a checkpoint."""
    # Manifests of older versions have no seal: their fields are to be compared with the files (`compare`).  One with
    # another field has lost its seal.
    path = checkpoint_dir / MANIFEST
    try:
        fields = parse(files.read(path, MAX_MANIFEST_BYTES).decode(), "manifest", VALUES)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            path, "manifest", f"must be a text that can be read, got {type(error).__name__}: {error}"
        ) from error
    except Misfit as error:
        raise CheckpointError(path, error.field, error.reason) from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        found = fields.get("format") if isinstance(fields, dict) else fields
        raise CheckpointError(path, "manifest", f"must be of the format {FORMAT!r}, got {found!r:.40}; {REMEDY}")
    seal = fields.pop("seal", None)
    if seal != _seal(fields) and not (seal is None and fields.keys() <= UNSEALED):
        raise CheckpointError(path, "manifest", DAMAGED)
    for name, kind in KINDS.items():
        if type(fields.get(name)) is not kind or (kind is int and fields[name] < (name == "world_size")):
            raise CheckpointError(path, name, f"must be {kind.__name__}, got {fields.get(name)!r:.60}")
    return fields


def compare(path: Path, about: dict[str, Any], fields: dict[str, Any]) -> None:
    """Compare what a file says about itself with the manifest of its checkpoint."""
    if about.get("save") != fields["save"]:
        reason = f"must be that of the manifest, got one that belongs to another checkpoint; {REMEDY}"
        raise CheckpointError(path, "save", reason)
    for name in KINDS:
        if type(about.get(name)) is not KINDS[name] or about[name] != fields[name]:
            reason = f"must be {fields[name]!r:.60} as in the manifest, got {about.get(name)!r:.60}; {REMEDY}"
            raise CheckpointError(path, name, reason)


def verify(checkpoint_dir: Path) -> dict[str, Any]:
    """Read all files of a checkpoint to the last byte, and return its manifest."""
    fields = manifest(checkpoint_dir)
    for rank in itertools.chain([None], range(fields["world_size"])):
        path = file_of(checkpoint_dir, rank)
        about = file.header(path).about
        compare(path, about, fields)
        if about.get("rank") != rank:
            raise CheckpointError(path, "rank", f"must be {rank}, got {about.get('rank')!r:.60}")
        for tensor, intact in file.check(path):
            if not intact:
                raise CheckpointError(path, tensor.name, DAMAGED)
    return fields


def keep(checkpoint_dir: Path, count: int) -> None:
    """Remove all but the newest ``count`` checkpoints beside ``checkpoint_dir``, which is one of them."""
    # Folders that are older than those and were never completed are removed too.  Links, and folders of another owner
    # or with files that no checkpoint has, stay and do not count.
    owner = os.lstat(checkpoint_dir).st_uid
    ours = [name for name in _numbered(checkpoint_dir.parent) if _owned(checkpoint_dir.parent / name, owner)]
    complete_names = sorted(
        (name for name in ours if _is_whole(checkpoint_dir.parent / name)), key=_number, reverse=True
    )
    oldest = min(map(_number, [checkpoint_dir.name, *complete_names[:count]]))
    for name in ours:
        if _number(name) < oldest:
            discard(checkpoint_dir.parent / name)


def discard(checkpoint_dir: Path) -> None:
    """Remove a checkpoint, its manifest first, so that the rest is no checkpoint if the removal stops halfway."""
    (checkpoint_dir / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint_dir, ignore_errors=True)


def _numbered(folder: Path) -> Iterator[str]:
    """Yield the names of all entries that are named like checkpoints; raises OSError."""
    with os.scandir(folder) as entries:
        yield from (entry.name for entry in entries if NAME.fullmatch(entry.name))


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def _completed(checkpoint_dir: Path) -> bool:
    """Tell if a folder has a manifest; raises OSError where this user may not look."""
    try:
        os.stat(checkpoint_dir / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _may_be_completed(checkpoint_dir: Path) -> bool:
    """Tell if a folder has a manifest; True where this user may not look, so that its reader learns why."""
    try:
        return _completed(checkpoint_dir)
    except OSError:
        return True


def _owned(checkpoint_dir: Path, owner: int) -> bool:
    """Tell if a path is a folder of this owner, and no link, with only files that checkpoints have."""
    try:
        status = os.lstat(checkpoint_dir)
        mine = stat.S_ISDIR(status.st_mode) and status.st_uid == owner
        return mine and all(map(FILE.fullmatch, os.listdir(checkpoint_dir)))
    except OSError:
        return False


def _is_whole(checkpoint_dir: Path) -> bool:
    """Tell if a checkpoint has a manifest that can be read."""
    try:
        manifest(checkpoint_dir)
    except CheckpointError:
        return False
    return True


def _seal(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()
