"""Logs of the operations for which this process waits or has waited last, cheap enough to be always on."""

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

KEPT = 256  # operations
KEPT_RANGES = 10_000
# verbs with the same number of bytes on all ranks
EQUAL_BYTES = ("all_reduce", "all_gather", "broadcast")
START = "MPI's start, to which all ranks must come"  # the operation before all votes
MEETING = "the first meeting of a communicator's ranks"
NOTHING = contextlib.nullcontext()
# An operation without its end, and the end of the previous one in the same log: one tuple costs least.
OperationTuple = tuple["OperationLog", int, str, int, str, str, float, float]


class Operation(NamedTuple):
    """A wait for other ranks."""

    log: "OperationLog"
    number: int  # its number in the log, from 1
    verb: str
    nbytes: int
    purpose: str  # such as a vote's subject; '' for none
    step: str  # the subject of the last vote before it began
    began: float  # in seconds of the monotonic clock
    ended: float = 0.0  # 0 as long as it lasts

    @property
    def key(self) -> tuple[str, int]:
        """The log's name and the operation's number, which are the same on all ranks that have the log."""
        return self.log.name, self.number

    def __str__(self) -> str:
        return text(self.verb, self.purpose, self.nbytes, self.step)

    def entry(self) -> dict[str, Any]:
        """The operation as a dict for a flight record."""
        return {
            "log": self.log.name,
            "number": self.number,
            "text": str(self),
            "bytes": self.nbytes,
            "began": self.began,
            "ended": self.ended,
        }


def text(verb: str, purpose: str, nbytes: int, step: str) -> str:
    """An operation in words."""
    # step: the subject of the last vote before it began.
    if verb == "vote":
        return f"the vote on {purpose}"
    if verb in (START, MEETING):
        return verb
    if purpose:
        return f"{verb} of {purpose} in {step.removeprefix('the start of ')}"
    size = f" of {nbytes} bytes" if verb in EQUAL_BYTES else ""
    return f"{verb}{size} after {f'the vote on {step}' if step else 'the start'}"


class Range(NamedTuple):
    """A phase of a step, on a thread of this process, while somebody profiles."""

    phase: str
    bucket: int | None  # its number in the plan
    bytes: int  # of this rank's arrays; 0 for a vote
    thread: str
    began: float  # in seconds of the monotonic clock
    ended: float


class OperationLog:
    """A log of operations, the same on all ``ranks`` and in the same order, so that their numbers can be compared."""

    # One thread at a time has one operation at a time: `with log("barrier"):`.

    def __init__(
        self,
        recorder: "OperationRecorder",
        name: str,
        ranks: Sequence[int],
        mailbox: Any = None,
        limited: bool = True,
        others: Callable[[], str] = str,
    ):
        self.others = others  # returns lines on ranks that have no mailbox
        # name: the same on all ranks; no other log of this rank has it
        # ranks: numbers in the job
        # mailbox: the way to the watchdogs of those ranks; None if there is none
        # limited: whether the time limit holds for its operations
        self.recorder, self.name, self.ranks, self.mailbox, self.limited = recorder, name, list(ranks), mailbox, limited
        self.now: OperationTuple | None = None
        self.count, self.ended = 0, 0.0
        self._record = recorder.ring.append
        if recorder.logs.setdefault(name, self) is not self:
            raise ValueError(f"a log's name must be its own, got {name!r} twice")

    def __call__(self, verb: str, nbytes: int = 0, purpose: str = "") -> "OperationLog":
        """Begin an operation, which ends with the context; ``nbytes``: of this rank's array."""
        self.count += 1
        self.now = now = (self, self.count, verb, nbytes, purpose, self.recorder.step, monotonic(), self.ended)
        self.ended = 0.0
        self._record(now)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.ended = monotonic()


class OperationRecorder:
    """Records the last ``KEPT`` operations of all logs, and those that have not ended."""

    def __init__(self) -> None:
        self.ring: deque[OperationTuple] = deque(maxlen=KEPT)
        self.ranges: deque[Range] = deque(maxlen=KEPT_RANGES)
        # logs: the logs, by name
        self.logs: WeakValueDictionary[str, OperationLog] = WeakValueDictionary()
        self.step = ""  # the subject of the last vote
        self.first = True  # whether no step has been done so far
        # one moment, in seconds of the wall clock and of the monotonic clock
        self.anchor = time.time(), monotonic()

    def known(self) -> list[OperationLog]:
        """The logs that still exist."""
        # one call: other threads add some
        return [log for ref in self.logs.valuerefs() if (log := ref())]

    def operations(self) -> list[Operation]:
        """All operations in the order in which they began, also those that last and have left the ring."""
        ends: dict[OperationLog, float] = {}
        operations = []
        rows = list(self.ring.copy())
        gone = [log.now for log in self.known() if log.now and not log.ended and log.now not in rows]
        for row in reversed(gone + rows):
            log, previous_end = row[0], row[-1]
            operations.append(Operation(*row[:-1])._replace(ended=ends.get(log, log.ended)))
            ends[log] = previous_end
        return sorted(operations, key=lambda o: o.began)

    def open(self) -> list[Operation]:
        """The operations that have not ended."""
        lasting = [(log, log.now) for log in self.known()]
        return [Operation(*now[:-1]) for log, now in lasting if now and not log.ended]


def silent(verb: str, nbytes: int = 0, purpose: str = "") -> AbstractContextManager[None]:
    """A context that logs nothing, for ranks without a watchdog: threads of one process, and a rank alone."""
    return NOTHING


recorder = OperationRecorder()  # one for the process, which hangs as a whole and writes one flight record
_numbers = itertools.count()


def log_of_one(
    rank: int, what: str, mailbox: Any = None, limited: bool = True, others: Callable[[], str] = str
) -> OperationLog:
    """One more log of waits of this rank alone; there may be several, as of several threads."""
    return OperationLog(recorder, f"{what} of rank {rank}, {next(_numbers)}", [rank], mailbox, limited, others)


def meeting_of(rank: int, others: Callable[[], str] = str, limited: bool = True) -> OperationLog:
    """A context for this rank's wait for others that are about to make a communicator."""
    # others: returns lines on where they are to come to.
    return log_of_one(rank, "meetings", limited=limited, others=others)(MEETING)
