"""What ``distopt volume`` and ``distopt advise`` are asked about: a model, a network, and modes."""

import argparse
import re
from pathlib import Path
from typing import Any

from distopt import fit
from distopt.cost import LINKS
from distopt.fit import Fit
from distopt.models import MODELS
from distopt.numbers import whole
from distopt.volume import Compute, Mode, Wire, measure, network
from distopt.volume.forecast import MOST_RANKS

MODEL, LINK, INSIDE = "resnet50", "10GbE", "NVLink"


def add_setting(parser: argparse.ArgumentParser, modes: str, ranks: str) -> None:
    """Declare it; the defaults are names and numbers with commas between them."""
    parser.set_defaults(usual=ranks)
    models = ", ".join(MODELS)
    parser.add_argument("--model", metavar="NAME", help=f"{models}, or a file of shapes, .json; default {MODEL}")
    parser.add_argument(
        "--modes",
        default=modes,
        metavar="A,B",
        help="kind[=number][+option]..., as topk=0.01+packed:int8 (distopt.volume.mode); default: %(default)s",
    )
    parser.add_argument("--ranks", metavar="P,Q", help=f"default: {ranks}, or those of a fit")
    parser.add_argument("--link", metavar="NAME", help=f"{', '.join(LINKS)}, or a rate, as 300Mbit/s; default {LINK}")
    parser.add_argument("--per-node", type=int, default=1, metavar="M", help="ranks of a node, which share its link")
    parser.add_argument("--inside", metavar="NAME", help=f"the link inside a node; default {INSIDE}")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="a network that distopt bench --fit has measured")
    parser.add_argument("--threshold", type=int, default=2097152, metavar="N", help="elements that fill a bucket")
    parser.add_argument("--no-measure", action="store_true", help="leave out what it takes to compress")


def wire(given: argparse.Namespace) -> Wire:
    """The network; ValueError if it is given twice."""
    if given.fit is None:
        if given.inside is not None and given.per_node == 1:
            raise ValueError("--inside is a link within nodes of several ranks: say how many with --per-node")
        between = LINK if given.link is None else given.link
        inside = INSIDE if given.inside is None else given.inside
        return network(between, whole("--per-node", given.per_node, least=1), inside)
    if given.link is not None or given.inside is not None or given.per_node != 1:
        raise ValueError("--fit is a network: leave out --link, --inside and --per-node")
    return fit.read(given.fit)


def ranks(given: argparse.Namespace, network: Wire) -> list[int]:
    """Numbers that grow; ValueError for what is none, and for those that do not fill their nodes."""
    wanted = given.ranks or (str(network.ranks) if isinstance(network, Fit) else given.usual)
    texts = [text.strip() for text in wanted.split(",")]
    if not all(re.fullmatch(r"\d{1,5}", text) and 1 <= int(text) <= MOST_RANKS for text in texts):
        must = f"whole numbers from 1 to {MOST_RANKS} with commas between them"
        raise ValueError(f"--ranks must be {must}, got {given.ranks:.60}")
    found = sorted({int(text) for text in texts})
    local = network.per_node
    odd = next((n for n in found if n > local and n % local), None)
    if odd:
        raise ValueError(f"--ranks must fill nodes of {local}, got {odd}")
    return found


def computing(given: argparse.Namespace) -> Any:
    """Who measures what a mode computes; nobody with --no-measure."""
    found: dict[str, Compute] = {}

    def once(mode: Mode) -> Compute:
        if mode.name not in found:
            found[mode.name] = measure(mode)
        return found[mode.name]

    return None if given.no_measure else once
