"""Communicator of MPI processes for numpy arrays."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from distopt.comm.communicator import Communicator, Groups, as_flat, check_root, group_of
from distopt.comm.control import PeerLeft
from distopt.comm.joiner import Joiner
from distopt.comm.mpi_control import (
    MpiControl,
    brand,
    has_thread_multiple,
    join,
    mpi,
    world_comm,
)
from distopt.comm.mpi_joiners import SpawnedJoiners, admit_joiner, be_admitted
from distopt.comm.mpi_losses import (
    Checked,
    Exchange,
    agree,
    elastic,
    finish,
    is_loss_on,
    settle,
    wait_while_all_live,
)
from distopt.comm.shared_memory import SharingCommunicator
from distopt.resilience.operation_log import OperationLog

if TYPE_CHECKING:
    from mpi4py import MPI

LEAST_SLICE = 1 << 16  # bytes


class MpiCommunicator(SharingCommunicator):
    """Communicator of MPI processes for numpy arrays.  Making one is collective.

    Data and votes travel on duplicates of ``comm``.  With more than one rank, an uncaught exception on any rank ends
    the whole job from then on.

    Args:
        comm: one of mpi4py's communicators, by default COMM_WORLD.
        reason: why this transport was chosen, for ``repr``.

    Raises:
        ImportError: there is no mpi4py.
        RuntimeError: the launcher started another number of processes than COMM_WORLD has.
        ValueError: ``comm`` is COMM_NULL.

    Example:
        Skipped where examples run as tests: it needs MPI and two processes, ``mpirun -n 2 python script.py``.

        >>> import numpy as np
        >>> from distopt.comm import MpiCommunicator
        >>> comm = MpiCommunicator()  # doctest: +SKIP
        >>> x = np.ones(2, np.float32)
        >>> comm.all_reduce(x)  # doctest: +SKIP
        >>> x.tolist()  # doctest: +SKIP
        [2.0, 2.0]
    """

    wire = "MPI"

    control: MpiControl
    _log: OperationLog
    _revoked = False

    CHUNK = 1 << 30  # elements or bytes per MPI call: Open MPI counts in 32 bits

    def __init__(self, comm: "MPI.Comm | None" = None, reason: str = ""):
        comm = world_comm() if comm is None else comm
        self._make(comm, comm.Dup() if elastic() else None, reason)

    def _make(self, comm: "MPI.Comm", base: "MPI.Comm | None", reason: str) -> None:
        """Make the MPI communicators of these ranks."""
        # base: one that is used for nothing but to find who of its ranks lives; None if none may be lost.  It is older
        # than all others: when a rank is lost while Open MPI looks for the number of a new communicator, a later search
        # for one that begins at a younger communicator waits for ever.
        self._base = base
        membership = join(comm)
        self.control = membership.control
        self.local_rank, self._hosts = membership.local_rank, membership.hosts
        self._comm = comm.Dup()
        self._checked = Checked(self._comm)
        self.rank, self.size = self._comm.rank, self._comm.size
        self.may_overlap = has_thread_multiple()
        self._log = self.control.log("data")
        self.patience = 0.0
        # Where ranks go and come, it must not depend on their number.
        self.rank_ordered = self.size <= 2 and base is None
        self.hosts_summed = 1 if base else 2
        self._place = self.reason = (
            f"{brand()}{', ' + reason if reason else ''}; {'several hosts' if self.spans_hosts else 'one host'}"
        )
        # Of so many bytes and more, sums are not MPI's.
        on_hosts = sorted(map(self._hosts.count, set(self._hosts)))
        sliced = self.size > 2 and (on_hosts[-1] == 1 or (on_hosts[0] == 1 and len(on_hosts) == 2))
        self._slices_from = self.size * LEAST_SLICE if sliced else sys.maxsize
        self.pipelines = self.spans_hosts
        self._why = reason
        # by identity; they keep the memory alive that MPI writes to, until `_finish`
        self._begun: dict[int, Exchange] = {}
        # of exchanges: a thread that goes on for all must not see freed requests
        self._ends = threading.Lock()
        self._joiners = SpawnedJoiners()

    def _sum_in_phases(self, x: np.ndarray, turn: int = 1) -> Iterator[None]:
        # Slices of numbers of 8 and 16 bits go to their owners, are added up there, and come back: floats in float32,
        # and integers wrap around, which Open MPI's do not with AVX.  So do those of all numbers if ranks may be
        # lost (`mpi_losses`), and large ones if each of several ranks has a host of its own, or one of two hosts has a
        # single rank: MPI libraries' sums send more.  Else MPI sums other dtypes, between hosts always by a
        # non-blocking call, overlapped or not: some MPI libraries add in another order in the blocking one.
        if x.dtype.itemsize > 2 and self._base is None and x.nbytes < self._slices_from:
            pieces = [x[start : start + self.CHUNK] for start in range(0, x.size, self.CHUNK)]
            if not self.spans_hosts:
                for piece in pieces:
                    self._comm.Allreduce(mpi().IN_PLACE, piece)
                return
            exchange = Exchange([self._comm.Iallreduce(mpi().IN_PLACE, piece) for piece in pieces], [])
            self._begun[id(exchange)] = exchange
            yield
            yield
            self._finish(exchange)
            return
        yield from super()._sum_in_phases(x, turn)

    def exchange(self, parts: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """Send ``parts[r]`` to every other rank r, and receive ``received[r]``.  Collective."""
        self._begin_exchange(parts, received)()

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        """Replace x, in place, by the x of rank ``root``.  Collective."""
        if self._base is not None:
            super().broadcast(x, root)
            return
        raw, root = as_flat(x).view(np.uint8), check_root(root, self.size)
        with self._log("broadcast", raw.size, self._tag):
            for start in range(0, raw.size, self.CHUNK):
                self._comm.Bcast(raw[start : start + self.CHUNK], root)

    def barrier(self) -> None:
        """Wait until every rank has called this.  Collective."""
        with self._log("barrier"), self._checked:
            self._comm.Barrier()

    def _lengths(self, sent: Sequence[int]) -> list[int]:
        """Return the number that each rank has for this one, ``(size,)``.  Collective."""
        received = np.empty(self.size, np.int64)
        with self._checked:
            self._comm.Alltoall(np.array(sent, np.int64), received)
        return received.tolist()

    def set_poll_interval(self, seconds: float) -> None:
        self.patience = self.control.patience = seconds
        for other in self._made_of_it():
            other.set_poll_interval(seconds)

    def make_duplicate(self) -> Communicator:
        """Make a communicator of the same ranks over messages of its own.  Collective."""
        made = MpiCommunicator(self._comm, reason=f"beside rank {self.rank}'s other one")
        made._joiners, made._hosts = self._joiners, self._hosts
        return made

    def make_subgroup(self, groups: Groups) -> Communicator:
        """Make a communicator of a group over messages of its own.  Collective."""
        members = group_of(self.rank, groups)
        part = self._comm.Split(members[0], self.rank)
        group = MpiCommunicator(part, reason=f"{len(members)} of {self.size} ranks")
        part.Free()
        return group

    # -- ranks that are lost

    def lost(self, error: BaseException) -> bool:
        """Tell if an error means that a rank has ended, or that another rank has called ``revoke``."""
        return is_loss_on(self._comm, error)

    def revoke(self) -> None:
        """Make all that any rank waits for on this communicator raise what ``lost`` knows, now and from now on.

        Its duplicate, its subgroups and its votes too.  Not collective.
        """
        if self._base is None or self._revoked:
            return
        self._revoked = True
        for other in self._made_of_it():
            other.revoke()
        self._comm.Revoke()
        self.control.revoke()

    def next_epoch(self, text: str, admit: bool = False) -> tuple[Communicator, list[str]]:
        """Return a communicator of the ranks that live, in their order, and a text of each.  Collective of these.

        It goes through a loop until no rank is lost meanwhile: all that live learn who they are, make the communicator,
        and agree that all have made it.  MPI decides the first and the last for all alike, whoever ends at any time;
        what was made before a loss is revoked, so that none waits in it for a rank that has left it.

        Nothing of the communicators of lost ranks is freed: Open MPI may still have messages for them under way.

        Args:
            text: this rank's.
            admit: whether the process that rank 0 has started may be among them.

        Raises:
            ValueError: the job is not elastic.
        """
        if self._base is None:
            return super().next_epoch(text, admit)
        self._settle()
        while True:
            with self.control.meeting():
                living, base = self._base.Shrink(), self._base
                # another rank may have come here from its vote on that, by a revocation
                if agree(living, admit):
                    admit = False
                    base = living = admit_joiner(living, self._joiners.take()) or self._base.Shrink()
                made, texts = self._on(living, base, text, self._why)
                if made:
                    made._joiners = self._joiners
                    return made, texts

    @classmethod
    def _on(
        cls, living: "MPI.Comm", base: "MPI.Comm", text: str, reason: str
    ) -> "tuple[MpiCommunicator | None, list[str]]":
        """Return a communicator of ranks that may be lost meanwhile, and a text of each; (None, []) if one was."""
        # All ranks that live agree on which of the two it is.
        made, texts = cls.__new__(cls), None
        try:
            made._make(living, base, reason)
            texts = made.control.gather(text)
        except Exception as error:
            if not is_loss_on(living, error):
                raise
            living.Revoke()
        if agree(living, texts is not None):
            return made, cast(list[str], texts)
        if texts is not None:
            made.revoke()
            made.control.forget()
        return None, []

    def joiner_waits(self) -> bool:
        """Tell if a process waits to be admitted; rank 0 starts one if ``distopt run`` asks for it.

        It waits until that has started MPI.  The next one is started when this one has been admitted.
        """
        if self.rank == 0:
            self._joiners.start()
        return self._joiners.one_waits

    @classmethod
    def waiting(cls, reason: str = "") -> Joiner:
        """Return a communicator of this process alone, until the ranks that have started it admit it."""

        def enter(text: str) -> tuple[Communicator, list[str]]:
            ranks = be_admitted()
            made, texts = cls._on(ranks, ranks, text, reason)
            if made is None:
                raise RuntimeError("another rank was lost while this process was let in")
            return made, texts

        return Joiner(enter, False, reason)

    def close(self) -> None:
        """Free the MPI communicators; nothing may be called after it.  Collective."""
        for other in self._made_of_it():
            other.close()
        self.control.close()
        with self._log("closing"):
            self._comm.Free()
            if self._base is not None:
                self._base.Free()

    def _finish(self, exchange: Exchange) -> None:
        requests = [*exchange.receives, *exchange.sends]
        try:
            if self._base is not None:
                wait_while_all_live(self._comm, requests, self)
            with self._ends:
                if self._revoked:  # by another thread, which has cancelled what was under way
                    raise PeerLeft("another thread goes on without a rank that was lost")
                finish(requests, self)
                del self._begun[id(exchange)]
        except Exception as error:
            self._end_if_lost(error)
            raise

    def _end_if_lost(self, error: Exception) -> None:
        """End all exchanges that are under way, if the error is the loss of a rank."""
        if self._base is not None and self.lost(error):
            self.revoke()
            self._settle()

    def _settle(self) -> None:
        """Wait until no exchange of the revoked communicator, and of those made of it, writes to memory any more."""
        for other in self._made_of_it():
            cast(MpiCommunicator, other)._settle()
        with self._ends:
            settle(self._begun.values())
            self._begun.clear()

    def _begin_exchange(
        self, parts: Sequence[np.ndarray], received: Sequence[np.ndarray], tag: int = 0
    ) -> Callable[[], None]:
        exchange = Exchange([], [])
        self._begun[id(exchange)] = exchange
        try:
            for rank in range(self.size):
                if rank != self.rank:
                    to, of = received[rank].view(np.uint8), parts[rank].view(np.uint8)
                    for start in range(0, to.size, self.CHUNK):
                        exchange.receives.append(self._comm.Irecv(to[start : start + self.CHUNK], rank, tag))
                    for start in range(0, of.size, self.CHUNK):
                        exchange.sends.append(self._comm.Isend(of[start : start + self.CHUNK], rank, tag))
        except Exception as error:
            self._end_if_lost(error)
            raise
        return lambda: self._finish(exchange)
