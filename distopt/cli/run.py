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

from distopt.cli import segments
from distopt.cli.ends import Ends, Fault, exit_code
from distopt.cli.launcher import check_brands, find_launcher, on_loopback
from distopt.resilience import job

RANK = Path(job.__file__).with_name("rank.py")
TIMED_OUT = 124  # the exit code of timeout(1)
GRACE = 5.0  # seconds between asking a job to end and ending it
POLL_SECONDS = 0.2  # between two checks of the ranks
END_SECONDS = 0.7  # for a launcher to end a job after one of its ranks, and again when it is told to
KILLING = (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # what asks a job to end


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
    """Declare the arguments for the script and its time limit."""
    parser.add_argument("--timeout", type=float, metavar="S", help="end the job after S seconds, with exit code 124")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ...", help="a module instead")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="a Python script, its arguments")


def main(args: argparse.Namespace) -> int:
    """Start the job, again if it fails and may be restarted; return the script's exit code."""
    return start_given(args, {})


def start_given(args: argparse.Namespace, variables: Mapping[str, str]) -> int:
    """Start the script of the arguments, with more variables in the ranks' environment; return its exit code."""
    script = ["-m", *args.module] if args.module else args.script[args.script[:1] == ["--"] :]
    if args.ranks < 1:
        _say(f"-n must be at least 1, got {args.ranks}")
        return 2
    if not script:
        _say("the script must be given, got none; write it behind the options")
        return 2
    if args.restarts < 0:
        _say(f"--restarts must be at least 0, got {args.restarts}")
        return 2
    if args.timeout is not None and not args.timeout > 0:
        _say(f"--timeout must be above 0, got {args.timeout:g}")
        return 2
    return start(script, args.ranks, args.timeout, args.restarts, variables)


def start(
    script: Sequence[str],
    ranks: int,
    timeout: float | None = None,
    restarts: int = 0,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run a script on ranks of this machine.

    Args:
        script: what stands behind ``python``.
        ranks: the number of ranks.
        timeout: seconds after which the job is ended.
        restarts: how often a job that failed is started again.
        variables: more variables for the ranks' environment.

    Returns:
        The script's exit code; 2, with a printed reason, if it could not be started.
    """
    try:
        launcher = find_launcher()
        check_brands(launcher)
    except RuntimeError as error:
        _say(str(error))
        return 2
    command = [*launcher.command(ranks), sys.executable, str(RANK), *script]
    for attempt in range(restarts + 1):
        with tempfile.TemporaryDirectory(prefix="distopt-") as folder:
            env = launcher.environment(ranks) | dict(variables)
            env |= on_loopback(env) | {job.FOLDER: folder, "DISTOPT_RESTART": str(attempt)}
            code, final = Job(command, env, Path(folder), ranks).supervise(timeout)
        if final or attempt == restarts:
            break
        _say(f"exit code {code}; restart {attempt + 1} of {restarts}")
    return code


class Job:
    """A launcher in a session of its own, which ends with this process, and the ranks that it has started."""

    def __init__(self, command: Sequence[str], env: dict[str, str], folder: Path, size: int):
        self._folder, self._asked = folder, 0
        self._process = subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=job.end_with_parent)
        self._ends = Ends(folder, size, self._process.pid)
        self._fault: Fault | None = None

    def supervise(self, timeout: float | None) -> tuple[int, bool]:
        """Wait for the end of the job.

        Args:
            timeout: seconds after which the job is ended; None for no limit.

        Returns:
            The exit code, and whether it is final: after a success, a signal or a time limit there is no restart.
        """
        before = {number: signal.signal(number, lambda n, _: self._ask(n)) for number in _asking()}
        try:
            done = self._wait(math.inf if timeout is None else time.monotonic() + timeout)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        for _ in range(2):  # a rank that one check finds is seen to have ended by the next one
            self._look()
        self._ends.close()
        if not done:
            _say(f"not done after {timeout:g} s; ended the job")
        code = self._judge(self._process.returncode) if done else TIMED_OUT
        if code:
            segments.sweep(job.entered(self._folder))
        return code, code == 0 or self._asked > 0 or not done

    def _wait(self, deadline: float) -> bool:
        """Wait for the launcher; return False if the deadline passed and the job was ended."""
        while self._process.poll() is None:
            self._look()
            if time.monotonic() > deadline:
                end(self._process)
                return False
            if self._asked > 1:  # in a signal's handler nobody must wait for a process
                end(self._process)
        return True

    def _look(self) -> None:
        """Check whether the job can go on; end a launcher that does not notice a fault by itself."""
        ranks = self._ends.look(POLL_SECONDS)
        if self._fault is None and not self._asked:
            self._fault = self._ends.fault(ranks)
            if self._fault and self._process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_SECONDS)
                end(self._process, END_SECONDS)

    def _judge(self, status: int) -> int:
        """Return the exit code, and print the fault of a rank that ended silently, which is no success."""
        code = exit_code(status)
        if self._fault is None:
            return code
        if self._fault.text:
            _say(self._fault.text)
        if code in KILLING:  # MPICH's launcher has the signal's number alone
            code += 128
        return self._fault.code or code or 1

    def _ask(self, number: int) -> None:
        """Pass a signal on: to the ranks if all of them wait for one, else to the launcher, which ends them soon."""
        self._asked += 1
        number = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        ranks = job.entered(self._folder)
        if self._asked > 1:
            return
        if ranks and all(job.STOPS in rank.marks for rank in ranks):
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, number)
        else:
            self._process.send_signal(number)


def _asking() -> list[signal.Signals]:
    """Return the signals that ask this process to end, without those that nohup or a shell makes it ignore."""
    hushed = [number for number in (signal.SIGHUP, signal.SIGQUIT) if signal.getsignal(number) is signal.SIG_IGN]
    return [number for number in ASKING if number not in hushed]


def _say(text: str) -> None:
    print(f"distopt run: {text}", file=sys.stderr, flush=True)


def end(process: "subprocess.Popen[Any]", grace: float = GRACE) -> None:
    """Ask a job to end, and kill what is left of it after ``grace`` seconds, ranks that ignore signals too."""
    family = descendants(process.pid)  # launchers start ranks in sessions of their own
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    for pid in [*family, *descendants(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()


def descendants(pid: int) -> list[int]:
    """Return the process ids of all children and their children; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = stat.read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    pids = children.get(pid, [])
    for child in pids:
        pids.extend(children.get(child, []))
    return pids
