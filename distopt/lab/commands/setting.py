"""The arguments that ``distopt volume`` and ``distopt advise`` share: a model, a network, and modes."""

import argparse
import re
from pathlib import Path
from typing import Any

from distopt.checks import check_int
from distopt.lab import Compute, Mode, Wire, fit, measure, network
from distopt.lab.cost import LINKS
from distopt.lab.fit import Fit
from distopt.lab.forecast import MOST_RANKS
from distopt.lab.models import MODELS

MODEL, LINK, INSIDE = "resnet50", "10GbE", "NVLink"


def add_setting(parser: argparse.ArgumentParser, modes: str, ranks: str) -> None:
    """Declare the arguments; the defaults are names and numbers with commas between them."""
    parser.set_defaults(usual=ranks)
    models = ", ".join(MODELS)
    parser.add_argument(
        "--model", metavar="NAME", help=f'{models}, or a .json file {{"name": [3, 4], ...}} of shapes; default {MODEL}'
    )
    parser.add_argument(
        "--modes",
        default=modes,
        metavar="A,B",
        help="kind[=number][+option]..., as topk=0.01+packed:int8 (distopt.lab.mode); default: %(default)s",
    )
    parser.add_argument("--ranks", metavar="P,Q", help=f"default: {ranks}, or those of a fit")
    parser.add_argument("--logical", type=int, metavar="V", help="V ranks, in as many processes as --ranks says")
    parser.add_argument("--link", metavar="NAME", help=f"{', '.join(LINKS)}, or a rate, as 300Mbit/s; default {LINK}")
    parser.add_argument("--per-node", type=int, default=1, metavar="M", help="ranks of a node, which share its link")
    parser.add_argument("--inside", metavar="NAME", help=f"the link inside a node; default {INSIDE}")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="a network that distopt bench --fit has measured")
    parser.add_argument("--threshold", type=int, default=2097152, metavar="N", help="elements that fill a bucket")
    parser.add_argument("--no-measure", action="store_true", help="leave out what it takes to compress")


def wire(args: argparse.Namespace) -> Wire:
    """Return the network; ValueError if it is given twice."""
    if args.fit is None:
        if args.inside is not None and args.per_node == 1:
            raise ValueError("--inside must be in nodes of several ranks, got nodes of 1; say how many with --per-node")
        between = LINK if args.link is None else args.link
        inside = INSIDE if args.inside is None else args.inside
        return network(between, check_int("--per-node", args.per_node, least=1), inside)
    if args.link is not None or args.inside is not None or args.per_node != 1:
        raise ValueError("--fit must be the only network, got another one; leave out --link, --inside and --per-node")
    return fit.read(args.fit)


def ranks(args: argparse.Namespace, network: Wire) -> list[int]:
    """Return the numbers of ranks, ascending; ValueError for malformed ones, and if they do not fill their nodes."""
    usual = str(network.ranks) if isinstance(network, Fit) else args.usual
    most = MOST_RANKS if args.logical is None else check_int("--logical", args.logical, least=1)
    wanted = args.ranks or ",".join(str(min(int(n), most)) for n in usual.split(","))
    texts = [text.strip() for text in wanted.split(",")]
    if not all(re.fullmatch(r"\d{1,5}", text) and 1 <= int(text) <= MOST_RANKS for text in texts):
        must = f"whole numbers from 1 to {MOST_RANKS} with commas between them"
        raise ValueError(f"--ranks must be {must}, got {args.ranks:.60}")
    numbers = sorted({int(text) for text in texts})
    local = network.per_node
    odd = next((n for n in numbers if n > local and n % local), None)
    if odd:
        raise ValueError(f"--ranks must fill nodes of {local}, got {odd}")
    return numbers


def computing(args: argparse.Namespace) -> Any:
    """Return the function that measures what a mode computes, once for each; None with --no-measure."""
    costs: dict[str, Compute] = {}

    def once(mode: Mode) -> Compute:
        if mode.name not in costs:
            costs[mode.name] = measure(mode)
        return costs[mode.name]

    return None if args.no_measure else once
