"""Jobs of two ranks for ``distopt prove``: processes that meet over MPI, or over a TCP connection of their own."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from distopt.lab.commands import prove_ranks
from distopt.lab.commands.prove_socket import connection
from distopt.resilience import job
from distopt.run.processes import TIMED_OUT, end

SECONDS = 120.0  # for a job, which takes two or three where nothing else runs
RANKS = 2


class Ended(NamedTuple):
    """A job that has ended.

    Attributes:
        code: 0 if all ranks came to their ends.
        output: what all have written.
        results: what each rank has returned; None of one that has not.
    """

    code: int
    output: str
    results: list[Any]

    def complete(self) -> list[Any]:
        """Return the results; RuntimeError, with the output, if the job has failed."""
        if self.code == TIMED_OUT:
            raise RuntimeError(f"the ranks were not done after {SECONDS:g} s: {self.output.strip()}")
        if self.code or None in self.results:
            raise RuntimeError(f"the ranks ended with {self.code}: {self.output.strip()}")
        return self.results


Start = Callable[..., Ended]  # start(task, *arguments): a function of prove_ranks, and plain values


def over_mpi(task: str, *arguments: Any) -> Ended:
    """Start a task on two MPI processes by ``distopt run``, and wait for their ends."""
    with _job(task, arguments) as (folder, module, output):
        run = ["-m", "distopt", "run", "-n", str(RANKS), "--timeout", str(SECONDS)]
        process = subprocess.Popen(
            [sys.executable, *run, *module], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        return _ended([process], folder, output)


def over_sockets(task: str, *arguments: Any) -> Ended:
    """Start a task on two processes with a TCP connection between them, and wait for their ends."""
    secret = secrets.token_hex(16)
    with _job(task, arguments) as (folder, module, output):
        with connection() as ends:  # closed here once the processes have them, or none would notice the other's end
            processes = [
                subprocess.Popen(
                    [sys.executable, *module],
                    env=os.environ | {prove_ranks.SOCKET: f"{rank} {own.fileno()} {secret}"},
                    pass_fds=[own.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    preexec_fn=job.end_with_parent,
                )
                for rank, own in enumerate(ends)
            ]
        return _ended(processes, folder, output)


@contextlib.contextmanager
def _job(task: str, arguments: Sequence[Any]) -> Iterator[tuple[Path, list[str], IO[bytes]]]:
    """Return a context with a folder for results, what stands behind ``python``, and a file for what ranks write."""
    with tempfile.TemporaryDirectory(prefix="distopt-prove-") as folder, tempfile.TemporaryFile() as output:
        yield Path(folder), ["-m", prove_ranks.__name__, folder, task, json.dumps(arguments)], output


def _ended(processes: "Sequence[subprocess.Popen[bytes]]", folder: Path, output: IO[bytes]) -> Ended:
    """Wait for processes, and end those that take too long; return what became of them."""
    deadline, late = time.monotonic() + SECONDS, False
    try:
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        late = True
    finally:
        end([process for process in processes if process.poll() is None])
    output.seek(0)
    files = [folder / f"rank-{rank}" for rank in range(RANKS)]
    results = [json.loads(file.read_text()) if file.exists() else None for file in files]
    code = TIMED_OUT if late else next((process.returncode for process in processes if process.returncode), 0)
    return Ended(code, output.read().decode(errors="replace"), results)
