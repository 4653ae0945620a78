"""The ends of a job's ranks, as ``distopt run`` sees them: which rank was first, and why."""

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from distopt.resilience import job
from distopt.resilience.report import names, waiting
from distopt.run.warm import Process

# PIDFD_GET_INFO of linux/pidfd.h, which tells how a process has ended, whoever was its parent, from Linux 6.15 on
INFO = struct.Struct("=QQ11Ii")
GET_INFO = 3 << 30 | INFO.size << 16 | 0xFF << 8 | 11
HAS_EXIT = 1 << 3
CRASHES = {  # by faulthandler's words
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Floating-point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}
# frames below the script's own
RUNNER = re.compile(r'File "(<frozen runpy>|[^"]*(/runpy|/resilience/rank)\.py)"')
SOON = 0.02  # seconds between two looks for ranks that have not entered yet


class Fault(NamedTuple):
    """The reason why a job cannot go on."""

    text: str  # a line to print, '' if a rank has printed it
    code: int  # the exit code, 0 if it is unknown


class End(NamedTuple):
    """How a rank has ended."""

    rank: int
    in_order: bool  # whether it came to the end of its script, with exit code 0
    words: str  # in words: a line, and the traceback of a crash
    code: int  # the exit code of a rank that failed, as a shell has it; 0 if only the launcher knows it


class ExitWatch:
    """The processes of a job's ranks, in the order in which they ended, even if they are checked late."""

    def __init__(
        self,
        folder: Path,
        size: int,
        launcher: int,
        children: Mapping[int, Process] | None = None,
    ):
        # children: known before they have left a mark
        self._folder, self._size, self._children = folder, size, dict(children or {})
        self._ready = select.epoll()  # tells in the order in which things happened
        # launcher: may end before all ranks are known
        self._launcher = -1 if children else self._open(launcher)
        self._pids = {rank: child.pid for rank, child in self._children.items()}
        self._handles = {rank: self._open(pid) for rank, pid in self._pids.items()}
        # ranks by pipe, which an end closes before a launcher can notice it
        self._pipes: dict[int, int] = {}
        self._closed: list[int] = []  # ranks whose pipe is closed
        self._ended: list[int] = []  # ranks

    def close(self, code: int = 0) -> None:
        """Close what is open, when all have ended, with the job's exit code."""
        self._ready.close()
        for handle in (self._launcher, *self._handles.values(), *self._pipes):
            if handle >= 0:
                os.close(handle)

    def look(self, seconds: float) -> list[job.Rank]:
        """Return the ranks' marks after so many seconds, or as soon as a process ends."""
        self._note(seconds if len(self._pids) >= self._size else SOON)
        ranks = self.marks()  # after it, so that who has ended has left all its marks
        for rank in sorted(ranks, key=lambda rank: rank.votes):  # those who came further waited
            if rank.pid and rank.rank not in self._pids:  # 0 is a process of another machine
                self._pids[rank.rank], self._handles[rank.rank] = rank.pid, self._open(rank.pid)
                self._open_pipe(rank.rank)
        return ranks

    def marks(self) -> list[job.Rank]:
        """Return the ranks' marks; of children too that have left none."""
        ranks = job.entered(self._folder)
        unmarked = self._pids.keys() - {rank.rank for rank in ranks}
        return ranks + [job.Rank(rank, self._pids[rank], {}, 0, "", "") for rank in sorted(unmarked)]

    def ended(self, ranks: Sequence[job.Rank]) -> list[job.Rank]:
        """Return the ranks that have ended so far, in that order."""
        by_number = {rank.rank: rank for rank in ranks}
        return [by_number[number] for number in self._ended]

    def is_stopped(self, rank: job.Rank) -> bool:
        """Tell if a signal has stopped a rank, until another one continues it."""
        return job.state(rank.pid) in "Tt"

    def send(self, rank: job.Rank, number: int) -> None:
        """Send a signal to a rank, if it has not ended."""
        handle = self._handles.get(rank.rank, -1)
        with contextlib.suppress(ProcessLookupError):
            if handle >= 0:
                signal.pidfd_send_signal(handle, number)
            elif rank.rank not in self._ended:
                os.kill(rank.pid, number)

    def _open(self, pid: int) -> int:
        """Return a handle that becomes readable when a process ends; -1 if it has ended, or without pidfd_open."""
        try:
            handle = os.pidfd_open(pid)
        except (OSError, AttributeError):
            return -1
        self._ready.register(handle, select.EPOLLIN)
        return handle

    def _open_pipe(self, rank: int) -> None:
        with contextlib.suppress(OSError):
            pipe = os.open(self._folder / f"{rank}.{job.ALIVE}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._pipes[pipe] = rank
            self._ready.register(pipe, select.EPOLLHUP)
            # closed before it was opened here, which the kernel does not tell later
            if not os.read(pipe, 1):
                self._closed.append(rank)

    def _note(self, seconds: float) -> None:
        ranks = {handle: rank for rank, handle in self._handles.items()}
        for handle, _ in self._ready.poll(seconds):
            if handle in self._pipes:
                self._ready.unregister(handle)
                self._closed.append(self._pipes[handle])
            elif handle in ranks:
                self._ready.unregister(handle)
                self._ended.append(ranks[handle])
        unseen = [rank for rank, handle in self._handles.items() if handle < 0 and rank not in self._ended]
        self._ended += [rank for rank in unseen if job.state(self._pids[rank]) in "ZX"]

    def fault(self, ranks: Sequence[job.Rank]) -> Fault | None:
        """Return the fault of the first rank that ended without being done; None if there is none."""
        # Ranks that the launcher ended because of it ended later.
        by_number = {rank.rank: rank for rank in ranks}
        spoken = [rank for rank in ranks if job.SPOKEN in rank.marks]
        by_itself = [rank for rank in ranks if rank.crash or rank.marks.keys() & {job.EXIT, job.OS_EXIT}]
        for rank in (by_number[number] for number in self._ended):
            if rank in by_itself or job.DONE not in rank.marks or self._status(rank.rank):
                if spoken:
                    return Fault("", self.end_of(spoken[0]).code)
                # whom a launcher ends leaves no mark, but may be gone before the kernel tells of the end that caused it
                closed = [by_number[number] for number in self._closed if self._is_gone(number)]
                first = rank if rank in by_itself else [*by_itself, *closed, rank][0]
                end = self.end_of(first)
                return Fault(end.words, end.code)
        joined = [rank.rank for rank in ranks if job.MPI in rank.marks]
        never = [rank for rank in ranks if job.DONE in rank.marks and job.MPI not in rank.marks]
        if joined and never:
            # it may have said with which code before the kernel tells of its end
            if failed := [rank for rank in never if rank in by_itself]:
                end = self.end_of(failed[0])
                return Fault(end.words, end.code)
            return Fault(
                f"{names([rank.rank for rank in never])} ended before distopt.world(), where {waiting(joined)}", 1
            )
        return None

    def _is_gone(self, rank: int) -> bool:
        """Tell if a rank's process has ended, or does within a moment; a script may have closed the pipe before."""
        deadline = time.monotonic() + 0.2
        while job.state(self._pids[rank]) not in "ZX":
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def end_of(self, rank: job.Rank) -> End:
        """Tell how a rank has ended."""
        status = self._status(rank.rank)
        left = [
            (kind, code) for kind in (job.SPOKEN, job.OS_EXIT, job.EXIT) for code in sorted(rank.marks.get(kind, ()))
        ]
        crashed = [
            -number for crash, number in CRASHES.items() if rank.crash.startswith(f"Fatal Python error: {crash}")
        ]
        known = [*(int(code) for _, code in left), *crashed, status][0]
        code = 0 if known is None else exit_code(known) or 1
        if rank.crash:
            trace = [line for line in rank.crash.rstrip().splitlines() if not RUNNER.search(line)]
            words = "\n".join([f"rank {rank.rank} crashed {rank.where}", *trace])
        elif left:
            how = "os._exit({})" if left[0][0] == job.OS_EXIT else "exit code {}"
            words = f"rank {rank.rank} ended by {how.format(left[0][1])} {rank.where}"
        elif status is None:
            words = f"rank {rank.rank} ended without a word {rank.where}: killed, or left by an exit of C's"
        elif status < 0:
            words = f"rank {rank.rank} was killed by {signal.Signals(-status).name} {rank.where}"
        else:
            words = f"rank {rank.rank} ended without a word {rank.where}: by an exit of C's, with code {status}"
        in_order = job.DONE in rank.marks and not (rank.crash or left or status)
        return End(rank.rank, in_order, words, code)

    def _status(self, rank: int) -> int | None:
        """Return a rank's status as ``subprocess`` has it; None where the kernel does not tell."""
        if self._children:
            return self._children[rank].poll()
        buffer = bytearray(INFO.pack(HAS_EXIT, *[0] * 13))
        deadline = time.monotonic() + 0.2
        while self._handles[rank] >= 0:
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._handles[rank], GET_INFO, buffer)
                mask, *_, status = INFO.unpack(buffer)
                if mask & HAS_EXIT:
                    return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:  # its parent has not collected it yet
                return None
            time.sleep(0.01)
        return None


def exit_code(status: int) -> int:
    """Return a shell's exit code for a status as ``subprocess`` has it."""
    return 128 - status if status < 0 else status & 0xFF
