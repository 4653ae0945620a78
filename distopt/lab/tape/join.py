"""Joining the files of all ranks into one tape."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distopt import checkpoint
from distopt.checkpoint import CheckpointError
from distopt.io import pending
from distopt.lab.tape.tape import FORMAT, Tape, dtype

Offsets = list[int | None]  # byte offsets of a step's gradients, in plan order


class RankFiles(NamedTuple):
    """The files of one rank."""

    head: dict[str, Any]  # what the recorder said at the start: ranks, optimizer, and parameters in plan order
    steps: dict[int, Offsets]  # where each gradient starts in data, in bytes; None where the loss had none
    data: np.ndarray  # all gradients, uint8


def check_replaceable(out: Path) -> None:
    """Raise OSError if a tape at this path would replace anything but another tape."""
    pending.check_replaceable(out, "tape", _check_tape)


def join(folder: Path, out: Path, script: str) -> Tape:
    """Join the recorders' files of all ranks into one tape, of the steps that all ranks have, all or nothing.

    Its ``about`` has the number of these steps as 'recorded'.  The tape may hold fewer, since the head of a file is at
    most 8 MB of text, of which a tensor takes a hundred bytes or more.  'others' tells whether there is another
    optimizer, of which nothing was recorded.

    Raises:
        ValueError: there is no step that all ranks have.
        FileExistsError: something that is no tape has come to its place; the tape is in a file beside it.
        OSError: the file cannot be written.
    """
    by_rank = {int(file.stem): _read(file) for file in folder.glob("*.steps")}
    parts = [by_rank[rank] for rank in sorted(by_rank) if by_rank[rank].head]
    steps = sorted(set.intersection(*(set(part.steps) for part in parts))) if parts else []
    if not steps or len(parts) < parts[0].head["ranks"]:
        raise ValueError(
            "steps must be at least one that all ranks have made with a DistOpt or Trainer, got none; those of virtual "
            "ranks are not recorded"
        )
    about = {"format": FORMAT, "script": script, "recorded": len(steps), "others": any(folder.glob("*.others"))}
    while True:
        tree = {str(s): {str(rank): _gradients(part, s) for rank, part in enumerate(parts)} for s in steps}
        try:
            written = checkpoint.prepare(out, tree, about | parts[0].head | {"steps": steps})
        except CheckpointError as error:  # nothing was written yet
            if not error.fits or len(steps) == 1:
                raise
            steps = steps[: max(1, int(len(steps) * min(error.fits, 0.9)))]
        else:
            written.commit_as("tape", _check_tape)
            return Tape(out)


def _check_tape(path: str | os.PathLike[str]) -> None:
    """Raise ValueError for a file that is no tape."""
    if checkpoint.header(path).about.get("format") != FORMAT:
        raise ValueError(f"{path} must be a tape, got another checkpoint; record one with distopt record")


def _read(file: Path) -> RankFiles:
    lines = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    data = file.with_suffix(".bytes")
    mapped = np.memmap(data, np.uint8, "r") if data.stat().st_size else np.empty(0, np.uint8)
    return RankFiles(lines[0] if lines else {}, {line["step"]: line["at"] for line in lines[1:]}, mapped)


def _gradients(part: RankFiles, step: int) -> dict[str, np.ndarray]:
    """Return the gradients of one step by name; zeros where the loss had none."""
    gradients = {}
    for (name, shape, code), offset in zip(part.head["order"], part.steps[step], strict=True):
        empty = np.zeros(shape, dtype(code))
        if offset is None or not empty.nbytes:
            gradients[name] = empty
        else:
            gradients[name] = np.asarray(part.data[offset : offset + empty.nbytes].view(empty.dtype).reshape(shape))
    return gradients
