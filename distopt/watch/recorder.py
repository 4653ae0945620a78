"""What this process waits for, and what it waited for last: cheap enough to be always on."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

KEPT = 256  # operations
EQUAL_BYTES = ("all_reduce", "all_gather", "broadcast")  # verbs to which all ranks bring as many
START = "MPI's start, to which all ranks must come"  # what comes before all votes
MEETING = "the first meeting of a communicator's ranks"
NOTHING = contextlib.nullcontext()
# An operation without its end, and the end of the one before in the same log: one tuple is what costs least.
Row = tuple["Log", int, str, int, str, str, float, float]


class Operation(NamedTuple):
    """One wait for other ranks; ``ended`` is 0 as long as it lasts."""

    log: "Log"
    number: int
    verb: str
    nbytes: int
    purpose: str
    step: str  # the last vote was about, when it began
    began: float
    ended: float = 0.0

    @property
    def key(self) -> tuple[str, int]:
        """The same on all ranks that have it alike."""
        return self.log.name, self.number

    def __str__(self) -> str:
        return text(self.verb, self.purpose, self.nbytes, self.step)

    def entry(self) -> dict[str, Any]:
        """For a flight record."""
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
    if verb == "vote":
        return f"the vote on {purpose}"
    if verb in (START, MEETING):
        return verb
    if purpose:
        return f"{verb} of {purpose} in {step.removeprefix('the start of ')}"
    size = f" of {nbytes} bytes" if verb in EQUAL_BYTES else ""
    return f"{verb}{size} after {f'the vote on {step}' if step else 'the start'}"


class Log:
    """Operations that all ``ranks`` have alike, in the same order, so that their numbers can be compared.

    One thread at a time has one at a time: ``with log("barrier"):``.  ``mail`` is the way to those ranks, or None; what
    is not ``limited`` may take for ever.  ``others`` says in lines what else is known of ranks that have no mail.
    """

    def __init__(
        self,
        recorder: "Recorder",
        name: str,
        ranks: Sequence[int],
        mail: Any = None,
        limited: bool = True,
        others: Callable[[], str] = str,
    ):
        self.others = others
        self.recorder, self.name, self.ranks, self.mail, self.limited = recorder, name, list(ranks), mail, limited
        self.now: Row | None = None
        self.count, self.ended = 0, 0.0
        self._record = recorder.ring.append
        recorder.logs[name] = self

    def __call__(self, verb: str, nbytes: int = 0, purpose: str = "") -> "Log":
        """Begin an operation, which ends with the context."""
        self.count += 1
        self.now = now = (self, self.count, verb, nbytes, purpose, self.recorder.step, monotonic(), self.ended)
        self.ended = 0.0
        self._record(now)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """The last operation has ended."""
        self.ended = monotonic()


class Recorder:
    """The last ``KEPT`` operations of all logs, and those that have not ended."""

    def __init__(self) -> None:
        self.ring: deque[Row] = deque(maxlen=KEPT)
        self.logs: WeakValueDictionary[str, Log] = WeakValueDictionary()
        self.step = ""  # the last vote was about
        self.first = True  # has no step been done so far?
        self.anchor = time.time(), monotonic()

    def known(self) -> list[Log]:
        """The logs that somebody may still write to."""
        return [log for ref in self.logs.valuerefs() if (log := ref())]  # one call: other threads add some

    def operations(self) -> list[Operation]:
        """All, in the order in which they began; one that lasts may have left the ring."""
        ends: dict[Log, float] = {}
        found = []
        rows = list(self.ring.copy())
        gone = [log.now for log in self.known() if log.now and not log.ended and log.now not in rows]
        for row in reversed(gone + rows):
            log, before = row[0], row[-1]
            found.append(Operation(*row[:-1])._replace(ended=ends.get(log, log.ended)))
            ends[log] = before
        return sorted(found, key=lambda o: o.began)

    def open(self) -> list[Operation]:
        """Those that last."""
        lasting = [(log, log.now) for log in self.known()]
        return [Operation(*now[:-1]) for log, now in lasting if now and not log.ended]


def silent(verb: str, nbytes: int = 0, purpose: str = "") -> AbstractContextManager[None]:
    """The log of ranks that nobody watches: threads of one process, and a rank alone."""
    return NOTHING


recorder = Recorder()  # a process is what hangs, and what writes a flight record
