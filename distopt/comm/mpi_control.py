"""How MPI processes meet: their votes, their mail, and their end."""

import atexit
import contextlib
import functools
import io
import itertools
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from distopt import job
from distopt.comm.mpi_start import abort, any_thread, brand, check_launcher, launched, mails, mpi, runs, watch
from distopt.guard import LEAVE, Control, abort_on_exception, announce_exit
from distopt.watch import Log, recorder
from distopt.watch.recorder import MEETING

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "Membership",
    "MpiControl",
    "any_thread",
    "brand",
    "check_launcher",
    "finish",
    "join",
    "launched",
    "mpi",
    "world_comm",
]


class Waiter(Protocol):
    """Who waits for an exchange."""

    patience: float  # seconds to sleep between two looks at it; 0 waits busily, and may change meanwhile


def finish(requests: Sequence["MPI.Request"], waiter: Waiter) -> None:
    """Wait for exchanges.  MPI moves data only while somebody looks, and its own waiting takes a whole core."""
    MPI = mpi()
    while waiter.patience and not MPI.Request.Testall(requests):
        time.sleep(waiter.patience)
    MPI.Request.Waitall(requests)


class MpiMail:
    """Texts between the watchmen of the ranks of a communicator, from point to point, which its collectives never see.

    Without MPI_THREAD_MULTIPLE there must be none.
    """

    def __init__(self, comm: "MPI.Comm", ranks: Sequence[int]):
        self.rank, self.ranks = comm.rank, ranks
        self._comm: MPI.Comm | None = comm
        self._sent: list[MPI.Request] = []  # which hold what they send
        self._lock = threading.Lock()

    def send(self, to: int, text: str) -> None:
        """To one of the ranks; waits for nothing."""
        with self._lock:
            if self._comm:
                self._sent = [request for request in self._sent if not request.Test()]
                self._sent.append(self._comm.Isend(np.frombuffer(text.encode(), np.uint8), to))

    def receive(self) -> tuple[int, str] | None:
        """A sender and what it sent, if something has come."""
        status = mpi().Status()
        with self._lock:
            if not self._comm or not self._comm.Iprobe(status=status):
                return None
            room = np.empty(status.count, np.uint8)
            self._comm.Recv(room, status.source)
        return status.source, room.tobytes().decode()

    def close(self) -> None:
        """The communicator is going to be freed."""
        with self._lock:
            self._comm = None


class MpiControl(Control):
    """Votes over an MPI communicator of their own, of which all ranks know that it is ``name``."""

    def __init__(self, comm: "MPI.Comm", name: str):
        self.rank, self.size, self._comm, self._name = comm.rank, comm.size, comm, name
        self.patience = 0.0
        self.ranks = world_ranks(comm)
        self.mail = MpiMail(comm, self.ranks) if any_thread() else None
        self._logs = 0
        self._votes = self.log("votes")
        own = self.ranks[self.rank]
        self.waits = Log(recorder, f"waits of rank {own} ({name})", [own], self.mail)

    def log(self, name: str) -> Log:
        """What records operations that all ranks have alike."""
        self._logs += 1
        return Log(recorder, f"{name} ({self._name}, {self._logs})", self.ranks, self.mail)

    def maximum(self, votes: np.ndarray) -> None:
        """Replace an int64 vector by its elementwise maximum over ranks."""
        recorder.step = self.progress
        with self._votes("vote", 0, self.progress + self.part):
            finish([self.start(votes)], self)

    def start(self, votes: np.ndarray) -> "MPI.Request":
        """A vote is non-blocking, so that a rank that leaves can take part in it without waiting for one in order."""
        MPI = mpi()
        return self._comm.Iallreduce(MPI.IN_PLACE, votes, MPI.MAX)

    def close(self) -> None:
        """Give the MPI communicator back; collective."""
        if self in _controls:
            _controls.remove(self)
        if self.mail:
            self.mail.close()
            if self.mail in mails:
                mails.remove(self.mail)
        with self._votes("closing"):
            self._comm.Free()

    def _gather(self, text: str) -> list[str]:
        """One text per rank, in rank order."""
        mine = np.frombuffer(text.encode(errors="backslashreplace"), np.uint8)
        with self._votes("gather"):
            return self._all_gather(mine)

    def _all_gather(self, mine: np.ndarray) -> list[str]:
        sizes = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([mine.size]), sizes)
        everyone = np.empty(int(sizes.sum()), np.uint8)
        self._comm.Allgatherv(mine, (everyone, sizes))
        return [part.tobytes().decode() for part in np.split(everyone, np.cumsum(sizes)[:-1])]


_controls: list[MpiControl] = []
_names = itertools.count()


def world_ranks(comm: "MPI.Comm") -> list[int]:
    """The numbers of a communicator's ranks among all of the job."""
    group, world = comm.Get_group(), mpi().COMM_WORLD.Get_group()
    found = [int(r) for r in group.Translate_ranks(group=world)]
    group.Free()
    world.Free()
    return found


def _agree_on_name(comm: "MPI.Comm") -> str:
    """What all ranks of a communicator, and no others, call it."""
    found = np.array([mpi().COMM_WORLD.rank, next(_names)], np.int64)
    comm.Bcast(found)
    return f"rank {found[0]}'s {found[1]}"


def _leave() -> None:
    """At exit: tell the ranks that still want to exchange that this one is gone, on whichever communicator they are."""
    if not runs():
        return
    votes = {control: np.array(LEAVE, np.int64) for control in _controls if not control.broken}
    waiting = {control: control.start(vote) for control, vote in votes.items()}
    with _farewell():
        while waiting:
            for control in [c for c, request in waiting.items() if request.Test()]:
                del waiting[control]
                control.finish_leaving(votes[control])
            time.sleep(0.001)


def _farewell() -> AbstractContextManager[None]:
    """Who has ended waits for the others as long as they need: they may train on, or evaluate."""
    rank = mpi().COMM_WORLD.rank
    mail = mails[0] if mails else None
    return Log(recorder, f"the end of rank {rank}", [rank], mail, limited=False)("the end of the others")


@functools.cache
def _join(rank: int) -> None:
    """Once per process: an exception ends the job, an exit is announced, time limits begin, output leaves by lines."""
    if os.environ.get("DISTOPT_RUN") and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    abort_on_exception(rank, abort)
    announce_exit(rank)
    watch(rank)
    for segment in _segments():
        job.mark(job.SEGMENT, segment)
    atexit.register(_leave)
    MPI = mpi()
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_end_with_mpi), None)
    os.register_at_fork(after_in_child=_controls.clear)  # a child is no rank, and must not vote as one


def _end_with_mpi(*_: object) -> None:
    """As MPI_Finalize begins, which a script may call itself: at the end of the interpreter all of it has been done."""
    _leave()
    for control in _controls:
        if control.mail:
            control.mail.close()
    mails.clear()


def _segments() -> set[str]:
    """The names of the shared memory that MPICH has made for the ranks of this host."""
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text().splitlines()
        return {line.rpartition("/")[2] for line in maps if "/dev/shm/mpich_shm_" in line}
    return set()


class Membership(NamedTuple):
    """One rank's place among the ranks of an MPI communicator."""

    control: MpiControl
    local_rank: int  # among the ranks of its host
    hosts: tuple[int, ...]  # of each rank: the lowest rank there


def join(comm: "MPI.Comm") -> Membership:
    """Votes for the ranks of an MPI communicator; from here on an exception on one of them ends the whole job.

    Raises RuntimeError if the launcher's world is not COMM_WORLD's, and ValueError for COMM_NULL.
    """
    MPI = mpi()
    check_launcher(MPI.COMM_WORLD.size)
    if comm == MPI.COMM_NULL:
        raise ValueError("comm is MPI.COMM_NULL: this rank is in no group of the split")
    rank = MPI.COMM_WORLD.rank
    if comm.size > 1:
        watch(rank)
    with Log(recorder, f"meetings of rank {rank}", [rank])(MEETING):
        control = MpiControl(comm.Dup(), _agree_on_name(comm))
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        local_rank, lowest, hosts = node.rank, np.array([comm.rank]), np.zeros(comm.size, np.int64)
        node.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)
        comm.Allgather(lowest, hosts)
        node.Free()
    if comm.size > 1:
        _controls.append(control)
        if control.mail:
            mails.append(control.mail)
        _join(rank)
    control.meet()
    return Membership(control, local_rank, tuple(hosts.tolist()))


def world_comm() -> "MPI.Comm":
    """MPI's COMM_WORLD.  Raises ImportError without mpi4py."""
    world: MPI.Comm = mpi().COMM_WORLD
    return world
