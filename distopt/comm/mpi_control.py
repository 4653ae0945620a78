"""Votes, messages between watchdogs, and the end of MPI processes."""

import atexit
import functools
import itertools
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from distopt.comm.control import LEAVE, ControlChannel, PeerLeft
from distopt.comm.mpi_joiners import leave_quietly
from distopt.comm.mpi_losses import Checked, elastic, finish, has_losses, is_loss
from distopt.comm.mpi_start import (
    abort,
    brand,
    check_launcher,
    end_alone,
    fail_by_signal,
    has_thread_multiple,
    is_running,
    mailboxes,
    mpi,
    number,
    start_watchdog,
    tell_of_exit,
)
from distopt.resilience import job
from distopt.resilience.abort import abort_on_exception, announce_exit
from distopt.resilience.environment import SPAWNED
from distopt.resilience.operation_log import OperationLog, log_of_one, meeting_of, recorder

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "Membership",
    "MpiControl",
    "brand",
    "check_launcher",
    "finish",
    "has_thread_multiple",
    "join",
    "mpi",
    "world_comm",
]


class MpiMailbox:
    """Point-to-point texts between the watchdogs of the ranks of a communicator."""

    # They do not interfere with collectives.  A watchdog is a thread, so this needs MPI_THREAD_MULTIPLE.

    def __init__(self, comm: "MPI.Comm", ranks: Sequence[int]):
        # ranks: number of each of its ranks in the job
        self.rank, self.ranks = comm.rank, ranks
        self._comm: MPI.Comm | None = comm
        self._sent: list[MPI.Request] = []  # keep the buffers that they send alive
        self._lock = threading.Lock()

    def send(self, to: int, text: str) -> None:
        with self._lock:
            if self._comm:
                self._sent = [request for request in self._sent if not request.Test()]
                self._sent.append(self._comm.Isend(np.frombuffer(text.encode(), np.uint8), to))

    def receive(self) -> tuple[int, str] | None:
        """Return the sender of a text and the text, or None if there is none to receive."""
        status = mpi().Status()
        try:
            with self._lock:
                if not self._comm or not self._comm.Iprobe(status=status):
                    return None
                buffer = np.empty(status.count, np.uint8)
                self._comm.Recv(buffer, status.source)
        except Exception as error:
            if not is_loss(error):
                raise
            # others will revoke the communicator, whose ranks have nothing to ask any more
            return None
        return status.source, buffer.tobytes().decode()

    def close(self) -> None:
        """Stop using the communicator, which may be freed afterwards."""
        with self._lock:
            self._comm = None


class MpiControl(ControlChannel):
    """Votes over an MPI communicator that is used for nothing else."""

    def __init__(self, comm: "MPI.Comm", name: str):
        # name: its name, the same on all of its ranks
        self.rank, self.size, self._comm, self._name = comm.rank, comm.size, comm, name
        self._checked = Checked(comm)
        self.patience = 0.0
        self.ranks = numbers(comm)
        self.mailbox = MpiMailbox(comm, self.ranks) if has_thread_multiple() else None
        self._logs = 0
        self._leaving: MPI.Request | None = None  # the vote to leave
        self._votes = self.log("votes")
        world_rank = self.ranks[self.rank]
        self.waits = OperationLog(recorder, f"waits of rank {world_rank} ({name})", [world_rank], self.mailbox)

    def log(self, name: str) -> OperationLog:
        self._logs += 1
        return OperationLog(recorder, f"{name} ({self._name}, {self._logs})", self.ranks, self.mailbox)

    def maximum(self, votes: np.ndarray) -> None:
        recorder.step = self.progress
        # who has left waits for as long as the others train on, or evaluate; a benchmark's vector is of any length
        self._votes.limited = tuple(votes.tolist()) != LEAVE
        with self._votes("vote", 0, self.progress + self.part):
            with self._checked:
                MPI = mpi()
                request = self._comm.Iallreduce(MPI.IN_PLACE, votes, MPI.MAX)
                if self.patience:
                    finish([request], self)
                else:
                    request.Wait()

    def check_ends(self) -> None:
        if elastic() and has_losses(self._comm):
            raise PeerLeft("a rank of MPI has ended")

    def start(self, votes: np.ndarray) -> "MPI.Request":
        """Begin a vote, and return its request."""
        # It does not block, so that a rank that leaves can vote on all of its communicators in any order.
        MPI = mpi()
        return self._comm.Iallreduce(MPI.IN_PLACE, votes, MPI.MAX)

    def has_left(self, votes: np.ndarray) -> bool:
        """Tell if the last vote has ended, which the first call begins.

        Args:
            votes: this rank's, and then the result.

        Raises:
            PeerLeft: a rank was lost.
        """
        with self._checked:
            if self._leaving is None:
                self._leaving = self.start(votes)
            return bool(self._leaving.Test())

    def subgroup(self, members: tuple[int, ...]) -> "MpiControl":
        """Make a channel of some of the ranks.  Collective over all ranks."""
        part = self._comm.Split(members[0], self.rank)
        control = join(part).control
        part.Free()
        return control

    def close(self) -> None:
        self.forget()
        with self._votes("closing"):
            self._comm.Free()

    def meeting(self) -> OperationLog:
        """A context for a meeting of the ranks that are left, for which the time limit holds."""
        return meeting_of(self.ranks[self.rank])

    def revoke(self) -> None:
        """All votes fail from now on, on every rank.  Not collective."""
        self.forget()
        self._comm.Revoke()

    def forget(self) -> None:
        """Vote no more when this process ends, and stop the watchdog's messages."""
        if self in _controls:
            _controls.remove(self)
        if self.mailbox:
            self.mailbox.close()
            if self.mailbox in mailboxes:
                mailboxes.remove(self.mailbox)

    def gather_strings(self, text: str) -> list[str]:
        encoded = np.frombuffer(text.encode(errors="backslashreplace"), np.uint8)
        with self._votes("gather"):
            return self._all_gather(encoded)

    def _all_gather(self, payload: np.ndarray) -> list[str]:
        sizes = np.empty(self.size, np.int64)
        with self._checked:
            self._comm.Allgather(np.array([payload.size]), sizes)
        everyone = np.empty(int(sizes.sum()), np.uint8)
        with self._checked:
            self._comm.Allgatherv(payload, (everyone, sizes))
        return [part.tobytes().decode() for part in np.split(everyone, np.cumsum(sizes)[:-1])]


_controls: list[MpiControl] = []
_names = itertools.count()


def numbers(comm: "MPI.Comm") -> list[int]:
    """Return each rank's number in the job, ``(size,)``.  Collective."""
    found = np.empty(comm.size, np.int64)
    with Checked(comm):
        comm.Allgather(np.array([number()]), found)
    return [int(n) for n in found]


def _agree_on_name(comm: "MPI.Comm") -> str:
    """Return a name for a communicator, the same on all of its ranks and unique in the job.  Collective."""
    name = np.array([number(), next(_names)], np.int64)
    comm.Bcast(name)
    return f"rank {name[0]}'s {name[1]}"


def _leave() -> None:
    """Tell the ranks that still want to exchange, on any communicator, that this rank has left; called at exit."""
    if not is_running():
        return
    votes = {control: np.array(LEAVE, np.int64) for control in _controls if not control.broken}
    with _farewell():
        while votes:
            for control, vote in list(votes.items()):
                try:
                    if control.has_left(vote):
                        del votes[control]
                        control.finish_leaving(vote)
                except PeerLeft:  # which this rank is about to do too
                    votes.pop(control, None)
            time.sleep(0.001)


def _farewell() -> AbstractContextManager[None]:
    """A context without a time limit, to wait until the other ranks end: they may train on, or evaluate."""
    mailbox = mailboxes[0] if mailboxes else None
    return log_of_one(number(), "the end", mailbox, limited=False)("the end of the others")


@functools.cache
def _join(rank: int) -> None:
    """Set up this process as a rank, once."""
    # From now on an uncaught exception ends the job, an exit is announced to the other ranks, and time limits hold.
    if elastic():
        fail_by_signal()
    abort_on_exception(rank, end_alone if elastic() else abort)
    announce_exit(rank, tell_of_exit)
    start_watchdog(rank)
    for segment in job.segments():
        job.mark(job.SEGMENT, segment)
    if SPAWNED in os.environ:
        atexit.register(leave_quietly)  # after what is registered from here on
    atexit.register(_leave)
    MPI = mpi()
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_end_with_mpi), None)
    # a forked child is no rank and must not vote
    os.register_at_fork(after_in_child=_controls.clear)


def _end_with_mpi(*_: object) -> None:
    """Leave all communicators, and stop the messages of watchdogs."""
    # Called when MPI_Finalize begins, which a script may call itself.  At the interpreter's exit it comes after
    # `_leave`, and has nothing left to do.
    _leave()
    for control in _controls:
        if control.mailbox:
            control.mailbox.close()
    mailboxes.clear()


class Membership(NamedTuple):
    """Place of a rank among the ranks of an MPI communicator."""

    control: MpiControl
    local_rank: int  # this rank's number among the ranks of its host
    # hosts: host of each rank, `(size,)`, as the lowest rank on that host
    hosts: tuple[int, ...]


def join(comm: "MPI.Comm") -> Membership:
    """Set up votes for the ranks of an MPI communicator, and find the ranks of each host.  Collective."""
    # From now on an uncaught exception on one of several ranks ends the whole job.
    MPI = mpi()
    check_launcher(MPI.COMM_WORLD.size)
    if comm == MPI.COMM_NULL:
        raise ValueError(
            "comm must be a communicator of this rank, got MPI.COMM_NULL; the split put this rank in no group"
        )
    rank = number()
    if comm.size > 1:
        start_watchdog(rank)
    with meeting_of(rank):
        control = MpiControl(comm.Dup(), _agree_on_name(comm))
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        local_rank, lowest, hosts = node.rank, np.array([comm.rank]), np.zeros(comm.size, np.int64)
        node.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)
        comm.Allgather(lowest, hosts)
        node.Free()
    if comm.size > 1:
        _controls.append(control)
        if control.mailbox:
            mailboxes.append(control.mailbox)
        _join(rank)
    control.vote_on_version()
    return Membership(control, local_rank, tuple(hosts.tolist()))


def world_comm() -> "MPI.Comm":
    """Return COMM_WORLD; RuntimeError if the other ranks serve an mpi4py pool, and will not come."""
    world: MPI.Comm = mpi().COMM_WORLD
    if world.size > 1 and ("-m", "mpi4py.futures") in itertools.pairwise(sys.orig_argv):
        raise RuntimeError(
            "python -m mpi4py.futures runs the script on rank 0 alone, and the other ranks, which serve its pool, do "
            "not come to distopt.world(); start it without: mpiexec -n N python script.py"
        )
    return world
