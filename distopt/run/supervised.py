"""Ranks that this process has started: by a launcher of MPI, or as children of its own, each with a socket to it."""

import json
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from distopt.resilience import job
from distopt.resilience.environment import JOINS, LINE, MEMBER
from distopt.run import segments
from distopt.run.exit_watch import ExitWatch
from distopt.run.processes import end
from distopt.run.rendezvous import RankLinks
from distopt.run.tagged import Tagged
from distopt.run.warm import Process, WarmProcess


class Supervised(ExitWatch):
    """The processes of a job, and what ``Supervisor`` asks of those of an elastic one."""

    meet_all: bool  # whether no rank gets through `distopt.world()` if one has ended before
    processes: list[Process]
    grows = False  # whether processes can be started at any time

    def running(self) -> bool:
        """Whether any process of the job runs."""
        return any(process.poll() is None for process in self.processes)

    def signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)

    def end(self, grace: float) -> None:
        """Ask all processes to end, and kill what is left after so many seconds."""
        end(self.processes, grace)

    def lose(self, rank: int) -> None:
        """Tell the others that a rank has ended."""

    def replace(self) -> int:
        """Start a process in the place of a lost one, and return its number."""
        raise NotImplementedError

    @property
    def starts_soon(self) -> bool:
        """Whether a process that starts now does so as soon as any will."""
        return True

    def missing(self) -> int:
        """Return how many more processes the ranks want, if they have said so since the last call."""
        return 0

    def limit(self, change: int) -> None:
        """Let so many more processes be members at once, or fewer."""

    def awaited(self) -> set[int]:
        """The ranks that others wait for, as far as this process knows."""
        return set()


class Launched(Supervised):
    """Ranks that a launcher of MPI starts; Open MPI tells them of losses, and they start others on request."""

    meet_all = True

    def __init__(
        self, launcher: Sequence[str], command: Sequence[str], env: Mapping[str, str], ranks: int, folder: Path
    ):
        self._command, self._members = command, ranks
        process = subprocess.Popen(  # in a session of its own, which ends with this process
            [*launcher, *command], env=env, start_new_session=True, preexec_fn=job.end_with_parent
        )
        self.processes = [process]
        super().__init__(folder, ranks, process.pid)

    def replace(self) -> int:
        member = self._members
        self._members += 1
        asked = {"member": member, "command": self._command, "folder": os.getcwd()}
        job.request(member, json.dumps(asked), self._folder)
        return member

    def close(self, code: int = 0) -> None:
        ranks = self.marks()
        if code or job.all_left(ranks, self._size):  # without MPI's end
            segments.sweep(ranks)
        super().close(code)


class Children(Supervised):
    """Ranks that this process starts, their lines, and what they write."""

    meet_all = False

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        members: Iterable[int],
        folder: Path,
        hear: Callable[[int, dict[str, Any] | None], object],
        warm: bool = False,
    ):
        # hear: is given a number, and a message of that rank; None when it has ended
        # warm: others are to be started later, and at once
        self._command, self._env = command, env
        self._warm: WarmProcess | None = None
        self.processes = []
        self.lines = RankLinks(hear)
        children = {member: self._start(member, job.end_with_parent) for member in members}
        self._outputs = [
            Tagged({_file(child.stdout): rank for rank, child in children.items()}, 1),
            Tagged({_file(child.stderr): rank for rank, child in children.items()}, 2),
        ]
        super().__init__(folder, len(children), -1, children)
        if warm:
            self._warm = WarmProcess(command, env)

    @property
    def starts_soon(self) -> bool:
        return self._warm is None or self._warm.is_ready

    def _start(self, member: int, before: Callable[[], object] | None = None) -> Process:
        """Start a rank; ``before`` is called in it first, which only a process without threads may ask for."""
        line = self.lines.add(member)
        variables = {MEMBER: str(member)} | ({} if before else {JOINS: "1"})
        with line:
            fork = self._warm.fork(variables, line.fileno()) if self._warm else None
            child: Process = fork or subprocess.Popen(
                self._command,
                env={**self._env, **variables, LINE: str(line.fileno())},
                stdin=subprocess.DEVNULL if member else None,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[line.fileno()],
                start_new_session=True,
                preexec_fn=before,
            )
        self.processes.append(child)
        return child

    def add(self, member: int) -> None:
        """Start one more, which joins the others."""
        self._children[member] = child = self._start(member)
        self._outputs += [Tagged({_file(child.stdout): member}, 1), Tagged({_file(child.stderr): member}, 2)]

    def close(self, code: int = 0) -> None:
        if self._warm:
            self._warm.close()
        for output in self._outputs:
            output.close()
        self.lines.close()
        super().close(code)


def _file(pipe: IO[bytes] | None) -> int:
    """Return a descriptor of a pipe of ``subprocess``, for an owner that closes it."""
    assert pipe
    descriptor = os.dup(pipe.fileno())
    pipe.close()
    return descriptor
