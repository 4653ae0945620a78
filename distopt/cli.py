"""The command line of distopt: one file per command."""

import argparse
import io
import os
import sys
from collections.abc import Sequence

from distopt.lab.commands import advise, bench, compare, prove, record, volume
from distopt.run import doctor, inspect, run, trace
from distopt.version import __version__

COMMANDS = (run, doctor, prove, inspect, trace, record, compare, bench, volume, advise)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(prog="distopt", description="N processes train one model.")
    parser.add_argument("--version", action="version", version=f"distopt {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for command in COMMANDS:
        command.add_to(commands)
    for parsed in commands.choices.values():
        parsed.description = str(parsed.description).replace("``", "")
    words = sys.argv[1:] if argv is None else argv
    if not words:
        parser.print_help()
        return 2
    args, unknown = parser.parse_known_args(words)
    if unknown:
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a name that this terminal has no letters for
            stream.reconfigure(errors="backslashreplace")
    code = 0
    try:
        code = int(args.main(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever reads has seen enough; nothing more is to be flushed there.
        _drop_output()
        return code
    except OSError as error:
        print(f"distopt {args.command}: {error}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:
            # It was the output that failed, and would fail once more at exit.
            _drop_output()
        return 2


def _drop_output() -> None:
    """Send the rest of the standard output to nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
