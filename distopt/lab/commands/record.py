"""``distopt record -n N script.py``: a run of a script that keeps the gradients of some of its steps."""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from distopt.checks import check_int
from distopt.lab.tape.join import check_replaceable, join
from distopt.lab.tape.recorder import request
from distopt.run import run


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


def main(args: argparse.Namespace) -> int:
    """Run the script and write the tape; return the script's exit code, or 2 for a success with nothing recorded."""
    code, script = 0, args.module or ["-c"] * bool(args.code) or args.script
    try:
        for flag, number in (("-n", args.ranks), ("--steps", args.steps), ("--every", args.every)):
            check_int(flag, number, least=1)
        if not script:
            raise ValueError("the script must be given, got none; write it after the options")
        check_replaceable(args.out)
        # beside the result, where there is room for it
        with tempfile.TemporaryDirectory(prefix=".distopt-record-", dir=args.out.parent) as folder:
            code = run.start_given(args, request(Path(folder), args.steps, args.every))
            joined = join(Path(folder), args.out, Path(script[0]).name)
    except (OSError, ValueError) as error:
        _say(str(error))
        return code or 2
    steps, recorded = len(joined.steps), joined.about["recorded"]
    fewer = f", and not {args.steps}" * (steps < args.steps)
    fewer += f" (of {recorded} that were made a file's head can name no more)" * (steps < recorded)
    first = ", of the first of several optimizers" * joined.about["others"]
    size = f"{args.out.stat().st_size:,} bytes"
    _say(f"{steps} steps{fewer}, of {joined.ranks} ranks{first}, in {args.out}: {size}")
    return code


def _say(text: str) -> None:
    print(f"distopt record: {text}", file=sys.stderr)
