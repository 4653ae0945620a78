"""How MPI processes meet: who started them, their votes, their mail, and their end."""

import atexit
import functools
import io
import itertools
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from distopt import job
from distopt.guard import LEAVE, Control, abort_on_exception, announce_exit
from distopt.watch import Log, Watchman, limits, recorder

if TYPE_CHECKING:
    from mpi4py import MPI

# How each launcher tells a process the size of the world that it started.
LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "an Open MPI mpirun",
    "PMI_SIZE": "an MPICH-like mpiexec",
    "SLURM_STEP_NUM_TASKS": "srun",
}


def launched(environ: Mapping[str, str] = os.environ) -> tuple[int, str] | None:
    """The world size that a launcher announced in the environment, and how; None if there was no launcher."""
    for variable, launcher in LAUNCHERS.items():
        if environ.get(variable, "").isdigit():
            return int(environ[variable]), f"{launcher} set {variable}={environ[variable]}"
    return None


@functools.cache
def mpi() -> Any:
    """mpi4py's MPI, which starts MPI.  ImportError that says what to do if it is not usable."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(f"MPI is not usable here ({error}): pip install 'distopt[mpi]'") from error
    return MPI


def brand() -> str:
    """The MPI library that mpi4py runs on, as 'MPICH 5.0.2'."""
    MPI = mpi()
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def check_launcher(size: int, environ: Mapping[str, str] = os.environ) -> None:
    """RuntimeError if the launcher started another number of processes than the MPI library sees.

    That happens when ``mpirun`` and the MPI library are of different brands: N processes would each train alone.
    """
    world = launched(environ)
    if world and world[0] != size:
        raise RuntimeError(
            f"the launcher started {world[0]} processes ({world[1]}), but the MPI library of mpi4py, {brand()}, sees "
            f"{size}: launcher and library are of different brands, and every process would train alone. "
            "Start with this environment's own launcher: distopt run -n N script.py (distopt doctor shows both)"
        )


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
            if self.mail in _mails:
                _mails.remove(self.mail)
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
_mails: list[MpiMail] = []  # that the watchman reads
_names = itertools.count()


def any_thread() -> bool:
    """May any thread call MPI at any time?"""
    return bool(mpi().Query_thread() == mpi().THREAD_MULTIPLE)


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
    if not mpi().Is_initialized() or mpi().Is_finalized():
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
    return Log(recorder, f"the end of rank {rank}", [rank], limited=False)("the end of the others")


@functools.cache
def _join(abort: Any, rank: int) -> None:
    """Once per process: an exception ends the job, an exit is announced, time limits begin, output leaves by lines."""
    if os.environ.get("DISTOPT_RUN") and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)

    def end(code: int) -> None:
        job.mark(job.SPOKEN)
        abort(code)

    abort_on_exception(rank, end)
    announce_exit(rank)
    allowed = limits()
    if allowed:
        watchman = Watchman(rank, recorder, allowed, end if any_thread() else None, _mails)
        atexit.register(watchman.stop)  # after the farewell, before MPI's own end
    atexit.register(_leave)
    os.register_at_fork(after_in_child=_controls.clear)  # a child is no rank, and must not vote as one


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
    control = MpiControl(comm.Dup(), _agree_on_name(comm))
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank, lowest, hosts = node.rank, np.array([comm.rank]), np.zeros(comm.size, np.int64)
    node.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)
    comm.Allgather(lowest, hosts)
    node.Free()
    if comm.size > 1:
        _controls.append(control)
        if control.mail:
            _mails.append(control.mail)
        _join(MPI.COMM_WORLD.Abort, MPI.COMM_WORLD.rank)
    job.enter(MPI.COMM_WORLD.rank)
    control.meet()
    return Membership(control, local_rank, tuple(hosts.tolist()))


def world_comm() -> "MPI.Comm":
    """MPI's COMM_WORLD.  Raises ImportError without mpi4py."""
    world: MPI.Comm = mpi().COMM_WORLD
    return world
