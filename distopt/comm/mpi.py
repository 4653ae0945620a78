"""Ranks are MPI processes, arrays are numpy's."""

import atexit
import functools
import io
import os
import sys
import time
from collections.abc import Mapping, Sequence
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
from distopt.guard import LEAVE, Control, abort_on_exception

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


class MpiControl(Control):
    """Votes over an MPI communicator of their own."""

    def __init__(self, comm: "MPI.Comm"):
        self.rank, self.size, self._comm = comm.rank, comm.size, comm
        self.patience = 0.0

    def maximum(self, votes: np.ndarray) -> None:
        """Replace an int64 vector by its elementwise maximum over ranks."""
        finish([self.start(votes)], self)

    def start(self, votes: np.ndarray) -> "MPI.Request":
        """A vote is non-blocking, so that a rank that leaves can take part in it without waiting for one in order."""
        MPI = _mpi()
        return self._comm.Iallreduce(MPI.IN_PLACE, votes, MPI.MAX)

    def close(self) -> None:
        """Give the MPI communicator back; collective."""
        if self in _controls:
            _controls.remove(self)
        self._comm.Free()

    def gather(self, text: str) -> list[str]:
        """One text per rank, in rank order."""
        mine = np.frombuffer(text.encode(errors="backslashreplace"), np.uint8)
        sizes = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([mine.size]), sizes)
        everyone = np.empty(int(sizes.sum()), np.uint8)
        self._comm.Allgatherv(mine, (everyone, sizes))
        return [part.tobytes().decode() for part in np.split(everyone, np.cumsum(sizes)[:-1])]


_controls: list[MpiControl] = []


def _leave() -> None:
    """At exit: tell the ranks that still want to exchange that this one is gone, on whichever communicator they are."""
    if not _mpi().Is_initialized() or _mpi().Is_finalized():
        return
    votes = {control: np.array(LEAVE, np.int64) for control in _controls if not control.broken}
    waiting = {control: control.start(vote) for control, vote in votes.items()}
    while waiting:
        for control in [c for c, request in waiting.items() if request.Test()]:
            del waiting[control]
            control.finish_leaving(votes[control])
        time.sleep(0.001)


@functools.cache
def _join(abort: Any, rank: int) -> None:
    """Once per process: an exception ends the job, an exit is announced, and output leaves line by line."""
    job.enter(rank)
    if os.environ.get("DISTOPT_RUN") and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    abort_on_exception(rank, abort)
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
    control = MpiControl(comm.Dup())
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank, spans_hosts = node.rank, node.size < comm.size
    node.Free()
    if comm.size > 1:
        _controls.append(control)
        _join(MPI.COMM_WORLD.Abort, MPI.COMM_WORLD.rank)
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
        self.may_overlap = _mpi().Query_thread() == _mpi().THREAD_MULTIPLE
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
        sizes = self._sizes(flat.size) if ragged else [flat.size] * self.size
        return self._swap([flat] * self.size, sizes, None if into is None or ragged else cut(into, sizes))

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: bool = False) -> list[np.ndarray]:
        """Send ``parts[r]`` to rank r; return the parts for this rank, in rank order."""
        flats = checked_parts(parts, self.size)
        if not ragged:
            return self._swap(flats, [flats[self.rank].size] * self.size)
        sizes = np.empty(self.size, np.int64)
        self._comm.Alltoall(np.array([x.size for x in flats], np.int64), sizes)
        return self._swap(flats, sizes.tolist())

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        """Replace x, in place, by rank ``root``'s."""
        raw, root = checked(x).view(np.uint8), checked_root(root, self.size)
        for start in range(0, raw.size, self.CHUNK):
            self._comm.Bcast(raw[start : start + self.CHUNK], root)

    def barrier(self) -> None:
        """Return when every rank has come."""
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
        self._comm.Free()

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
