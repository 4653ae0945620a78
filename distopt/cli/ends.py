"""How the ranks of a job come to their ends, as ``distopt run`` sees it: who was first, and why."""

import contextlib
import fcntl
import os
import select
import signal
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from distopt import job
from distopt.watch.report import names, waiting

# PIDFD_GET_INFO of linux/pidfd.h, which tells how a process has ended, whoever was its parent, from Linux 6.15 on
INFO = struct.Struct("=QQ11Ii")
GET_INFO = 3 << 30 | INFO.size << 16 | 0xFF << 8 | 11
HAS_EXIT = 1 << 3
SOON = 0.02  # seconds between two looks for ranks that have not entered yet


class Fault(NamedTuple):
    """Why a job cannot go on: a line to say, '' if a rank has said it, and the exit code, 0 if it is not known."""

    text: str
    code: int


class Ends:
    """Processes that are ranks, in the order in which they ended, also if they are looked at late."""

    def __init__(self, folder: Path, size: int, launcher: int):
        self._folder, self._size = folder, size
        self._ready = select.epoll()  # tells in the order in which things happened
        self._launcher = self._open(launcher)
        self._pids: dict[int, int] = {}  # by rank
        self._handles: dict[int, int] = {}
        self._ended: list[int] = []  # ranks

    def close(self) -> None:
        """Give all handles back."""
        self._ready.close()
        for handle in (self._launcher, *self._handles.values()):
            if handle >= 0:
                os.close(handle)

    def look(self, seconds: float) -> list[job.Rank]:
        """The ranks' marks, after so many seconds, or as soon as a process ends."""
        self._note(seconds if len(self._pids) == self._size else SOON)
        ranks = job.entered(self._folder)  # after it, so that who has ended has left all its marks
        for rank in ranks:
            if rank.rank not in self._pids:
                self._pids[rank.rank], self._handles[rank.rank] = rank.pid, self._open(rank.pid)
        return ranks

    def _open(self, pid: int) -> int:
        """A handle that becomes readable when a process ends; -1 if it has ended, or without such handles."""
        try:
            handle = os.pidfd_open(pid)
        except (OSError, AttributeError):
            return -1
        self._ready.register(handle, select.EPOLLIN)
        return handle

    def _note(self, seconds: float) -> None:
        ranks = {handle: rank for rank, handle in self._handles.items()}
        for handle, _ in self._ready.poll(seconds):
            if handle in ranks:
                self._ready.unregister(handle)
                self._ended.append(ranks[handle])
        unseen = [rank for rank, handle in self._handles.items() if handle < 0 and rank not in self._ended]
        self._ended += [rank for rank in unseen if job.state(self._pids[rank]) in "ZX"]

    def fault(self, ranks: Sequence[job.Rank]) -> Fault | None:
        """The first end that was none of a rank that is done; those that the launcher ended came later."""
        by_number = {rank.rank: rank for rank in ranks}
        spoken = [rank for rank in ranks if job.SPOKEN in rank.marks]
        for rank in (by_number[number] for number in self._ended):
            if rank.marks.keys() & {job.EXIT, job.OS_EXIT} or job.DONE not in rank.marks or self._status(rank.rank):
                return Fault("", self._code(spoken[0])) if spoken else Fault(self._told(rank), self._code(rank))
        there = [rank.rank for rank in ranks if job.MPI in rank.marks]
        never = [rank.rank for rank in ranks if job.DONE in rank.marks and job.MPI not in rank.marks]
        if there and never:
            return Fault(f"{names(never)} ended before distopt.world(), where {waiting(there)}", 1)
        return None

    def _told(self, rank: job.Rank) -> str:
        """How a rank ended, in a line."""
        status = self._status(rank.rank)
        where = f"after {rank.last}" if rank.votes else "before distopt.world()"
        for kind, name in ((job.OS_EXIT, "os._exit({})"), (job.EXIT, "exit code {}")):
            if kind in rank.marks:
                how = name.format(*sorted(rank.marks[kind]))
                return f"rank {rank.rank} ended by {how} {where}"
        if status is None:
            return f"rank {rank.rank} ended without a word {where}: killed, or left by an exit of C's"
        if status < 0:
            return f"rank {rank.rank} was killed by {signal.Signals(-status).name} {where}"
        return f"rank {rank.rank} ended without a word {where}: by an exit of C's, with code {status}"

    def _code(self, rank: job.Rank) -> int:
        """The exit code of a rank that failed, as a shell has it; 0 if nothing but the launcher knows it."""
        kinds = (job.SPOKEN, job.OS_EXIT, job.EXIT)
        marked = [int(code) for kind in kinds for code in rank.marks.get(kind, ())]
        found = [*marked, self._status(rank.rank)][0]
        return 0 if found is None else exit_code(found) or 1

    def _status(self, rank: int) -> int | None:
        """As ``subprocess`` has it; None where the kernel does not tell."""
        found = bytearray(INFO.pack(HAS_EXIT, *[0] * 13))
        deadline = time.monotonic() + 0.2
        while self._handles[rank] >= 0:
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._handles[rank], GET_INFO, found)
                mask, *_, status = INFO.unpack(found)
                if mask & HAS_EXIT:
                    return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:  # its parent has not collected it yet
                return None
            time.sleep(0.01)
        return None


def exit_code(status: int) -> int:
    """What a shell has for a status as ``subprocess`` has it."""
    return 128 - status if status < 0 else status & 0xFF
