"""What the ranks have written, in one file."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distopt import checkpoint
from distopt.checkpoint import CheckpointError, pending
from distopt.tape.tape import FORMAT, Tape, dtype

Places = list[int | None]  # of a step's gradients, in plan order


class Part(NamedTuple):
    """One rank's."""

    head: dict[str, Any]
    steps: dict[int, Places]
    data: np.ndarray  # uint8


def check_place(out: Path) -> None:
    """Raise OSError if a tape there would take the place of anything but another one."""
    pending.check_place(out, "tape", _check_tape)


def join(folder: Path, out: Path, script: str) -> Tape:
    """Make one tape of what recorders left in a folder, of the steps that all ranks have.

    Its ``about`` has their number as 'recorded', which is more than those on the tape if the head of a file cannot name
    all: it has 8 MB of text, of which a tensor takes a hundred bytes or more.
    And 'others': is there another optimizer, of which nothing was recorded?

    Raises ValueError if there is no such step, OSError if the file cannot be written; it is there as a whole or not at
    all.  FileExistsError if something that is no tape has come to its place, and the tape is beside it.
    """
    found = {int(file.stem): _read(file) for file in folder.glob("*.steps")}
    parts = [found[rank] for rank in sorted(found) if found[rank].head]
    steps = sorted(set.intersection(*(set(part.steps) for part in parts))) if parts else []
    if not steps or len(parts) < parts[0].head["ranks"]:
        raise ValueError(
            "nothing was recorded: there is no step of a DistOpt or Trainer that all ranks have made; "
            "those of virtual ranks are not recorded"
        )
    about = {"format": FORMAT, "script": script, "recorded": len(steps), "others": any(folder.glob("*.others"))}
    while True:
        tree = {str(s): {str(rank): _gradients(part, s) for rank, part in enumerate(parts)} for s in steps}
        try:
            written = checkpoint.prepare(out, tree, about | parts[0].head | {"steps": steps})
        except CheckpointError as error:  # before anything was written
            if not error.fits or len(steps) == 1:
                raise
            steps = steps[: max(1, int(len(steps) * min(error.fits, 0.9)))]
        else:
            written.commit_as("tape", _check_tape)
            return Tape(out)


def _check_tape(path: str | os.PathLike[str]) -> None:
    """ValueError for what is no tape, of however many steps and ranks."""
    if checkpoint.header(path).about.get("format") != FORMAT:
        raise ValueError(f"{path} is no tape")


def _read(file: Path) -> Part:
    lines = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    data = file.with_suffix(".bytes")
    mapped = np.memmap(data, np.uint8, "r") if data.stat().st_size else np.empty(0, np.uint8)
    return Part(lines[0] if lines else {}, {line["step"]: line["at"] for line in lines[1:]}, mapped)


def _gradients(part: Part, step: int) -> dict[str, np.ndarray]:
    """One step's, by name; zeros where the loss had none, as they count."""
    found = {}
    for (name, shape, code), at in zip(part.head["order"], part.steps[step], strict=True):
        empty = np.zeros(shape, dtype(code))
        if at is None or not empty.nbytes:
            found[name] = empty
        else:
            found[name] = np.asarray(part.data[at : at + empty.nbytes].view(empty.dtype).reshape(shape))
    return found
