"""``distopt trace``: merges the ranks' flight records, and shows the first operation at which they part."""

import argparse
import fnmatch
import json
import sys
from pathlib import Path
from typing import Any

from distopt.formatting import printable
from distopt.resilience import flight_recorder
from distopt.resilience.merge import of_one_job, tell
from distopt.run import chrome


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("trace", help="say where ranks parted, from flight records", description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, metavar="FOLDER or FILE", help="default: where they are written")
    parser.add_argument("--chrome", type=Path, metavar="FILE", help="write them as a trace for Perfetto instead")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Print the story; return 1 if there are no records, or malformed ones."""
    try:
        records = [
            flight_recorder.read(file) for path in args.paths or [flight_recorder.folder()] for file in _files(path)
        ]
        if len({r["rank"] for r in records}) < len(records):
            raise ValueError("the records must be of different ranks, got several of one; give those of one job")
        if args.chrome:
            args.chrome.write_text(json.dumps(chrome.trace(of_one_job(records))))
            return 0
    except (OSError, ValueError) as error:
        print(f"distopt trace: {printable(str(error))}", file=sys.stderr)
        return 1
    print("\n".join(map(printable, tell(records))))
    return 0


def _files(path: Path) -> list[Path]:
    """Return a file, or the records in a folder; ValueError if there are none."""
    if not path.is_dir():
        return [path]
    records = sorted(file for file in path.iterdir() if fnmatch.fnmatchcase(file.name, "distopt-flight.*.json"))
    if not records:
        raise ValueError(f"there are no flight records in {path}")
    return records
