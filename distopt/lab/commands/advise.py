"""``distopt advise``: the mode that makes a step the fastest, and the limits from which it pays; or that none does."""

import argparse
import sys
from typing import Any

from distopt.formatting import printable
from distopt.lab import DEFAULT, advise, buckets, shapes
from distopt.lab.commands import setting


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("advise", help="say whether compression pays on a network", description=__doc__)
    setting.add_setting(parser, ",".join(DEFAULT), "64")
    parser.add_argument("--backward", type=float, default=0.0, metavar="S", help="seconds of a backward pass")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Print the advice for each number of ranks; return 2 if an argument is wrong."""
    try:
        network = setting.wire(args)
        numbers = setting.ranks(args, network)
        model = setting.MODEL if args.model is None else args.model
        gradients = buckets(shapes(model)[::-1], args.threshold)
        measure = setting.computing(args)
        advices = [
            advise(gradients, ranks, network, args.modes, args.backward, measure, logical=args.logical)
            for ranks in numbers
        ]
    except (OSError, ValueError, TypeError) as error:
        print(f"distopt advise: {printable(str(error))}", file=sys.stderr)
        return 2
    print("\n\n".join(f"{printable(model)} on {advice}" for advice in advices))
    return 0
