"""``distopt run -n N script.py``: N ranks on this machine, started the safe way."""

import argparse
import importlib.util
import math
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from distopt.resilience import job, membership
from distopt.resilience.environment import LOGICAL, WANTED
from distopt.run.job_folder import job_folder
from distopt.run.launcher import (
    GROWING,
    PIP,
    ULFM,
    check_brands,
    environment,
    find_engine,
    find_launcher,
    meeting_of_torch,
    on_loopback,
    threads,
)
from distopt.run.nodes import Agent, Members, Place, meet, place
from distopt.run.processes import RANK, say
from distopt.run.supervised import Launched, Supervised
from distopt.run.supervisor import Supervisor


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("run", help="start a script on N ranks of this machine", description=__doc__)
    parser.add_argument("-n", "--ranks", type=int, required=True, help="number of ranks")
    parser.add_argument(
        "--restarts", type=int, default=0, metavar="K", help="start a job that failed again, K times at most"
    )
    parser.add_argument(
        "--logical", type=int, metavar="V", help="V ranks, whatever N: N processes have them (distopt.comm.Logical)"
    )
    parser.add_argument(
        "--spares",
        type=int,
        default=0,
        metavar="K",
        help="with --elastic: K processes that wait for a lost one's place",
    )
    parser.add_argument("--elastic", action="store_true", help="go on without ranks that are lost")
    parser.add_argument(
        "--over", choices=["mpi", "torch"], help="with --elastic: over what ranks meet (default: Open MPI, else torch)"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="with --elastic: on so many machines")
    parser.add_argument("--node", type=int, metavar="K", help="with --nodes: number of this one (default: Slurm's)")
    parser.add_argument("--at", metavar="HOST:PORT", help="with --nodes: where node 0 listens (default: from Slurm)")
    add_script(parser)
    parser.set_defaults(main=main)


def add_script(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments for the script and its time limit."""
    parser.add_argument("--timeout", type=float, metavar="S", help="end the job after S seconds, with exit code 124")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ...", help="a module instead")
    parser.add_argument(
        "-c", dest="code", nargs=argparse.REMAINDER, metavar="CODE ...", help="a program's text instead"
    )
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ...",
        help="a Python script, or - for standard input; its arguments",
    )


def main(args: argparse.Namespace) -> int:
    """Start the job, again if it fails and may be restarted; return the script's exit code."""
    if args.elastic:
        return start_elastic(args)
    given = [f"--over {args.over}"] * bool(args.over) + [f"--nodes {args.nodes}"] * (args.nodes != 1)
    given += [f"--spares {args.spares}"] * bool(args.spares)
    if given:
        say(f"{given[0]} must be given with --elastic")
        return 2
    return start_given(args, of_logical(args))


def of_logical(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables of logical ranks: their number, and a share of the cores that depends on it alone."""
    if args.logical is None:
        return {}
    # Sums of more threads have other bits; what the user has set is for all jobs to compare.
    shares = {name: n for name, n in threads(max(1, args.logical)).items() if name not in os.environ}
    return shares | {LOGICAL: str(args.logical)}


def start_given(args: argparse.Namespace, variables: Mapping[str, str]) -> int:
    """Start the script of the arguments, with more variables in the ranks' environment; return its exit code."""
    script = check(args)
    return start(script, args.ranks, args.timeout, args.restarts, variables) if script else 2


def check(args: argparse.Namespace) -> list[str]:
    """Return what stands after ``python``; nothing, with a printed reason, if an argument is wrong."""
    script = args.script[args.script[:1] == ["--"] :]
    if args.module:
        script = ["-m", *args.module]
    elif args.code:
        script = ["-c", *args.code]
    elif script[:1] == ["-"]:  # which every rank must have, and one alone could read
        script = ["-c", sys.stdin.read(), *script[1:]]
    wrong = ""
    if args.ranks < 1:
        wrong = f"-n must be at least 1, got {args.ranks}"
    elif not script:
        wrong = "the script must be given, got none; write it after the options"
    elif (logical := getattr(args, "logical", None)) is not None and logical < args.ranks * args.nodes:
        wrong = f"--logical must be at least {args.ranks * args.nodes}, the number of processes, got {logical}"
    elif getattr(args, "spares", 0) < 0:
        wrong = f"--spares must be at least 0, got {args.spares}"
    elif args.restarts < 0:
        wrong = f"--restarts must be at least 0, got {args.restarts}"
    elif args.timeout is not None and not args.timeout > 0:
        wrong = f"--timeout must be above 0, got {args.timeout:g}"
    if wrong:
        say(wrong)
    return [] if wrong else script


def start(
    script: Sequence[str],
    ranks: int,
    timeout: float | None = None,
    restarts: int = 0,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run a script on ranks of this machine."""
    # script: what stands after `python`.
    # restarts: how often a job that failed is started again.
    # Returns the script's exit code; 2, with a printed reason, if it could not be started.
    try:
        launcher = find_launcher()
        check_brands(launcher)
    except RuntimeError as error:
        say(str(error))
        return 2
    command = [sys.executable, str(RANK), *script]
    for attempt in range(restarts + 1):
        with job_folder() as folder:
            env = meeting_of_torch() | launcher.environment(ranks) | dict(variables)
            env |= on_loopback(env) | {job.FOLDER: str(folder), "DISTOPT_RESTART": str(attempt)}
            started = Launched(launcher.command(ranks), command, env, ranks, folder)
            supervisor = Supervisor(started, ranks, elastic=False)
            code = supervisor.supervise(timeout)
        # a success, a signal or a time limit is final
        if code == 0 or supervisor.was_ended or attempt == restarts:
            break
        say(f"exit code {code}; restart {attempt + 1} of {restarts}")
    return code


def start_elastic(args: argparse.Namespace) -> int:
    """Run the script of the arguments on ranks, here and on other nodes, that go on without those that are lost."""
    # Returns the exit code of the rank that ended last; 2, with a printed reason, if the job could not be started.
    script, ranks = check(args), args.ranks
    if not script:
        return 2
    command = [sys.executable, str(RANK), *script]
    with job_folder() as folder:
        variables = of_logical(args) | {WANTED: "1", job.FOLDER: str(folder), "DISTOPT_RESTART": "0"}
        try:
            at = place_of(args)
            membership.wanted({**os.environ, **variables})
            launcher = None if at else find_engine(args.over)
            env = (launcher.environment(ranks) if launcher else environment(ranks, {})) | variables
            if args.spares and (at or launcher):
                raise ValueError("--spares must be with ranks of one machine that meet by torch: give --over torch")
            if at and at.node:
                return Agent(at, command, env, ranks, folder).supervise()
            nodes = meet(at, ranks) if at else []
        except (OSError, RuntimeError, ValueError) as error:
            say(str(error))
            return 2
        started: Supervised
        if launcher:
            env |= on_loopback(env)
            if args.restarts:
                env |= GROWING
                (folder / job.REQUESTS).mkdir()
            started = Launched(launcher.command(ranks, *ULFM), command, env, ranks, folder)
        else:
            started = Members(command, env, ranks, folder, nodes, args.restarts + args.spares > 0, at)
        size = ranks + sum(len(node.ranks) for node in nodes)
        most = math.inf if args.logical is None else args.logical
        supervisor = Supervisor(started, size, True, args.restarts, args.spares, most)
        return supervisor.supervise(args.timeout)


def place_of(args: argparse.Namespace) -> Place | None:
    """Return this machine's place in a job of several; None if it is the only one."""
    if args.nodes == 1 and args.node is None and args.at is None:
        return None
    if args.over == "mpi":
        raise ValueError(
            "--over must be torch with --nodes, got mpi: ranks of Open MPI wait for a machine that has vanished"
        )
    if args.restarts:
        raise ValueError(f"--restarts must be 0 with --nodes, got {args.restarts}")
    if importlib.util.find_spec("torch") is None:
        raise ValueError(f"--nodes needs torch: {PIP} install 'distopt[torch]'")
    return place(args.nodes, args.node, args.at)
