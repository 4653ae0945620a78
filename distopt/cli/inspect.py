"""``distopt inspect FILE``: what a checkpoint holds, and whether it is whole; of a folder, its checkpoints."""

import argparse
import reprlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distopt import checkpoint
from distopt.checkpoint import CheckpointError, Header, Tensor, folder, lock
from distopt.checkpoint.error import printable
from distopt.checkpoint.pending import TEMPORARY
from distopt.checkpoint.tree import below
from distopt.units import table

NESTS = dict, list, tuple, Tensor


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("inspect", help="show what a checkpoint holds", description=__doc__)
    parser.add_argument("path", type=Path, metavar="FILE", help="a file, or a folder of them")
    parser.set_defaults(main=main)


def main(given: argparse.Namespace) -> int:
    """Print it; 1 if something is damaged, not whole, or cannot be read."""
    try:
        return show_folder(given.path) if given.path.is_dir() else show_file(given.path)
    except (CheckpointError, OSError) as error:
        print(f"distopt inspect: {error}", file=sys.stderr)
        return 1


def show_folder(given: Path) -> int:
    """Its checkpoints, the newest first, or the one that it is: are they whole?  And a line per file, by its header."""
    names = folder.names(given)
    wrong = 0 if names else show_files(given)
    for place in (given / name for name in names):
        wrong |= attempt(lambda place=place: complete(place)) | show_files(place)  # type: ignore[misc]
    for name in folder.uncompleted(given):
        print(f"{printable(str(given / name))}: never completed")
    return wrong


def complete(place: Path) -> str:
    """A checkpoint in one line, after all of it has been read; CheckpointError if it is not whole."""
    try:
        said = folder.verify(place)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(place, "not whole", str(error)) from error
    return f"{printable(str(place))}: complete, of {said['world_size']} ranks after step {said['step']}"


def show_files(place: Path) -> int:
    """What the files in a folder say, the newest first."""
    found = [f for f in place.rglob("*") if f.is_file() and f.suffix != ".json" and not hidden(f.name)]
    newest = sorted(found, key=lambda f: f.stat().st_mtime_ns, reverse=True)
    return max((attempt(lambda f=f: summary(f, checkpoint.header(f))) for f in newest), default=0)  # type: ignore[misc]


def hidden(name: str) -> bool:
    """Is it nobody's file: half-written, or a folder's lock?"""
    return name == lock.NAME or TEMPORARY.fullmatch(name) is not None


def attempt(describe: Callable[[], str]) -> int:
    """Print a description, or why there is none; 1 then."""
    try:
        print(describe())
    except (CheckpointError, OSError) as error:
        print(error)
        return 1
    return 0


def show_file(path: Path) -> int:
    """All of it in short, and each tensor with what its checksum says."""
    found = checkpoint.header(path)
    print(summary(path, found))
    print_table([("value", ""), *((name, short(x)) for name, x in values(found.tree, "") if type(x) is not Tensor)])
    checked = list(checkpoint.check(path))
    head = ("tensor", "dtype", "shape", "bytes", "checksum")
    print_table([head, *(row(tensor, "ok" if whole else "DIFFERS") for tensor, whole in checked)])
    damaged = [tensor.name for tensor, whole in checked if not whole]
    if damaged:
        raise CheckpointError(path, damaged[0], f"is damaged: its checksum differs ({len(damaged)} of {len(checked)})")
    return 0


def summary(path: Path, found: Header) -> str:
    """A file in one line."""
    about = printable(", ".join(f"{name} {short(value)}" for name, value in found.about.items()))
    size = f"{found.nbytes:,} bytes in {len(found.tensors)} tensors"
    return f"{printable(str(path))}: {about or 'nothing said about it'}; {size}, by distopt {printable(found.distopt)}"


def row(tensor: Tensor, checksum: str) -> tuple[str, ...]:
    """Of the table of tensors."""
    return tensor.name or "/", str(tensor.dtype), str(tensor.shape), f"{tensor.nbytes:,}", checksum


def values(tree: Any, at: str) -> Iterator[tuple[str, Any]]:
    """What is not a dict, nor a list of more than plain values, by name."""
    items = dict(enumerate(tree)) if isinstance(tree, list | tuple) and type(tree) is not Tensor else tree
    if type(tree) is dict or (type(items) is dict and any(isinstance(x, NESTS) for x in items.values())):
        for key, value in items.items():
            yield from values(value, below(at, str(key)))
    else:
        yield at or "/", tree


def short(value: Any) -> str:
    """A value in a few words."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python prints no int of thousands of digits
        return "more digits than can be printed"


def print_table(rows: list[tuple[str, ...]]) -> None:
    """Columns as wide as they need to be; nothing if there is only a heading."""
    for line in table(rows, left=len(rows[0])) if len(rows) > 1 else []:
        print(line)
