"""``distopt advise``: which mode makes a step the fastest, and where it begins to pay; or that none does."""

import argparse
import sys
from typing import Any

from distopt.checkpoint.error import printable
from distopt.cli import setting
from distopt.volume import DEFAULT, advise, buckets, shapes


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("advise", help="say whether compression pays on a network", description=__doc__)
    setting.add_setting(parser, ",".join(DEFAULT), "64")
    parser.add_argument("--backward", type=float, default=0.0, metavar="S", help="seconds of a backward pass")
    parser.set_defaults(main=main)


def main(given: argparse.Namespace) -> int:
    """Print the advice for each number of ranks; 2 if an argument is wrong."""
    try:
        network = setting.wire(given)
        numbers = setting.ranks(given, network)
        model = setting.MODEL if given.model is None else given.model
        gradients = buckets(shapes(model)[::-1], given.threshold)
        measure = setting.computing(given)
        found = [advise(gradients, ranks, network, given.modes, given.backward, measure) for ranks in numbers]
    except (OSError, ValueError, TypeError) as error:
        print(f"distopt advise: {printable(str(error))}", file=sys.stderr)
        return 2
    print("\n\n".join(f"{printable(model)} on {advice}" for advice in found))
    return 0
