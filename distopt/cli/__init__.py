"""The command line: one file per command."""

import argparse
from collections.abc import Sequence

from distopt.cli import advise, bench, compare, doctor, inspect, record, run, trace, volume

COMMANDS = (run, doctor, inspect, trace, record, compare, bench, volume, advise)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(prog="distopt", description="N processes train one model.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    given = parser.parse_args(argv)
    return int(given.main(given))
