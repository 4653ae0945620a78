"""Ranks that this process has started, each with a socket to it."""

import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from distopt.resilience import job, membership
from distopt.run.ends import Ends
from distopt.run.lines import Lines
from distopt.run.processes import end
from distopt.run.tagged import Tagged


class Children:
    """Ranks that this process has started, their lines, and what they write."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        members: Iterable[int],
        folder: Path,
        hear: Callable[[int, dict[str, Any] | None], object],
    ):
        # hear: is given a number, and a message of that rank; None when it has ended
        self._command, self._env = command, env
        self._of: dict[int, subprocess.Popen[bytes]] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.lines = Lines(hear)
        for member in members:
            self._start(member, job.end_with_parent)
        self._outputs = [
            Tagged({_file(child.stdout): rank for rank, child in self._of.items()}, 1),
            Tagged({_file(child.stderr): rank for rank, child in self._of.items()}, 2),
        ]
        self.ends = Ends(folder, len(self._of), -1, self._of)

    def _start(self, member: int, before: Callable[[], object] | None = None) -> "subprocess.Popen[bytes]":
        """Start a rank; ``before`` is called in it first, which only a process without threads may ask for."""
        line = self.lines.add(member)
        variables = {membership.LINE: str(line.fileno()), membership.MEMBER: str(member)}
        with line:
            child = subprocess.Popen(
                self._command,
                env={**self._env, **variables, **({} if before else {membership.JOINS: "1"})},
                stdin=subprocess.DEVNULL if member else None,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[line.fileno()],
                start_new_session=True,
                preexec_fn=before,
            )
        self._of[member] = child
        self.processes.append(child)
        return child

    def start(self) -> None:
        """Start to read what they say."""
        self.lines.start()

    def add(self, member: int) -> None:
        """Start one more, which joins the others."""
        child = self._start(member)
        self._outputs += [Tagged({_file(child.stdout): member}, 1), Tagged({_file(child.stderr): member}, 2)]

    def running(self) -> bool:
        """Whether any of them runs."""
        return any(child.poll() is None for child in self.processes)

    def signal(self, number: int) -> None:
        for child in self.processes:
            child.send_signal(number)

    def end(self, grace: float) -> None:
        """Ask all to end, and kill what is left after so many seconds."""
        end(self.processes, grace)

    def close(self) -> None:
        for output in self._outputs:
            output.close()
        self.lines.close()
        self.ends.close()


def _file(pipe: IO[bytes] | None) -> int:
    """Return a descriptor of a pipe of ``subprocess``, for an owner that closes it."""
    assert pipe
    descriptor = os.dup(pipe.fileno())
    pipe.close()
    return descriptor
