"""``distopt inspect FILE``: what a checkpoint holds, and whether it is intact; for a folder, its checkpoints."""

import argparse
import reprlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distopt import checkpoint
from distopt.checkpoint import CheckpointError, Header, Tensor, folder, lock
from distopt.checkpoint.error import DAMAGED
from distopt.checkpoint.tree import below
from distopt.formatting import printable, table
from distopt.io.pending import TEMPORARY

NESTS = dict, list, tuple, Tensor


def add_to(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="show what a checkpoint holds", description=__doc__)
    parser.add_argument("path", type=Path, metavar="FILE", help="a file, or a folder of them")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Print the content; return 1 if something is damaged, incomplete, or cannot be read."""
    try:
        return show_folder(args.path) if args.path.is_dir() else show_file(args.path)
    except (CheckpointError, OSError) as error:
        print(f"distopt inspect: {error}", file=sys.stderr)
        return 1


def show_folder(path: Path) -> int:
    """Print whether each checkpoint of a folder, or the one that it is, is intact, newest first; return 1 if not."""
    # Each file gets a line, by its header.
    names = folder.names(path)
    wrong = 0 if names else show_files(path)
    for checkpoint_dir in (path / name for name in names):
        wrong |= attempt(lambda checkpoint_dir=checkpoint_dir: complete(checkpoint_dir)) | show_files(checkpoint_dir)  # type: ignore[misc]
    for name in folder.uncompleted(path):
        print(f"{printable(str(path / name))}: never completed")
    return wrong


def complete(checkpoint_dir: Path) -> str:
    """Read a checkpoint completely, and describe it in one line; CheckpointError if it is damaged."""
    try:
        said = folder.verify(checkpoint_dir)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(checkpoint_dir, "not whole", str(error)) from error
    return f"{printable(str(checkpoint_dir))}: complete, of {said['world_size']} ranks after step {said['step']}"


def show_files(checkpoint_dir: Path) -> int:
    """Print a line for each file in a folder, by its header, the newest first."""
    files = [f for f in checkpoint_dir.rglob("*") if f.is_file() and f.suffix != ".json" and not hidden(f.name)]
    newest = sorted(files, key=lambda f: f.stat().st_mtime_ns, reverse=True)
    return max((attempt(lambda f=f: summary(f, checkpoint.header(f))) for f in newest), default=0)  # type: ignore[misc]


def hidden(name: str) -> bool:
    """Tell whether a file is half-written, or a folder's lock."""
    return name == lock.NAME or TEMPORARY.fullmatch(name) is not None


def attempt(describe: Callable[[], str]) -> int:
    """Print a description, or the error that prevents it; return 1 then."""
    try:
        print(describe())
    except (CheckpointError, OSError) as error:
        print(error)
        return 1
    return 0


def show_file(path: Path) -> int:
    """Print the values of a file, and each tensor with the result of its checksum; CheckpointError if one differs."""
    header = checkpoint.header(path)
    print(summary(path, header))
    print_table([("value", ""), *((name, short(x)) for name, x in values(header.tree, "") if type(x) is not Tensor)])
    checked = list(checkpoint.check(path))
    head = ("tensor", "dtype", "shape", "bytes", "checksum")
    print_table([head, *(row(tensor, "ok" if intact else "DIFFERS") for tensor, intact in checked)])
    damaged = [tensor.name for tensor, intact in checked if not intact]
    if damaged:
        raise CheckpointError(path, damaged[0], f"{DAMAGED} ({len(damaged)} of {len(checked)} tensors)")
    return 0


def summary(path: Path, header: Header) -> str:
    """Describe a file in one line."""
    about = printable(", ".join(f"{name} {short(value)}" for name, value in header.about.items()))
    size = f"{header.nbytes:,} bytes in {len(header.tensors)} tensors"
    return f"{printable(str(path))}: {about or 'nothing said about it'}; {size}, by distopt {printable(header.distopt)}"


def row(tensor: Tensor, checksum: str) -> tuple[str, ...]:
    """Return a row of the table of tensors."""
    return tensor.name or "/", str(tensor.dtype), str(tensor.shape), f"{tensor.nbytes:,}", checksum


def values(tree: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts and lists, by name."""
    items = dict(enumerate(tree)) if isinstance(tree, list | tuple) and type(tree) is not Tensor else tree
    if type(tree) is dict or (type(items) is dict and any(isinstance(x, NESTS) for x in items.values())):
        for key, value in items.items():
            yield from values(value, below(at, str(key)))
    else:
        yield at or "/", tree


def short(value: Any) -> str:
    """Format a value in a few words."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python prints no int of thousands of digits
        return "more digits than can be printed"


def print_table(rows: list[tuple[str, ...]]) -> None:
    """Print aligned columns; nothing if there is only a heading."""
    for line in table(rows, left=len(rows[0])) if len(rows) > 1 else []:
        print(line)
