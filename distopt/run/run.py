"""``distopt run -n N script.py``: N ranks on this machine, started the safe way."""

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distopt.resilience import job
from distopt.run import elastic, segments
from distopt.run.ends import Ends, Fault, exit_code
from distopt.run.job_folder import job_folder
from distopt.run.launcher import check_brands, find_launcher, on_loopback
from distopt.run.processes import END_SECONDS, POLL_SECONDS, RANK, TIMED_OUT, end, handling_signals, say

KILLING = (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("run", help="start a script on N ranks of this machine", description=__doc__)
    parser.add_argument("-n", "--ranks", type=int, required=True, help="number of ranks")
    parser.add_argument(
        "--restarts", type=int, default=0, metavar="K", help="start a job that failed again, K times at most"
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
    if not args.elastic:
        given = [f"--over {args.over}"] * bool(args.over) + [f"--nodes {args.nodes}"] * (args.nodes != 1)
        if not given:
            return start_given(args, {})
        say(f"{given[0]} must be given with --elastic")
        return 2
    script = check(args)
    if not script:
        return 2
    try:
        place = elastic.place_of(args.nodes, args.node, args.at, args.over, args.restarts)
    except ValueError as error:
        say(str(error))
        return 2
    return elastic.start(script, args.ranks, args.over, args.timeout, args.restarts, place)


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
        wrong = "the script must be given, got none; write it behind the options"
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
    command = [*launcher.command(ranks), sys.executable, str(RANK), *script]
    for attempt in range(restarts + 1):
        with job_folder() as folder:
            env = launcher.environment(ranks) | dict(variables)
            env |= on_loopback(env) | {job.FOLDER: str(folder), "DISTOPT_RESTART": str(attempt)}
            code, final = Job(command, env, folder, ranks).supervise(timeout)
        if final or attempt == restarts:
            break
        say(f"exit code {code}; restart {attempt + 1} of {restarts}")
    return code


class Job:
    """A launcher in a session of its own, which ends with this process, and the ranks that it has started."""

    def __init__(self, command: Sequence[str], env: dict[str, str], folder: Path, size: int):
        self._folder, self._size = folder, size
        self._asked, self._signal = 0, 0  # how often it was asked to end, and how
        self._process = subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=job.end_with_parent)
        self._ends = Ends(folder, size, self._process.pid)
        self._fault: Fault | None = None

    def supervise(self, timeout: float | None) -> tuple[int, bool]:
        """Wait for the end of the job, at most ``timeout`` seconds; return its exit code and whether that is final."""
        # It is final after a success, a signal or a time limit: then there is no restart.
        with handling_signals(self._ask):
            done = self._wait(math.inf if timeout is None else time.monotonic() + timeout)
        for _ in range(2):  # a rank that one check finds is seen to have ended by the next one
            self._look()
        self._ends.close()
        if not done:
            say(f"not done after {timeout:g} s; ended the job")
        ranks = job.entered(self._folder)
        left = job.all_left(ranks, self._size)
        code = TIMED_OUT if not done else 0 if left else self._judge(self._process.returncode)
        if code or left:  # without MPI's end
            segments.sweep(ranks)
        return code, code == 0 or self._asked > 0 or not done

    def _wait(self, deadline: float) -> bool:
        """Wait for the launcher; return False if the deadline passed and the job was ended."""
        while self._process.poll() is None:
            self._look()
            if time.monotonic() > deadline:
                end([self._process])
                return False
            if self._asked > 1:  # in a signal's handler nobody must wait for a process
                end([self._process])
        return True

    def _look(self) -> None:
        """Check whether the job can go on; end a launcher that does not notice a fault by itself."""
        ranks = self._ends.look(POLL_SECONDS)
        if self._fault is None and not self._asked:
            self._fault = self._ends.fault(ranks)
            if self._fault and self._process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_SECONDS)
                end([self._process], END_SECONDS)

    def _judge(self, status: int) -> int:
        """Return the exit code, and print the fault of a rank that ended silently, which is no success."""
        code = exit_code(status)
        if self._fault is None:
            return self._asked_code(code) if self._asked else code
        if self._fault.text:
            say(self._fault.text)
        if code in KILLING:  # MPICH's launcher has the signal's number alone
            code += 128
        return self._fault.code or code or 1

    def _asked_code(self, code: int) -> int:
        """Return the exit code of a job that a signal has asked to end: launchers of MPI have codes of their own."""
        marks = [rank.marks for rank in job.entered(self._folder)]
        ranks = [int(text) for kinds in marks for text in (*kinds.get(job.EXIT, ()), *kinds.get(job.OS_EXIT, ()))]
        return code and next(filter(None, ranks), 128 + self._signal)

    def _ask(self, number: int) -> None:
        """Pass a signal on: to the ranks if all of them wait for one, else to the launcher, which ends them soon."""
        self._asked += 1
        number = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        ranks = job.entered(self._folder)
        if self._asked > 1:
            return
        self._signal = number
        if ranks and all(job.STOPS in rank.marks for rank in ranks):
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, number)
        else:
            self._process.send_signal(number)
