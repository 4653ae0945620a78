"""``distopt prove``: eight claims of this library, tried on this machine with new random numbers each time."""

import argparse
import importlib.util
import secrets
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from distopt.lab.commands import prove_claims, prove_jobs
from distopt.run.doctor_gpu import gpu_count
from distopt.run.launcher import check_brands, find_launcher

OVER_RANKS = ("resume", "NaN", "whole batch")  # the claims of which ranks meet over MPI where there is one


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("prove", help="try what this library claims, on this machine", description=__doc__)
    parser.add_argument("--seed", type=int, metavar="N", help="of all random numbers (default: another one each time)")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Print a line for each claim, as soon as it was tried, and what none of them looked at; return 1 if one failed."""
    seed = secrets.randbits(32) if args.seed is None else args.seed
    if seed < 0:
        print(f"distopt prove: --seed must be at least 0, got {seed}", file=sys.stderr)
        return 2
    missing = mpi_missing()
    ranks = prove_jobs.over_sockets if missing else prove_jobs.over_mpi
    print(f"seed {seed}; the same once more: distopt prove --seed {seed}", flush=True)
    failed = 0
    for number, (name, claim) in enumerate(prove_claims.CLAIMS.items()):
        rng = np.random.default_rng([seed, number])
        holds, text = tried(claim, prove_claims.Trial(rng, ranks, prove_jobs.over_sockets))
        failed += not holds
        print(f"{'PASS' if holds else 'FAIL'}  {name:12}  {text}", flush=True)
    for text in unseen(missing):
        print(f"not looked at: {text}")
    return int(failed > 0)


def tried(claim: Callable[[prove_claims.Trial], str], trial: prove_claims.Trial) -> tuple[bool, str]:
    """Return whether a claim holds, and what was found; an error of any kind is none that holds."""
    try:
        return True, claim(trial)
    except prove_claims.Refuted as error:
        return False, str(error)
    except Exception as error:
        return False, " ".join(f"{type(error).__name__}: {error}".split())


def mpi_missing() -> str:
    """Return why ranks cannot meet over MPI, "" if they can."""
    try:
        check_brands(find_launcher())
    except RuntimeError as error:
        return str(error)
    return ""


def unseen(missing: str) -> Iterator[str]:
    """Yield what no line looked at on this machine; ``missing``: why ranks could not meet over MPI."""
    if missing:
        lines = ", ".join(OVER_RANKS)
        yield f"MPI ({missing}); ranks of the lines {lines} met over TCP and local sockets instead"
    gpus = gpu_count()
    yield f"GPUs ({gpus} here; `distopt doctor` tries each)" if gpus else "GPUs (none here)"
    torch = "installed; its tests are those of the repository" if importlib.util.find_spec("torch") else "not installed"
    yield f"PyTorch ({torch})"
    yield "a network between hosts (all ranks ran on this one)"
