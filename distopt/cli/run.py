"""``distopt run -n N script.py``: N ranks on this machine, started the safe way."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distopt.cli.launcher import check_brands, find_launcher

TIMED_OUT = 124  # the exit code of timeout(1)
GRACE = 5.0  # seconds between asking a job to end and ending it


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("run", help="start a script on N ranks of this machine", description=__doc__)
    parser.add_argument("-n", "--ranks", type=int, required=True, help="number of ranks")
    parser.add_argument("--timeout", type=float, metavar="S", help="end the job after S seconds, with exit code 124")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ...", help="a module instead")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="a Python script, its arguments")
    parser.set_defaults(main=main)


def main(given: argparse.Namespace) -> int:
    """Start the job; the exit code is the script's."""
    script = ["-m", *given.module] if given.module else given.script
    if given.ranks < 1 or not script:
        print("distopt run: wants -n with at least 1 rank, and a script", file=sys.stderr)
        return 2
    try:
        launcher = find_launcher()
        check_brands(launcher)
    except RuntimeError as error:
        print(f"distopt run: {error}", file=sys.stderr)
        return 2
    # -m mpi4py makes a non-zero exit of one rank the end of all
    command = [*launcher.command(given.ranks), sys.executable, "-m", "mpi4py", *script]
    return supervise(command, launcher.environment(given.ranks), given.timeout)


def supervise(command: Sequence[str], env: dict[str, str], timeout: float | None) -> int:
    """Run a launcher in a session of its own, pass SIGINT and SIGTERM on to it, and end it at the time limit."""
    job = subprocess.Popen(command, env=env, start_new_session=True)
    before = {s: signal.signal(s, lambda number, _: job.send_signal(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = job.wait(timeout)
    except subprocess.TimeoutExpired:
        print(f"distopt run: not done after {timeout:g} s; ending the job", file=sys.stderr, flush=True)
        end(job)
        return TIMED_OUT
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def end(job: "subprocess.Popen[Any]") -> None:
    """Ask a job to end; whatever of it is left after ``GRACE`` seconds is killed, ranks that ignore signals too."""
    family = descendants(job.pid)  # launchers start ranks in sessions of their own
    job.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(GRACE)
    for pid in [*family, *descendants(job.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.kill()
    job.wait()


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
