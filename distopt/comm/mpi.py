"""Ranks are MPI processes, arrays are numpy's."""

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
from distopt.comm.communicator import (
    HALVES,
    Communicator,
    all_reduce_in_rank_order,
    checked,
    checked_parts,
    checked_root,
    cut,
)
from distopt.comm.shared import SharedMemory, open_handle
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
def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(f"MPI is not usable here ({error}): pip install 'distopt[mpi]'") from error
    return MPI


def brand() -> str:
    """The MPI library that mpi4py runs on, as 'MPICH 5.0.2'."""
    MPI = _mpi()
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
    MPI = _mpi()
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
        status = _mpi().Status()
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
        self.mail = MpiMail(comm, self.ranks) if _any_thread() else None
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
        MPI = _mpi()
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

    def gather(self, text: str) -> list[str]:
        """One text per rank, in rank order."""
        mine = np.frombuffer(text.encode(errors="backslashreplace"), np.uint8)
        with self._votes("gather"):
            return self._gather(mine)

    def _gather(self, mine: np.ndarray) -> list[str]:
        sizes = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([mine.size]), sizes)
        everyone = np.empty(int(sizes.sum()), np.uint8)
        self._comm.Allgatherv(mine, (everyone, sizes))
        return [part.tobytes().decode() for part in np.split(everyone, np.cumsum(sizes)[:-1])]


_controls: list[MpiControl] = []
_mails: list[MpiMail] = []  # that the watchman reads
_names = itertools.count()


def _any_thread() -> bool:
    """May any thread call MPI at any time?"""
    return bool(_mpi().Query_thread() == _mpi().THREAD_MULTIPLE)


def world_ranks(comm: "MPI.Comm") -> list[int]:
    """The numbers of a communicator's ranks among all of the job."""
    group, world = comm.Get_group(), _mpi().COMM_WORLD.Get_group()
    found = [int(r) for r in group.Translate_ranks(group=world)]
    group.Free()
    world.Free()
    return found


def _agree_on_name(comm: "MPI.Comm") -> str:
    """What all ranks of a communicator, and no others, call it."""
    found = np.array([_mpi().COMM_WORLD.rank, next(_names)], np.int64)
    comm.Bcast(found)
    return f"rank {found[0]}'s {found[1]}"


def _leave() -> None:
    """At exit: tell the ranks that still want to exchange that this one is gone, on whichever communicator they are."""
    if not _mpi().Is_initialized() or _mpi().Is_finalized():
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
    rank = _mpi().COMM_WORLD.rank
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
        watchman = Watchman(rank, recorder, allowed, end if _any_thread() else None, _mails)
        atexit.register(watchman.stop)  # after the farewell, before MPI's own end
    atexit.register(_leave)
    os.register_at_fork(after_in_child=_controls.clear)  # a child is no rank, and must not vote as one


class Membership(NamedTuple):
    """One rank's place among the ranks of an MPI communicator."""

    control: MpiControl
    local_rank: int  # among the ranks of its host
    spans_hosts: bool


def join(comm: "MPI.Comm") -> Membership:
    """Votes for the ranks of an MPI communicator; from here on an exception on one of them ends the whole job.

    Raises RuntimeError if the launcher's world is not COMM_WORLD's, and ValueError for COMM_NULL.
    """
    MPI = _mpi()
    check_launcher(MPI.COMM_WORLD.size)
    if comm == MPI.COMM_NULL:
        raise ValueError("comm is MPI.COMM_NULL: this rank is in no group of the split")
    control = MpiControl(comm.Dup(), _agree_on_name(comm))
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank, spans_hosts = node.rank, node.size < comm.size
    node.Free()
    if comm.size > 1:
        _controls.append(control)
        if control.mail:
            _mails.append(control.mail)
        _join(MPI.COMM_WORLD.Abort, MPI.COMM_WORLD.rank)
    job.enter(MPI.COMM_WORLD.rank)
    control.meet()
    return Membership(control, local_rank, spans_hosts)


def world_comm() -> "MPI.Comm":
    """MPI's COMM_WORLD.  Raises ImportError without mpi4py."""
    world: MPI.Comm = _mpi().COMM_WORLD
    return world


class MpiCommunicator(Communicator):
    """``comm`` (default COMM_WORLD) for numpy arrays; data and votes travel on duplicates of it.

    With more than one rank an uncaught exception on any rank ends the whole job from here on.

    Raises ImportError without mpi4py, and RuntimeError if the launcher's world is not COMM_WORLD's.
    """

    CHUNK = 1 << 30  # elements or bytes per MPI call: Open MPI counts in 32 bits

    def __init__(self, comm: "MPI.Comm | None" = None, why: str = ""):
        comm = world_comm() if comm is None else comm
        membership = join(comm)
        self.control: MpiControl = membership.control
        self.local_rank, self.spans_hosts = membership.local_rank, membership.spans_hosts
        self._comm = comm.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size
        self.may_overlap = _any_thread()
        self._log = self.control.log("data")
        self.patience = 0.0
        self.rank_ordered = self.size <= 2
        self._place = f"{brand()}{', ' + why if why else ''}; {'several hosts' if self.spans_hosts else 'one host'}"
        self.why = self._place
        self._shared = SharedMemory()

    def all_reduce(self, x: np.ndarray) -> None:
        """Replace x, in place, by its sum over ranks."""
        flat = checked(x)
        if flat.dtype in HALVES:
            all_reduce_in_rank_order(self, flat)
            return
        with self._log("all_reduce", flat.nbytes, self._purpose):
            for start in range(0, flat.size, self.CHUNK):
                self._all_reduce(flat[start : start + self.CHUNK])

    def _all_reduce(self, x: np.ndarray) -> None:
        """Between hosts the non-blocking call, overlapped or not: in the other, some MPI adds in another order."""
        if self.spans_hosts:
            finish([self._comm.Iallreduce(_mpi().IN_PLACE, x)], self)
        else:
            self._comm.Allreduce(_mpi().IN_PLACE, x)

    def all_gather(self, x: np.ndarray, ragged: bool = False, into: np.ndarray | None = None) -> list[np.ndarray]:
        """Every rank's x, flat, in rank order."""
        flat = checked(x, writable=False)
        with self._log("ragged all_gather" if ragged else "all_gather", flat.nbytes, self._purpose):
            sizes = self._sizes(flat.size) if ragged else [flat.size] * self.size
            return self._swap([flat] * self.size, sizes, None if into is None or ragged else cut(into, sizes))

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: bool = False) -> list[np.ndarray]:
        """Send ``parts[r]`` to rank r; return the parts for this rank, in rank order."""
        flats = checked_parts(parts, self.size)
        with self._log("ragged all_to_all" if ragged else "all_to_all", 0, self._purpose):
            return self._swap(flats, self._lengths(flats) if ragged else [flats[self.rank].size] * self.size)

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        """Replace x, in place, by rank ``root``'s."""
        raw, root = checked(x).view(np.uint8), checked_root(root, self.size)
        with self._log("broadcast", raw.size, self._purpose):
            for start in range(0, raw.size, self.CHUNK):
                self._comm.Bcast(raw[start : start + self.CHUNK], root)

    def barrier(self) -> None:
        """Return when every rank has come."""
        with self._log("barrier"):
            self._comm.Barrier()

    def be_patient(self, seconds: float) -> None:
        """Sleep so long between two looks at an exchange in progress."""
        self.patience = self.control.patience = seconds
        if self._beside is not None:
            self._beside.be_patient(seconds)

    def alloc(self, n: int, dtype: Any) -> np.ndarray:
        """Zeroed flat memory, which ``peers`` can share if all ranks sit on one node."""
        shared = self._shared.alloc(n, dtype) if self.size > 1 and not self.spans_hosts else None
        return super().alloc(n, dtype) if shared is None else shared

    def peers(self, x: np.ndarray) -> list[np.ndarray] | None:
        """The same array on every rank, in rank order, if ``alloc`` made it and all ranks can open all of it."""
        if self.spans_hosts:
            return None
        handles = self.control.gather(self._shared.handle(x))
        others = [x if r == self.rank else open_handle(h, x.dtype) for r, h in enumerate(handles)]
        found = [a for a in others if a is not None]
        shared = all(self.control.gather("all" * (len(found) == self.size)))
        self.why = f"{self._place}, {'memory shared' if shared else 'no memory shared: sums go through MPI'}"
        return found if shared else None

    def explain(self, reason: str) -> None:
        """Let ``repr`` say one thing more."""
        self._place = self.why = f"{reason}; {self._place}"

    def _duplicate(self) -> Communicator:
        return MpiCommunicator(self._comm, why=f"beside rank {self.rank}'s other one")

    def close(self) -> None:
        """Give the MPI communicators back; collective, and the last that may be done with this one."""
        if self._beside is not None:
            self._beside.close()
        self.control.close()
        with self._log("closing"):
            self._comm.Free()

    def _lengths(self, parts: Sequence[np.ndarray]) -> list[int]:
        """Of the parts for this rank."""
        sizes = np.empty(self.size, np.int64)
        self._comm.Alltoall(np.array([x.size for x in parts], np.int64), sizes)
        return [int(s) for s in sizes]

    def _sizes(self, n: int) -> list[int]:
        sizes = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([n], np.int64), sizes)
        return [int(s) for s in sizes]

    def _swap(
        self, parts: Sequence[np.ndarray], sizes: Sequence[int], got: list[np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """Send ``parts[r]`` to rank r and receive ``sizes[r]`` elements from it, as bytes in chunks."""
        got = [np.empty(n, parts[0].dtype) for n in sizes] if got is None else got
        requests = []
        for rank in range(self.size):
            if rank == self.rank:
                got[rank][...] = parts[rank]
                continue
            requests += [self._comm.Irecv(piece, rank) for piece in self._pieces(got[rank])]
            requests += [self._comm.Isend(piece, rank) for piece in self._pieces(parts[rank])]
        finish(requests, self)
        return got

    def _pieces(self, x: np.ndarray) -> list[np.ndarray]:
        raw = x.view(np.uint8)
        return [raw[start : start + self.CHUNK] for start in range(0, raw.size, self.CHUNK)]
