"""Two ranks of ``distopt prove``: processes that meet over MPI, or over a TCP connection of their own.

Each is ``python -m distopt.lab.commands.prove_jobs FOLDER MODULE:FUNCTION ARGUMENTS``: it calls a function of a
communicator and plain values, and leaves in the folder what that returns, plain values again.
"""

import functools
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import distopt
from distopt.lab.commands.prove_socket import SocketRanks, connected
from distopt.resilience import job
from distopt.run.processes import TIMED_OUT, end

SOCKET = (
    "DISTOPT_PROVE_SOCKET"  # the environment variable that has a rank's number, and its sockets for data and for votes
)
SECONDS = 120.0  # for a job, which takes two or three where nothing else runs
RANKS = 2


class Ended(NamedTuple):
    """What became of a job: its exit code, 0 if all ranks came to their ends, what they wrote, and what each found."""

    code: int
    output: str
    found: list[Any]

    def results(self) -> list[Any]:
        """What the ranks have returned; raises what a law said on one of them, or RuntimeError with the output."""
        for found in self.found:
            if found and "broken" in found:
                raise AssertionError(found["broken"])
        if self.code == TIMED_OUT:
            raise RuntimeError(f"the ranks were not done after {SECONDS:g} s: {self.output.strip()}")
        if self.code or None in self.found:
            raise RuntimeError(f"the ranks ended with {self.code}: {self.output.strip()}")
        return [found["result"] for found in self.found]


Start = Callable[..., Ended]  # start(function, *arguments)
Process = subprocess.Popen[bytes]


def over_mpi(function: Callable[..., Any], *arguments: Any) -> Ended:
    """Call a function on two MPI processes, started by ``distopt run``, and wait for their ends."""
    run = [sys.executable, "-m", "distopt", "run", "-n", str(RANKS), "--timeout", str(SECONDS)]
    return _ended(lambda popen, module: [popen([*run, *module])], function, arguments)


def over_sockets(function: Callable[..., Any], *arguments: Any) -> Ended:
    """Call a function on two processes with a TCP connection between them, and wait for their ends."""

    def start(popen: Callable[..., Process], module: list[str]) -> list[Process]:
        # closed here once the processes have them, or none would notice the other's end
        with connected(RANKS) as data, connected(RANKS) as votes:
            numbers = [[ends[rank][1 - rank].fileno() for ends in (data, votes)] for rank in range(RANKS)]
            return [
                popen(
                    [sys.executable, *module],
                    env=os.environ | {SOCKET: f"{rank} {own[0]} {own[1]}"},
                    pass_fds=own,
                    preexec_fn=job.end_with_parent,
                )
                for rank, own in enumerate(numbers)
            ]

    return _ended(start, function, arguments)


def elastic(over: str, ranks: int, function: Callable[..., Any], *arguments: Any) -> Ended:
    """Call a function on processes of which one may be lost, and another one comes in its place."""
    run = [sys.executable, "-m", "distopt", "run", "-n", str(ranks), "--elastic", "--over", over, "--restarts", "1"]
    options = ["--timeout", str(SECONDS)]
    return _ended(lambda popen, module: [popen([*run, *options, *module])], function, arguments, ranks)


def _ended(
    start: Callable[..., list[Process]], function: Callable[..., Any], arguments: Any, ranks: int = RANKS
) -> Ended:
    """Have ``start`` start the processes of a call, and end those that take too long; return what became of them."""
    with tempfile.TemporaryDirectory(prefix="distopt-prove-") as folder, tempfile.TemporaryFile() as output:
        popen = functools.partial(subprocess.Popen, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        name = f"{function.__module__}:{function.__name__}"
        processes = start(popen, ["-m", __name__, folder, name, json.dumps(arguments)])
        deadline, late = time.monotonic() + SECONDS, False
        try:
            for process in processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
        finally:
            end([process for process in processes if process.poll() is None])
        output.seek(0)
        files = [Path(folder, f"rank-{rank}") for rank in range(ranks)]
        found = [json.loads(file.read_text()) if file.exists() else None for file in files]
        code = TIMED_OUT if late else next((process.returncode for process in processes if process.returncode), 0)
        return Ended(code, output.read().decode(errors="replace"), found)


def found(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """What a rank leaves: the result, or what an AssertionError says."""
    try:
        return {"result": function(*arguments)}
    except AssertionError as error:
        return {"broken": str(error)}


def main() -> int:
    """Call the function, and leave its result in the folder."""
    folder, name, arguments = sys.argv[1:]
    module, _, function = name.partition(":")
    if SOCKET in os.environ:
        rank, *numbers = map(int, os.environ[SOCKET].split())
        data, votes = ([socket.socket(fileno=number)] * RANKS for number in numbers)
        comm: Any = SocketRanks(rank, data, SocketRanks(rank, votes).control)
    else:
        comm = distopt.world()
    left = found(getattr(importlib.import_module(module), function), comm, *json.loads(arguments))
    Path(folder, f"rank-{comm.rank}").write_text(json.dumps(left))
    return int("broken" in left)


if __name__ == "__main__":
    sys.exit(main())
