"""``distopt record -n N script.py``: run a script, and keep the gradients of some of its steps."""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from distopt import tape
from distopt.cli import run
from distopt.numbers import whole


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("record", help="run a script, and record its gradients", description=__doc__)
    parser.add_argument("-n", "--ranks", type=int, default=1, help="number of ranks (default: 1)")
    parser.add_argument("--steps", type=int, default=10, metavar="K", help="steps to record at most (default: 10)")
    parser.add_argument("--every", type=int, default=1, metavar="M", help="steps 0, M, 2M, ... (default: 1)")
    parser.add_argument(
        "--out", type=Path, default=Path("trace.safetensors"), metavar="FILE", help="default: trace.safetensors"
    )
    run.add_script(parser)
    parser.set_defaults(main=main, restarts=0)


def main(given: argparse.Namespace) -> int:
    """Run it; the exit code is the script's, but 2 for a success of which nothing could be recorded."""
    code, script = 0, given.module or given.script
    try:
        for flag, number in (("-n", given.ranks), ("--steps", given.steps), ("--every", given.every)):
            whole(flag, number, least=1)
        if not script:
            raise ValueError("wants a script")
        tape.check_place(given.out)
        # beside the result, where there is room for it
        with tempfile.TemporaryDirectory(prefix=".distopt-record-", dir=given.out.parent) as folder:
            code = run.start_given(given, tape.request(Path(folder), given.steps, given.every))
            found = tape.join(Path(folder), given.out, Path(script[0]).name)
    except (OSError, ValueError) as error:
        _say(str(error))
        return code or 2
    steps, recorded = len(found.steps), found.about["recorded"]
    fewer = f", and not {given.steps}" * (steps < given.steps)
    fewer += f" (of {recorded} that were made a file's head can name no more)" * (steps < recorded)
    first = ", of the first of several optimizers" * found.about["others"]
    size = f"{given.out.stat().st_size:,} bytes"
    _say(f"{steps} steps{fewer}, of {found.ranks} ranks{first}, in {given.out}: {size}")
    return code


def _say(text: str) -> None:
    print(f"distopt record: {text}", file=sys.stderr)
