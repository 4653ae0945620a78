"""``size`` ranks as threads of one process: the wire, for tests, for teaching and for experiments on a laptop."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from distopt.comm.communicator import Communicator, checked, checked_parts, checked_root, sum_in_rank_order
from distopt.guard import Control, PeerLeft

_thread = threading.local()  # has the ``rank`` that a thread is, if run_ranks started it
T = TypeVar("T")
Action = Callable[[list[Any]], list[Any]]


class Meeting:
    """Where ranks meet: the last one to arrive does the work for all, so a meeting costs one wait and no copies."""

    def __init__(self, size: int):
        self._changed = threading.Condition()
        self._offers: list[Any] = [None] * size
        self._verbs = [""] * size
        self._arrived = self._meetings = 0
        self._results: list[Any] | Exception = []
        self._left = ""

    def meet(self, rank: int, verb: str, offer: Any, action: Action) -> Any:
        """Offer something; once all ranks have, return this rank's entry of ``action(offers)``.

        Raises PeerLeft if a rank has ended, and ValueError on every rank if they do not all do the same.
        """
        with self._changed:
            if self._left:
                raise PeerLeft(f"{self._left} before rank {rank} came to {verb}")
            self._offers[rank], self._verbs[rank] = offer, verb
            self._arrived += 1
            if self._arrived == len(self._offers):
                self._conclude(action)
            else:
                meeting = self._meetings
                self._changed.wait_for(lambda: self._meetings > meeting or self._left)
                if self._meetings == meeting:
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
        self._arrived, self._meetings = 0, self._meetings + 1
        self._changed.notify_all()

    def leave(self, rank: int) -> None:
        """No meeting can be complete any more."""
        with self._changed:
            self._left = self._left or f"rank {rank} left"
            self._changed.notify_all()


class ThreadControl(Control):
    """Votes between threads."""

    def __init__(self, rank: int, size: int, meeting: Meeting):
        self.rank, self.size, self._meeting = rank, size, meeting

    def maximum(self, votes: np.ndarray) -> None:
        """Replace an int64 vector by its elementwise maximum over ranks."""
        votes[:] = self._meeting.meet(
            self.rank, "a vote", votes.copy(), lambda offers: [np.maximum.reduce(offers)] * self.size
        )

    def _gather(self, text: str) -> list[str]:
        """One text per rank, in rank order."""
        return list(self._meeting.meet(self.rank, "a vote's details", text, lambda offers: [tuple(offers)] * self.size))


class ThreadCommunicator(Communicator):
    """One of the ranks that ``run_ranks`` starts."""

    rank_ordered = one_process = True

    def __init__(self, rank: int, size: int, meetings: list[Meeting]):
        self.rank = self.local_rank = rank
        self.size, self._meetings = size, meetings  # of all communicators of these ranks, so that who leaves leaves all
        self._meeting, control = meetings[-2:]
        self.control = ThreadControl(rank, size, control)

    def all_reduce(self, x: np.ndarray) -> None:
        """Replace x, in place, by its sum over ranks, added in rank order."""
        self._meet("all_reduce", checked(x), _all_reduce, x)

    def all_gather(self, x: np.ndarray, ragged: bool = False, into: np.ndarray | None = None) -> list[np.ndarray]:
        """Every rank's x; the ranks share these read-only copies, and nothing is written to ``into``."""
        flat = checked(x, writable=False)
        return list(self._meet("all_gather", flat, _all_gather, None if ragged else x))

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: bool = False) -> list[np.ndarray]:
        """Copies of the parts for this rank."""
        return list(self._meet("all_to_all", checked_parts(parts, self.size), _all_to_all, None))

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        """Replace x, in place, by rank ``root``'s."""
        checked_root(root, self.size)
        self._meet(f"broadcast from rank {root}", checked(x), lambda offers: _broadcast(offers, root), x)

    def barrier(self) -> None:
        """Return when every rank has come."""
        self._meet("barrier", None, lambda offers: offers, None)

    def peers(self, x: np.ndarray) -> list[np.ndarray]:
        """The arrays themselves: threads share their memory."""
        return list(self._meet("peers", x, lambda offers: [tuple(offers)] * len(offers), None))

    def _duplicate(self) -> Communicator:
        def make(offers: list[Any]) -> list[Any]:
            self._meetings += Meeting(self.size), Meeting(self.size)
            return offers

        self._meet("duplicate", None, make, None)
        return ThreadCommunicator(self.rank, self.size, self._meetings)

    def _meet(self, verb: str, offer: Any, action: Action, alike: np.ndarray | None) -> Any:
        shape = f" of {alike.size} {alike.dtype}" if alike is not None else ""
        return self._meeting.meet(self.rank, verb + shape, offer, action)


def _all_reduce(arrays: list[np.ndarray]) -> list[Any]:
    total = sum_in_rank_order(arrays)
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
    """Causes first, then what they led to, and a mere exit last."""
    return 2 if isinstance(error, SystemExit) else 1 if isinstance(error, PeerLeft) else 0


def current_rank() -> ThreadCommunicator | None:
    """The communicator of this thread, if it is a rank that ``run_ranks`` started."""
    return getattr(_thread, "rank", None)


def run_ranks(size: int, main: Callable[[ThreadCommunicator], T]) -> list[T]:
    """Call ``main(comm)`` on ``size`` threads and return their results in rank order.

    In ``main``, ``distopt.world()`` and what is made without a communicator have ``comm`` too; parameters are made in
    ``main``, since each rank has its own.

    If ranks raise, the error of the first one to do so is raised here; a rank that waits for one that has ended gets
    PeerLeft, so that nobody waits for ever.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    meetings = [Meeting(size), Meeting(size)]
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            _thread.rank = ThreadCommunicator(rank, size, meetings)
            results[rank] = main(_thread.rank)
        except BaseException as error:
            errors.append(error)
        for meeting in meetings:
            meeting.leave(rank)

    threads = [threading.Thread(target=run, args=(r,), name=f"rank {r}") for r in range(size)]
    for t in threads:
        t.start()
    try:
        for t in threads:
            t.join()
    finally:  # after a Ctrl-C, no rank can wait for another any more
        for meeting in meetings:
            meeting.leave(0)
    for error in sorted(errors, key=_rank_of_cause):
        raise error
    return results
