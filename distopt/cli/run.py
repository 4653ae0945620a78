"""``distopt run -n N script.py``: N ranks on this machine, started the safe way."""

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distopt import job
from distopt.cli.launcher import check_brands, find_launcher

TIMED_OUT = 124  # the exit code of timeout(1)
GRACE = 5.0  # seconds between asking a job to end and ending it


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("run", help="start a script on N ranks of this machine", description=__doc__)
    parser.add_argument("-n", "--ranks", type=int, required=True, help="number of ranks")
    parser.add_argument(
        "--restarts", type=int, default=0, metavar="K", help="start a job that failed again, K times at most"
    )
    add_script(parser)
    parser.set_defaults(main=main)


def add_script(parser: argparse.ArgumentParser) -> None:
    """Declare what is run, and how long it may take."""
    parser.add_argument("--timeout", type=float, metavar="S", help="end the job after S seconds, with exit code 124")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ...", help="a module instead")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="a Python script, its arguments")


def main(given: argparse.Namespace) -> int:
    """Start the job, again if it fails and may be restarted; the exit code is the script's."""
    return start_given(given, {})


def start_given(given: argparse.Namespace, variables: Mapping[str, str]) -> int:
    """Start what the arguments say, with more variables in the ranks' environment."""
    script = ["-m", *given.module] if given.module else given.script
    if given.ranks < 1 or not script:
        _say("wants -n with at least 1 rank, and a script")
        return 2
    if given.restarts < 0:
        _say(f"--restarts must be at least 0, got {given.restarts}")
        return 2
    if given.timeout is not None and not given.timeout > 0:
        _say(f"--timeout must be above 0, got {given.timeout:g}")
        return 2
    return start(script, given.ranks, given.timeout, given.restarts, variables)


def start(
    script: Sequence[str],
    ranks: int,
    timeout: float | None = None,
    restarts: int = 0,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run what stands behind ``python`` on so many ranks; its exit code, or 2, with a line that says why not."""
    try:
        launcher = find_launcher()
        check_brands(launcher)
    except RuntimeError as error:
        _say(str(error))
        return 2
    # -m mpi4py makes a non-zero exit of one rank the end of all
    command = [*launcher.command(ranks), sys.executable, "-m", "mpi4py", *script]
    for attempt in range(restarts + 1):
        with tempfile.TemporaryDirectory(prefix="distopt-") as folder:
            env = launcher.environment(ranks) | dict(variables)
            env |= {job.FOLDER: folder, "DISTOPT_RESTART": str(attempt)}
            code, final = Job(command, env, Path(folder)).supervise(timeout)
        if final or attempt == restarts:
            break
        _say(f"exit code {code}; restart {attempt + 1} of {restarts}")
    return code


class Job:
    """A launcher in a session of its own, and the ranks that it has started."""

    def __init__(self, command: Sequence[str], env: dict[str, str], folder: Path):
        self._folder, self._asked = folder, 0
        self._process = subprocess.Popen(command, env=env, start_new_session=True)

    def supervise(self, timeout: float | None) -> tuple[int, bool]:
        """Wait for the end; the exit code, and is it the last word, as after a success, a signal or a time limit?"""
        before = {s: signal.signal(s, lambda number, _: self._ask(number)) for s in (signal.SIGINT, signal.SIGTERM)}
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            while not self._ended(0.2):
                if time.monotonic() > deadline:
                    _say(f"not done after {timeout:g} s; ending the job")
                    end(self._process)
                    return TIMED_OUT, True
                if self._asked > 1:  # in a signal's handler nobody must wait for a process
                    end(self._process)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        code = self._judge(self._process.returncode)
        return code, code == 0 or self._asked > 0

    def _ended(self, patience: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        return self._process.returncode is not None

    def _judge(self, code: int) -> int:
        """The exit code; a rank that was gone without a word is named, and is no success."""
        code = code if code >= 0 else 128 - code
        ranks = job.entered(self._folder)
        lost = [rank for rank in ranks if not rank.marks & {job.DONE, job.SPOKEN}]
        said = {mark for rank in ranks for mark in rank.marks}
        if job.SPOKEN in said and code == 128 + signal.SIGSEGV:
            return 1  # Open MPI's launcher may crash over an abort; a rank has said why it ends
        explained = job.SPOKEN in said or (job.DONE in said and 0 < code < 128)
        if not lost or explained or self._asked:
            return code
        first = min(rank.votes for rank in lost)  # the others, which waited for it, were ended by the launcher
        names = " or ".join(f"rank {rank.rank}" for rank in lost if rank.votes == first)
        last = next(rank.last for rank in lost if rank.votes == first)
        _say(f"{names} ended without a word after {last or 'its start'}: killed, or left by os._exit")
        return code or 1

    def _ask(self, number: int) -> None:
        """Pass a signal on: to the ranks if all of them wait for one, else to the launcher, which ends them soon."""
        self._asked += 1
        ranks = job.entered(self._folder)
        if self._asked > 1:
            return
        if ranks and all(job.STOPS in rank.marks for rank in ranks):
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, number)
        else:
            self._process.send_signal(number)


def _say(text: str) -> None:
    print(f"distopt run: {text}", file=sys.stderr, flush=True)


def end(process: "subprocess.Popen[Any]") -> None:
    """Ask a job to end; whatever of it is left after ``GRACE`` seconds is killed, ranks that ignore signals too."""
    family = descendants(process.pid)  # launchers start ranks in sessions of their own
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    for pid in [*family, *descendants(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()


def descendants(pid: int) -> list[int]:
    """The process ids of all children, and theirs; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = stat.read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = children.get(pid, [])
    for child in found:
        found.extend(children.get(child, []))
    return found
