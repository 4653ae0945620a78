"""Processes that start at once, as forks of one that has imported torch and distopt, which takes seconds."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Any

from distopt.resilience import job
from distopt.resilience.environment import WARM

SECONDS = 2.0  # for a fork to begin, or for news of its end


class WarmProcess:
    """The process that is forked (``resilience.forks``).

    Args:
        command: that of a rank.
        env: of a rank, without what each has of its own.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]):
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                command,
                env={**env, WARM: str(theirs.fileno())},
                stdin=subprocess.DEVNULL,
                # Pipes, as those of its forks; what modules say when they are imported, ranks say too.
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=job.end_with_parent,
            )
        # The descriptor of a process that nobody has taken yet, and how others have ended, until they are asked.
        self._begun: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._is_ready = self._is_gone = False

    @property
    def is_ready(self) -> bool:
        """Whether it has imported all; True too if it never will, as its end has come."""
        self._hear(0)
        return self._is_ready or self._is_gone

    def fork(self, variables: Mapping[str, str], line: int) -> "Fork | None":
        """Start a process with more variables, and its line to the launcher; None if that cannot be done now."""
        if not self.is_ready or self._is_gone:
            return None
        (output, for_output), (error, for_error) = os.pipe(), os.pipe()
        with contextlib.suppress(OSError):
            socket.send_fds(self._line, [json.dumps(dict(variables)).encode()], [for_output, for_error, line])
            while not self._begun and self._hear(SECONDS):
                pass
        for descriptor in (for_output, for_error):
            os.close(descriptor)
        if not self._begun:
            self.close()
            os.close(output)
            os.close(error)
            return None
        return Fork(self, *self._begun.popitem(), open(output, "rb"), open(error, "rb"))

    def status(self, pid: int) -> int:
        """Return how a process that has ended did so, as ``subprocess`` has it."""
        while pid not in self._ends and self._hear(SECONDS):
            pass
        return self._ends.pop(pid, -signal.SIGKILL)

    def _hear(self, seconds: float) -> bool:
        """Take in what it says within so many seconds; tell if it said something."""
        if self._is_gone or not select.select([self._line], [], [], seconds)[0]:
            return False
        try:
            text, descriptors, _, _ = socket.recv_fds(self._line, 1 << 16, 1)
        except OSError:
            text, descriptors = b"", []
        message = json.loads(text or "{}")
        self._is_gone, self._is_ready = not text, self._is_ready or "ready" in message
        if "status" in message:
            self._ends[message["pid"]] = message["status"]
        elif descriptors:
            self._begun[message["pid"]] = descriptors[0]
        return bool(text)

    def close(self) -> None:
        """End it."""
        self._line.close()
        self._is_gone = True
        with self._process:
            self._process.kill()


class Fork:
    """A process that a ``WarmProcess`` has started; its methods are those of ``subprocess.Popen``."""

    def __init__(self, of: WarmProcess, pid: int, descriptor: int, stdout: IO[bytes], stderr: IO[bytes]):
        self._of, self.pid, self._descriptor, self.stdout, self.stderr = of, pid, descriptor, stdout, stderr
        self.returncode: Any = None

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code when it has ended."""
        if (code := self._ended(timeout)) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._descriptor], [], [], timeout)[0]:
            self.returncode = self._of.status(self.pid)
            os.close(self._descriptor)
        code: int | None = self.returncode
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


Process = subprocess.Popen[bytes] | Fork
