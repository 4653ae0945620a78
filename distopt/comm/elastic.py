"""Communicator that goes on without the ranks it loses."""

import contextlib
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from distopt import device
from distopt.comm.communicator import Communicator, Groups, Ragged, Wrapper
from distopt.comm.control import fingerprint
from distopt.comm.joiner import WAITS
from distopt.resilience import job, membership

LOG = logging.getLogger("distopt")
T = TypeVar("T")
Resized = Callable[[int, int], object]  # is given this rank, and the number of ranks


class Elastic(Wrapper):
    """Communicator around one that can lose ranks: the others go on, with new numbers, in the same object.

    What ranks do together is a *transaction*.  It ends with a vote, which says nothing but that every rank has come to
    it with the outcome.  So if a rank is lost, the others can tell what to do by the number of transactions that each
    of them has seen end: if one has seen the end of the present one, all have its outcome, and keep it; if none has,
    all do it again, as fewer ranks.  That is the commit of two phases (Gray, "Notes on data base operating systems",
    1978) with any survivor as its coordinator.

    Collectives outside of a transaction are one each, which begins with a vote, as a rank whose script has ended takes
    part in votes alone.  Their arrays are put back before they are done again.

    Args:
        comm: the communicator; it defines ``next_epoch``.
        epochs: communicators of the same ranks, of which the first defines it; None for this one alone.

    Attributes:
        ended: transactions that this rank has seen end.
        most: that any rank has seen end, as far as this one knows.

    Example:
        >>> import numpy as np
        >>> from distopt.comm import Elastic, run_ranks
        >>> def main(comm):
        ...     comm, x = Elastic(comm), np.ones(1)
        ...     comm.all_reduce(x)
        ...     if comm.rank == 1:
        ...         return x.item()  # and leaves
        ...     comm.all_reduce(x)
        ...     return x.item(), f"rank {comm.rank} of {comm.size}"
        >>> run_ranks(3, main)
        [(6.0, 'rank 0 of 2'), 3.0, (6.0, 'rank 1 of 2')]
    """

    def __init__(self, comm: Communicator, epochs: "EpochGroup | None" = None):
        super().__init__(comm)
        self._epochs = epochs or EpochGroup()
        self._epochs.members.append(self)
        self.membership = self
        self.epoch = self._epochs.epoch
        self.ended = 0  # transactions that this rank has seen end
        self.most = 0  # that any rank has seen end, as far as this one knows
        self._inside = False  # a transaction
        self._next: Communicator | None = None  # the transport of the next try
        self._prepare: Callable[[], Callable[[], object]] | None = None
        self._told = self.epoch  # the epoch that callbacks have heard of
        self._resized: list[Resized] = []
        self._begun: tuple[int, Callable[[], object]] = -1, _nothing  # the epoch that it was called in

    @property
    def losses(self) -> int:
        """How many ranks were lost while this process was one of them."""
        return self._epochs.losses

    def on_resize(self, callback: Resized) -> None:
        """Call ``callback(rank, size)`` after each transaction in which they have changed.

        On a communicator that ``separate`` has made: in ``tell_resized``, as another thread may use it.
        """
        self._resized.append(callback)

    def resize(self, processes: int) -> None:
        """Go on with so many processes: those of higher rank end, or the launcher starts others.  Collective.

        Raises:
            RuntimeError: there are fewer, and nobody can start others.
            SystemExit: in those of higher rank.
        """
        launcher = membership.line()
        if processes > self.size and launcher is None:
            raise RuntimeError(
                f"processes must be at most {self.size} but over torch (distopt run --elastic --over torch), got "
                f"{processes}"
            )
        tells = launcher.resize if launcher and self.rank == 0 else lambda _: None
        self.collective(f"resize to {processes}", lambda: tells(processes))
        if self.rank >= processes:
            if launcher:
                launcher.leave()
                self._epochs.left.set()
            raise SystemExit(0)

    def on_epoch(self, begin: Callable[[], object]) -> None:
        """Call ``begin`` at the start of the first transaction of every epoch from the next one on; it may exchange."""
        self._begun = -1 if self.outside else self.epoch, begin

    def transaction(
        self, operation: Callable[[], T], undo: Callable[[], object] = lambda: None, votes: bool = True
    ) -> T:
        """Return what an operation returns, which all ranks that are left have done together.  Collective.

        Args:
            operation: exchanges with the other ranks, and changes nothing that ``undo`` does not put right.  An error
                that all ranks raise alike is an outcome too.
            undo: is called before it is done again.
            votes: False for an operation that no rank ends before all have come to it, and that has no outcome.
        """
        if self._inside or self.outside:
            return operation()
        self._inside, number = True, self.ended + 1
        outcome = _nothing  # of an operation without votes, whose end another rank has seen
        try:
            while True:
                try:
                    with device.polled(self.comm.check):
                        if self._begun[0] != self.epoch:
                            self._begun[1]()
                            self._begun = self.epoch, self._begun[1]
                        outcome = self._outcome(operation)
                    if votes:
                        self.comm.settle()
                        self._vote(f"the end of transaction {number}")
                    break
                except Exception as error:
                    if not self.lost(error):
                        raise
                self._reconfigure()
                if self.most >= number:
                    break
                undo()
            self.ended = number
        finally:
            self._inside = False
            self._take_next()
        if self is self._epochs.members[0]:
            self.tell_resized()
        return cast(T, outcome())

    def on_join(self, prepare: Callable[[], Callable[[], object]]) -> None:
        """Call ``prepare`` before processes are admitted, and what it returns when some have come, but not on these.

        Raises:
            RuntimeError: this was called before, or threads may be using other communicators of the same ranks.
        """
        if any(member._prepare for member in self._epochs.members):
            raise RuntimeError("rejoin must be called once, as one training lets processes in, got another call")
        if self._shuts:
            raise RuntimeError(
                "rejoin must be that of the LocalSteps with a delay, and there must be one of these: nobody can be let "
                "in while its fragments travel"
            )
        self._prepare = prepare

    def admit(self) -> None:
        """Admit the processes that wait, and send them what they need.  Collective then.

        All ranks know of them by the vote at the end of the last transaction.  Where ``separate`` has made another
        communicator, which a thread may be using, they are let in on that one, while nothing is under way there; and
        not at all where there are more of them.
        """
        if self.outside:
            raise RuntimeError(WAITS)
        if self.control.joiner_waits and not self._inside and not self._shuts:
            send = self._prepare() if self._prepare else _nothing
            self._reconfigure(admit=True)
            self.tell_resized()
            if self._epochs.came:
                send()

    @property
    def _shuts(self) -> bool:
        """Whether a thread may be using another communicator of these ranks, so that none may join on this one."""
        return self._epochs.members[1:] not in ([], [self])

    def join_others(self) -> None:
        """Wait until the others let this process in; from then on its rank and size are those among all.

        Raises:
            RuntimeError: it is one of them already.
        """
        if not self.outside:
            raise RuntimeError("this process is one of the ranks already")
        self._reconfigure()
        job.mark(job.CAME)
        self._epochs.catch_up()
        self.tell_resized()

    def leave(self) -> None:
        """Take no part in any later transaction; wait until every other rank leaves too, or goes on without this one.

        Until then another rank may not have heard that the last transaction has ended, and ask.  The others hear of it
        at their next vote on any communicator of these ranks.
        """
        self._epochs.leaving.set()
        self._leave()

    def _leave(self) -> None:
        left = self._epochs.left
        while self.size > 1 and not left.is_set():
            try:
                self.control.leave()
                left.set()
            except Exception as error:
                if not self.lost(error):
                    raise
                if not left.is_set():
                    self._reconfigure()

    def _leave_too(self) -> None:
        """Leave this communicator when the process leaves; runs in a thread of its own."""
        self._epochs.leaving.wait()
        with contextlib.suppress(Exception):  # it may be closed
            self._leave()

    def _outcome(self, operation: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that returns what the operation returned, or raises what all ranks have raised alike."""
        try:
            value = operation()
        except Exception as error:
            if not hasattr(error, "agreed") or self.lost(error):
                raise
            return functools.partial(_raise, error)
        return lambda: value

    def _vote(self, line: str) -> None:
        """Vote, apart from the votes of steps, on a line that must be the same on all ranks.  Collective."""
        control, waits = self.control, bool(self._prepare) and self.comm.joiner_waits()
        control.vote(control.progress, fingerprint([line]), lambda: [line], part=f", {line}", joiner_waits=waits)

    def _reconfigure(self, admit: bool = False) -> None:
        """Continue with the ranks that live, if this communicator does not yet.  Collective."""
        self._epochs.reconfigure(self.epoch, admit)
        self._take_next()

    def set_transport(self, comm: Communicator) -> None:
        """Take this transport from the next try on; one that has begun must not see another one."""
        self._next = comm
        if not self._inside:
            self._take_next()

    def _take_next(self) -> None:
        if self._next is not None:
            before, came = self.control, self.outside or self.control.came
            self.comm, self._next, self.epoch = self._next, None, self._epochs.epoch
            self.control.optimizers, self.control.progress = before.optimizers, before.progress
            self.control.joiner_waits, self.control.came = False, came
            self.control.stop = max(before.stop, self._epochs.stop)

    def tell_resized(self) -> None:
        """Call the callbacks of ``on_resize``, if the ranks have changed since."""
        if self._told != self.epoch:
            self._told = self.epoch
            for callback in self._resized:
                callback(self.rank, self.size)

    # -- collectives

    def collective(self, verb: str, operation: Callable[[], T], undo: Callable[[], object] = lambda: None) -> T:
        """Return what a collective returns, which outside of a transaction is one.

        Args:
            verb: its name, which must be the same on all ranks.
            operation: as for ``transaction``.
            undo: as for ``transaction``.
        """
        if self._inside or self.outside:
            return operation()

        def begun() -> T:
            self._vote(verb)
            return operation()

        return self.transaction(begun, undo)

    def all_reduce(self, x: np.ndarray, op: str = "sum") -> None:
        self.transaction_on(x, f"all_reduce by {op}", lambda: self.comm.all_reduce(x, op))

    @property
    def pipelines(self) -> bool:  # type: ignore[override]
        return self._inside and self.comm.pipelines

    def all_gather(self, x: np.ndarray, ragged: Ragged = False, into: np.ndarray | None = None) -> list[np.ndarray]:
        return self.collective("all_gather", lambda: self.comm.all_gather(x, ragged, into))

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: Ragged = False) -> list[np.ndarray]:
        return self.collective("all_to_all", lambda: self.comm.all_to_all(parts, ragged))

    def reduce_scatter(self, x: np.ndarray, op: str = "sum") -> np.ndarray:
        return self.collective(f"reduce_scatter by {op}", lambda: self.comm.reduce_scatter(x, op))

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        self.transaction_on(x, f"broadcast from rank {root}", lambda: self.comm.broadcast(x, root))

    def barrier(self) -> None:
        if self._inside or self.outside:
            self.comm.barrier()
        else:
            self.transaction(lambda: self._vote("barrier"), votes=False)

    def lengths(self, n: int) -> list[int]:
        return self.collective("lengths", lambda: self.comm.lengths(n))

    def transaction_on(self, x: np.ndarray, verb: str, operation: Callable[[], T]) -> T:
        if self._inside:
            return operation()
        before = device.copied(x) if device.is_array(x) else x
        return self.collective(verb, operation, lambda: device.copy(x, before))

    # -- communicators of the same ranks

    def make_duplicate(self) -> Communicator:
        """Make a duplicate for what is done inside of transactions of this one.  Collective."""
        return self.comm.duplicate()

    def make_subgroup(self, groups: Groups) -> Communicator:
        """Make a group for what is done inside of transactions of this one.  Collective."""
        return self.comm.subgroup(groups)

    def separate(self) -> Communicator:
        """Return another communicator that loses the same ranks.  Collective."""
        other = Elastic(self.comm, self._epochs)

        def make() -> None:
            other.comm = self.comm.separate()
            other.control.came = self.control.came

        self.collective("separate", make)
        # made now, since Python starts no thread at its end
        device.in_thread(other._leave_too, self.gpu, "distopt's leave")
        return other


class EpochGroup:
    """The communicators of the same ranks, which change to the ranks of the next epoch together."""

    # Together, since a rank may wait on one of them for a rank that waits on another one, or for a thread that does.

    def __init__(self) -> None:
        # in the order in which they were made; others are made from the first one
        self.members: list[Elastic] = []
        # came: how many processes joined at the last of these times
        # stop: number of the signal by which a rank was asked to end, as the others have said at the last loss
        # losses: ranks that were lost while this process was one of them
        self.epoch = self.came = self.stop = self.losses = 0
        # leaving: is set when this process comes to its end
        self.leaving, self.left = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def reconfigure(self, epoch: int, admit: bool) -> None:
        """Give all members transports of the ranks that live.  Collective, unless it was done after ``epoch``."""
        # epoch: of the member that asks.
        # admit: processes that wait may be among them, if all ranks say so.
        with self._lock:
            if self.epoch == epoch:
                self._reconfigure([member._next or member.comm for member in self.members], admit)

    def catch_up(self) -> None:
        """Count the transactions that the others have ended before this process joined."""
        for member in self.members:
            member.ended = member.most

    def _reconfigure(self, comms: list[Communicator], admit: bool) -> None:
        began, before = time.monotonic(), comms[0]
        # of a training that has a communicator of its own, if there is one
        place = comms[-1].control.progress
        while True:
            for comm in comms:
                comm.revoke()
            ended = [member.ended for member in self.members]
            try:
                rank = None if before.outside else before.rank
                comms[0], texts = comms[0].next_epoch(json.dumps([rank, ended, before.control.stop]), admit)
                said = [json.loads(text) for text in texts]
                self.epoch, self.stop = self.epoch + 1, max(stop for _, _, stop in said)
                self.came = sum(rank is None for rank, _, _ in said)
                # one of which a rank has no end yet is made again
                whole = min(len(ended) for _, ended, _ in said)
                for k, member in enumerate(self.members[:whole]):
                    member.most = max(member.most, *(ended[k] for _, ended, _ in said))
                comms[1:whole] = [comms[0].separate() for _ in range(1, whole)]
                break
            except Exception as error:
                if not comms[0].lost(error):
                    raise
        for member, comm in zip(self.members, comms, strict=True):
            member.set_transport(comm)
        lost = sorted({*range(before.size)} - {rank for rank, _, _ in said})
        self.losses += 0 if before.outside else len(lost)
        if comms[0].rank == 0 and (lost or self.came):
            _say(lost, self.came, before.size, place, comms[0].size, time.monotonic() - began)


def _say(lost: Sequence[int], came: int, before: int, place: str, size: int, seconds: float) -> None:
    what = [f"lost rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} of {before}"] if lost else []
    what += [f"{came} rank{'s' * (came > 1)} came"] if came else []
    goes = f"{size} go{'es' * (size == 1)} on"
    LOG.warning("distopt: %s at %s; %s after %.2f s", ", ".join(what), place, goes, seconds)


def _nothing() -> Any:
    return None


def _raise(error: Exception) -> Any:
    raise error
