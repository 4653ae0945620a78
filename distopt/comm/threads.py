"""Ranks as threads of one process, for tests, for teaching and for experiments on a laptop."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from distopt.comm.communicator import (
    Communicator,
    Groups,
    Ragged,
    as_flat,
    check_root,
    flat_parts,
    group_of,
    reduce_in_rank_order,
)
from distopt.comm.control import ControlChannel, PeerLeft
from distopt.comm.joiner import Joiner
from distopt.resilience.membership import Epoch, Quorum

_thread = threading.local()  # ``rank``: the communicator of a thread that run_ranks started
T = TypeVar("T")
Action = Callable[[list[Any]], list[Any]]


class ThreadWorld:
    """The threads of ``run_ranks`` that have not ended, and where they meet."""

    def __init__(self, size: int):
        self.size, self._changed = size, threading.Condition()
        self._all: list[ThreadRendezvous] = []
        self._ended: set[int] = set()
        # by the members of the first epoch
        self._quorums: dict[tuple[int, ...], Quorum] = {}
        # by these and rank
        self._epochs: dict[tuple[tuple[int, ...], int], tuple[Epoch, list[ThreadRendezvous]]] = {}

    def enter(self, rendezvous: "ThreadRendezvous") -> None:
        """Make ranks that have ended, or will, leave this rendezvous."""
        with self._changed:
            self._all.append(rendezvous)
            ended = list(self._ended)
        for rank in ended:
            rendezvous.leave(rank)

    def end(self, rank: int) -> None:
        """Make a rank leave every rendezvous."""
        with self._changed:
            self._ended.add(rank)
            every = list(self._all)
            for first, quorum in self._quorums.items():
                quorum.lose(rank)
                self._begin(first)
        for rendezvous in every:
            rendezvous.leave(rank)

    def next_epoch(
        self, first: tuple[int, ...], member: int, text: str, admit: bool = False
    ) -> "tuple[Epoch, list[ThreadRendezvous]]":
        """Wait for those members of a communicator that have not ended."""
        # Raises RuntimeError if this member has ended, but a thread that it has started has not.
        # first: the members of its first epoch.
        # admit: whether joiners may be in the epoch.
        # Returns the epoch, and a rendezvous of its members for data and for votes.
        with self._changed:
            if member in self._ended:
                raise RuntimeError(f"rank {member} has ended")
            if first not in self._quorums:
                self._quorums[first] = Quorum(set(first) - self._ended)
            self._quorums[first].ask(member, text, admit)
            self._begin(first)
            self._changed.wait_for(lambda: (first, member) in self._epochs)
            return self._epochs.pop((first, member))

    def _begin(self, first: tuple[int, ...]) -> None:
        epoch = self._quorums[first].begin()
        if epoch:
            rendezvous = [ThreadRendezvous(epoch.members, self) for _ in range(2)]
            self._epochs |= {(first, member): (epoch, rendezvous) for member in epoch.members}
            self._changed.notify_all()

    def awaits(self, first: tuple[int, ...]) -> bool:
        """Whether a rank that is none of these waits to join them."""
        with self._changed:
            return first in self._quorums and bool(self._quorums[first].joiners())


class ThreadRendezvous:
    """Rendezvous of ranks: the last one to arrive computes the results of all."""

    # A collective then takes one wait, and no copies of its arguments.

    def __init__(self, ranks: Sequence[int], world: ThreadWorld):
        # ranks: numbers in `run_ranks`
        self.ranks, self.world, self._lock = ranks, world, threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._offers: list[Any] = [None] * len(ranks)
        self._verbs = [""] * len(ranks)
        self._arrived = self._rounds = 0
        self._results: list[Any] | Exception = []
        self._left = ""
        world.enter(self)

    def meet(self, rank: int, verb: str, offer: Any, action: Action) -> Any:
        """Wait for the arguments of all ranks, and return this rank's result.  Collective."""
        # verb: name of the collective, which must be the same on all ranks.
        # action: maps the arguments of all ranks to their results, both in rank order; called on one rank.
        # Raises PeerLeft: a rank has ended.
        with self._lock:
            if self._left:
                raise PeerLeft(f"{self._left} before rank {rank} came to {verb}")
            self._offers[rank], self._verbs[rank] = offer, verb
            self._arrived += 1
            if self._arrived == len(self._offers):
                self._conclude(action)
            else:
                number = self._rounds
                while self._rounds == number and not self._left:
                    self._changed.wait()
                if self._rounds == number:
                    raise PeerLeft(f"{self._left} while rank {rank} waits in {verb}")
            if isinstance(self._results, Exception):
                raise self._results
            return self._results[rank]

    def _conclude(self, action: Action) -> None:
        odd = next((r for r, v in enumerate(self._verbs) if v != self._verbs[0]), None)
        try:
            if odd is not None:
                raise ValueError(f"ranks differ: rank 0 is in {self._verbs[0]}, rank {odd} in {self._verbs[odd]}")
            self._results = action(self._offers)
        except Exception as error:
            self._results = error
        self._arrived, self._rounds = 0, self._rounds + 1
        self._changed.notify_all()

    def leave(self, rank: int) -> None:
        """``rank`` of ``run_ranks`` takes part no more: each rendezvous here raises PeerLeft, now and later."""
        if rank in self.ranks:
            self.end(f"rank {rank} left")

    def check(self) -> None:
        """Raise PeerLeft if no rendezvous is possible any more."""
        if self._left:
            raise PeerLeft(self._left)

    def end(self, why: str) -> None:
        """Every rendezvous here raises PeerLeft, now and later."""
        with self._changed:
            self._left = self._left or why
            self._changed.notify_all()

    def subgroup(self, rank: int, members: tuple[int, ...]) -> "ThreadRendezvous":
        """Return a rendezvous of some of these ranks, each of which names its group.  Collective."""

        def make(groups: list[tuple[int, ...]]) -> list[ThreadRendezvous]:
            found = {g: ThreadRendezvous([self.ranks[m] for m in g], self.world) for g in set(groups)}
            return [found[group] for group in groups]

        rendezvous: ThreadRendezvous = self.meet(rank, "subgroup", members, make)
        return rendezvous

    @property
    def size(self) -> int:
        return len(self.ranks)


class ThreadControl(ControlChannel):
    """Votes between threads."""

    def __init__(self, rank: int, rendezvous: ThreadRendezvous):
        self.rank, self.size, self._rendezvous = rank, rendezvous.size, rendezvous

    def check_ends(self) -> None:
        self._rendezvous.check()

    def revoke(self) -> None:
        self._rendezvous.end(f"rank {self.rank} has revoked the votes")

    def subgroup(self, members: tuple[int, ...]) -> "ThreadControl":
        return ThreadControl(members.index(self.rank), self._rendezvous.subgroup(self.rank, members))

    def maximum(self, votes: np.ndarray) -> None:
        votes[:] = self._rendezvous.meet(
            self.rank, "a vote", votes.copy(), lambda offers: [np.maximum.reduce(offers)] * self.size
        )

    def gather_strings(self, text: str) -> list[str]:
        return list(
            self._rendezvous.meet(self.rank, "a vote's details", text, lambda offers: [tuple(offers)] * self.size)
        )


class ThreadCommunicator(Communicator):
    """Communicator of a rank that is a thread; ``run_ranks`` makes one for each rank.

    Args:
        rank: this rank.
        rendezvous: the rendezvous of its collectives.
        control: its votes.

    Example:
        >>> import numpy as np
        >>> from distopt.comm import ThreadCommunicator, run_ranks
        >>> def main(comm: ThreadCommunicator):
        ...     parts = comm.all_gather(np.array([10 * comm.rank]))
        ...     return [int(part[0]) for part in parts]
        >>> run_ranks(2, main)
        [[0, 10], [0, 10]]
    """

    rank_ordered = True
    hosts_summed = 2  # as of the MPI ranks that threads stand for
    control: ThreadControl

    def __init__(self, rank: int, rendezvous: ThreadRendezvous, control: ThreadControl):
        self.rank = self.local_rank = rank
        self.size, self._rendezvous, self.control = rendezvous.size, rendezvous, control
        self._first = tuple(rendezvous.ranks)  # of the first epoch

    def all_reduce(self, x: np.ndarray, op: str = "sum") -> None:
        """Replace x, in place, by its sum over ranks, or another reduction, in rank order.  Collective."""
        verb = "all_reduce" if op == "sum" else f"all_reduce by {op}"
        self._meet(verb, as_flat(x, op=op), lambda offers: _all_reduce(offers, op), x)

    def all_gather(self, x: np.ndarray, ragged: Ragged = False, into: np.ndarray | None = None) -> list[np.ndarray]:
        """Return read-only copies of every rank's x, which the ranks share; ``into`` is not used.  Collective."""
        flat = as_flat(x, writable=False)
        return list(self._meet("all_gather", flat, _all_gather, None if ragged else x))

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: Ragged = False) -> list[np.ndarray]:
        """Return copies of the parts for this rank, in rank order.  Collective."""
        return list(self._meet("all_to_all", flat_parts(parts, self.size), _all_to_all, None))

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        """Replace x, in place, by the x of rank ``root``.  Collective."""
        check_root(root, self.size)
        self._meet(f"broadcast from rank {root}", as_flat(x), lambda offers: _broadcast(offers, root), x)

    def barrier(self) -> None:
        """Wait until every rank has called this.  Collective."""
        self._meet("barrier", None, lambda offers: offers, None)

    def peers(self, x: np.ndarray) -> list[np.ndarray]:
        """Return the arrays of all ranks, in rank order: threads share their memory.  Collective."""
        return list(self._meet("peers", x, lambda offers: [tuple(offers)] * len(offers), None))

    def make_duplicate(self) -> Communicator:
        """Make a communicator of the same threads with rendezvous of its own.  Collective."""
        other = self.make_subgroup((tuple(range(self.size)),))
        other._first = self._first
        return other

    def make_subgroup(self, groups: Groups) -> "ThreadCommunicator":
        """Make a communicator of a group with rendezvous of its own.  Collective."""
        members = group_of(self.rank, groups)
        rank, rendezvous = members.index(self.rank), self._rendezvous.subgroup(self.rank, members)
        group = ThreadCommunicator(rank, rendezvous, self.control.subgroup(members))
        group._hosts = [self.hosts[member] for member in members]
        return group

    def revoke(self) -> None:
        """Make every rank's rendezvous here raise PeerLeft: of collectives, votes, the duplicate and the subgroups."""
        self._rendezvous.end(f"rank {self.rank} has revoked {self!r}")
        self.control.revoke()
        for other in self._made_of_it():
            other.revoke()

    def joiner_waits(self) -> bool:
        return self._rendezvous.world.awaits(self._first)

    def next_epoch(self, text: str, admit: bool = False) -> tuple[Communicator, list[str]]:
        """Return a communicator of the threads that have not ended, and a text of each.  Collective of these."""
        member = self._rendezvous.ranks[self.rank]
        epoch, rendezvous = self._rendezvous.world.next_epoch(self._first, member, text, admit)
        comm, before = _of_epoch(epoch, rendezvous, member, self._first), self._rendezvous.ranks
        if set(epoch.members) <= set(before):
            comm._hosts = [self.hosts[before.index(m)] for m in epoch.members]
        return comm, epoch.texts

    def waiting_for(self, members: Sequence[int]) -> Joiner:
        """Return a communicator of this thread alone, which these threads of ``run_ranks`` may admit."""
        member, world = self._rendezvous.ranks[self.rank], self._rendezvous.world

        def enter(text: str) -> tuple[Communicator, list[str]]:
            epoch, rendezvous = world.next_epoch(tuple(members), member, text)
            return _of_epoch(epoch, rendezvous, member, tuple(members)), epoch.texts

        return Joiner(enter, self.rank_ordered, f"thread {member}")

    def _meet(self, verb: str, offer: Any, action: Action, alike: np.ndarray | None) -> Any:
        shape = f" of {alike.size} {alike.dtype}" if alike is not None else ""
        return self._rendezvous.meet(self.rank, verb + shape, offer, action)


def _of_epoch(
    epoch: Epoch, rendezvous: Sequence[ThreadRendezvous], member: int, first: tuple[int, ...]
) -> ThreadCommunicator:
    """Return a communicator of the members of an epoch; ``first`` are those of the first epoch."""
    rank, (data, votes) = epoch.members.index(member), rendezvous
    comm = ThreadCommunicator(rank, data, ThreadControl(rank, votes))
    comm._first = first
    return comm


def _all_reduce(arrays: list[np.ndarray], op: str) -> list[Any]:
    total = reduce_in_rank_order(arrays, op)
    for x in arrays:
        x[...] = total
    return arrays


def _all_gather(arrays: list[np.ndarray]) -> list[Any]:
    copies = tuple(x.copy() for x in arrays)
    for x in copies:
        x.flags.writeable = False
    return [copies] * len(arrays)


def _all_to_all(parts: list[list[np.ndarray]]) -> list[Any]:
    return [[row[r].copy() for row in parts] for r in range(len(parts))]


def _broadcast(arrays: list[np.ndarray], root: int) -> list[Any]:
    for x in arrays:
        if x is not arrays[root]:
            x[...] = arrays[root]
    return arrays


def _rank_of_cause(error: BaseException) -> int:
    """Sort key: causes first, then the PeerLeft errors that follow from them, then SystemExit."""
    return 2 if isinstance(error, SystemExit) else 1 if isinstance(error, PeerLeft) else 0


def current_rank() -> ThreadCommunicator | None:
    """Return the communicator of this thread, or None if ``run_ranks`` did not start it."""
    return getattr(_thread, "rank", None)


def run_ranks(size: int, main: Callable[[ThreadCommunicator], T]) -> list[T]:
    """Call ``main(comm)`` on ``size`` threads, one per rank, and return the results in rank order.

    In ``main``, ``distopt.world()`` returns ``comm`` too, and objects made without a communicator use it.  Make the
    parameters of a model in ``main``, so that each rank has separate ones.

    Args:
        size: number of ranks.
        main: the program of a rank.

    Raises:
        ValueError: ``size`` is less than 1.
        BaseException: the error of the first rank that raises.  A rank that waits for one that has ended gets PeerLeft.

    Example:
        >>> from distopt.comm import run_ranks
        >>> run_ranks(3, lambda comm: comm.lengths(comm.rank))
        [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    world = ThreadWorld(size)
    data, votes = ThreadRendezvous(range(size), world), ThreadRendezvous(range(size), world)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            _thread.rank = ThreadCommunicator(rank, data, ThreadControl(rank, votes))
            results[rank] = main(_thread.rank)
        except BaseException as error:
            errors.append(error)
        world.end(rank)

    threads = [threading.Thread(target=run, args=(r,), name=f"rank {r}") for r in range(size)]
    for t in threads:
        t.start()
    try:
        for t in threads:
            t.join()
    finally:  # after a Ctrl-C, no rank can wait for another any more
        world.end(0)
    for error in sorted(errors, key=_rank_of_cause):
        raise error
    return results
