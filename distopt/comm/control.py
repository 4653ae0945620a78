"""Votes of the ranks before data moves.

A step is *collect, check, vote, exchange, update*.  An error of one rank before the vote is kept and handed to the
vote, so that every rank raises the same text, none waits for a rank that has failed, and nothing is applied anywhere.
"""

import abc
import builtins
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn, Protocol, TypeVar

import numpy as np

from distopt.resilience import job, signals
from distopt.resilience.operation_log import silent
from distopt.version import __version__

# Indices of the entries of a vote, an int64 vector; each rank gets its elementwise maximum over ranks.
FINGERPRINT, MINUS_FINGERPRINT, ERROR, REPORT, LEAVING, STAYING, STOP, JOINED, DOUBTS = range(9)
# the vote of a rank whose script has ended
LEAVE = (0, 0, False, False, True, False, 0, False, False)

NO_TEXT = "\0no text: "  # precedes the type name of an argument that is no text
# types that every rank raises as is
RAISED = (ValueError, TypeError, FloatingPointError, MemoryError, RuntimeError)

Describe = Callable[[], list[str]]
Waits = Callable[..., AbstractContextManager[None]]  # OperationLog
E = TypeVar("E", bound=Exception)


class PeerLeft(RuntimeError):
    """Another rank has left the job while this one still wants to exchange."""


def fingerprint(lines: Iterable[str]) -> int:
    """Return 63 bits of a hash of the lines, by which a vote compares what the ranks are about to do.

    Example:
        >>> fingerprint(["step 1"]) == fingerprint(["step 1"]) != fingerprint(["step 2"])
        True
    """
    digest = hashlib.blake2b("\n".join(lines).encode(errors="backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class ControlChannel(abc.ABC):
    """Channel for small host messages, votes and texts, between the ranks of one communicator; never over NCCL."""

    # A subclass defines `rank`, `size`, `maximum` and `gather_strings`; for exchanges by nodes `subgroup` too.

    rank: int
    size: int
    progress = "the start"  # name of the call that this rank voted on last
    part = ""  # of that call, if it has several votes
    optimizers = 0  # number of optimizers that were made on this communicator
    # What the last vote found: the number of the signal by which a rank was asked to end, 0 for none; the ranks that
    # had no data left; whether a rank doubted that the sums would be finite, or knew of a process that waits to join.
    stop = 0
    joined: frozenset[int] = frozenset()
    doubted = False
    # came: this process has joined later than others, in the place of a lost rank
    joiner_waits = came = False
    waits: Waits = staticmethod(silent)  # records the waits of this rank alone
    _gone: Exception | None = None  # why no vote is possible any more
    _process = 0  # id of the process that votes, which is none of its children

    @abc.abstractmethod
    def maximum(self, votes: np.ndarray) -> None:
        """Replace an int64 vector by its elementwise maximum over ranks.  Collective."""

    @abc.abstractmethod
    def gather_strings(self, text: str) -> list[str]:
        """Return one text per rank, in rank order.  Collective."""

    def subgroup(self, members: tuple[int, ...]) -> "ControlChannel":
        """Make a channel of some of the ranks, ascending and this one among them.  Collective over all ranks."""
        raise ValueError(f"the exchange by nodes needs a channel that defines subgroup, got a {type(self).__name__}")

    def gather(self, text: str) -> list[str]:
        """Return one text per rank, in rank order; TypeError on every rank if one passes no string.  Collective."""
        texts = self.gather_strings(text if isinstance(text, str) else NO_TEXT + type(text).__name__)
        for rank, answer in enumerate(texts):
            if answer.startswith(NO_TEXT):
                remedy = "broadcast_object takes other plain values"
                error = TypeError(f"rank {rank}: gather must be given a text, got {answer[len(NO_TEXT) :]}; {remedy}")
                raise agreed(error, self.rank == rank)
        return texts

    def gather_texts(self, lines: Sequence[str], make: Callable[[], str]) -> list[str]:
        """Return one text per rank, after a vote on ``lines``.  Collective."""
        # lines: a description of the call, which must be the same on all ranks.
        # make: returns this rank's text; on one rank at least it must not be empty.
        # Raises Exception: on every rank alike, the error that `make` raises on one rank.
        error, text = None, ""
        try:
            text = make()
        except Exception as e:
            error = e
        return self.vote(lines[0].split()[0], fingerprint(lines), lambda: list(lines), error, text)

    def log(self, name: str) -> Waits:
        """Return a log of operations that all ranks do alike; by default one that records nothing.  Collective."""
        return silent

    def check(self) -> None:  # noqa: B027  most channels notice it at the next vote, or the job is ended
        """Raise PeerLeft if another rank is known to have ended."""

    def check_ends(self) -> None:  # noqa: B027  where a rank that ends is no loss
        """Raise PeerLeft if a rank of an elastic job is known to have ended, or has called ``revoke``."""

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Release the resources of the channel."""

    def vote(
        self,
        name: str,
        call_fingerprint: int,
        describe: Describe,
        error: Exception | None = None,
        report: str = "",
        part: str = "",
        joined: bool = False,
        doubts: bool = False,
        joiner_waits: bool = False,
    ) -> list[str]:
        """Agree that every rank is about to do the same thing, and that no rank has an error.  Collective."""
        # Raises on every rank alike: the error of the lowest rank that has one; else ValueError that names the first
        # line in which ranks differ, but only on those that joined late if only these differ; PeerLeft if a rank has
        # ended.
        # describe: returns the call in lines; called only if ranks differ.
        # report: a text for all ranks.
        # part: part of the call that the vote is about, if it has several votes.
        # doubts: sums of this rank's data may overflow.
        # joiner_waits: this rank knows of a process that waits to be admitted.
        # Returns one report per rank; [] if none has any.
        if self._gone:
            raise self._gone
        if self._process != os.getpid():
            if self._process:
                raise RuntimeError(f"this process is a child of rank {self.rank}, which alone can come to {name}")
            self._process = os.getpid()
        self.progress, self.part, encoded = name, part, _encode(error) if error else ""
        job.note(name)
        flags = (error is not None, bool(report), False, 1 + joiner_waits, signals.asked, joined, doubts)
        votes = np.array([call_fingerprint, -call_fingerprint, *flags], np.int64)
        self.maximum(votes)
        if votes[LEAVING]:
            self._gone = self._peer_left(self.gather(""))
            raise self._gone
        if votes[ERROR]:
            self._raise_first(self.gather(encoded), error)
        if votes[FINGERPRINT] != -votes[MINUS_FINGERPRINT]:
            self._raise_difference(describe())
        self.stop, self.doubted, self.joiner_waits = int(votes[STOP]), bool(votes[DOUBTS]), votes[STAYING] > 1
        self.joined = frozenset()
        if votes[JOINED]:
            texts = self.gather("joined" * joined)
            self.joined = frozenset(rank for rank, text in enumerate(texts) if text)
        return self.gather(report) if votes[REPORT] else []

    def leave(self) -> None:
        """Take no part in any later vote; wait until every other rank leaves too, or knows it."""
        # Raises PeerLeft: a rank has ended meanwhile.
        votes = np.array(LEAVE, np.int64)
        self.maximum(votes)
        # the others know, and may have gone on without this rank already
        with contextlib.suppress(Exception):
            self.finish_leaving(votes)

    def vote_on_version(self) -> None:
        """Vote for the first time, on the version of distopt and the byte order.  Collective."""
        lines = [f"distopt {__version__}", f"{sys.byteorder}-endian numbers"]
        self.vote("the start", fingerprint(lines), lambda: lines)

    @property
    def broken(self) -> bool:
        """Whether another rank has left, so that no vote is possible any more."""
        return self._gone is not None

    def finish_leaving(self, votes: np.ndarray) -> None:
        """Finish a vote that began as ``LEAVE``: if any rank stays, send it this rank's progress."""
        if votes[STAYING]:
            self.gather(f"rank {self.rank} left after {self.progress}")

    def _peer_left(self, texts: list[str]) -> PeerLeft:
        left = "; ".join(filter(None, texts))
        return agreed(PeerLeft(f"{left}, before {self.progress}"), self.rank == texts.index(""), patience=0.5)

    def _raise_first(self, texts: list[str], cause: Exception | None) -> NoReturn:
        """Raise the lowest failing rank's error on every rank, with its built-in type, or as a RuntimeError."""
        rank, text = next((r, t) for r, t in enumerate(texts) if t)
        name, message = json.loads(text)
        kind = getattr(builtins, name, None)
        if kind not in RAISED:
            kind, message = RuntimeError, f"{name}: {message}"
        raise agreed(kind(f"rank {rank}: {message}"), speaks=self.rank == rank) from cause

    def _raise_difference(self, lines: list[str]) -> NoReturn:
        """Raise an error that names the first line in which ranks differ."""
        # A process that joined late, and is in another call than the ranks that were here before, ends alone: the
        # others continue.
        came, plans = zip(*(json.loads(t) for t in self.gather(json.dumps([self.came, lines]))), strict=True)
        text = _first_difference(plans)
        before = [plan for plan, late in zip(plans, came, strict=True) if not late]
        if all(came) or not any(came) or any(plan != before[0] for plan in before):
            raise agreed(ValueError(text), speaks=self.rank == 0)
        if lines == before[0]:
            raise PeerLeft(f"{text}, which came later, and ends alone")
        self._gone = ValueError(
            f"{text}; this rank took the place of a lost one, and must do what the others do from rejoin on: what it "
            "needs beside that, such as gradient_views, comes before rejoin; it ends alone"
        )
        raise self._gone


class Messages(Protocol):
    """What some ranks send each other."""

    rank: int
    size: int

    def exchange(self, parts: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """Send ``parts[r]`` to every other rank r, and receive ``received[r]``.  Collective."""

    def among(self, members: Sequence[int]) -> "Messages":
        """Return the messages between some of the ranks, this one among them."""

    def close(self) -> None: ...


class MessageControl(ControlChannel):
    """Votes over messages that nothing else uses meanwhile."""

    def __init__(self, messages: Messages):
        self.rank, self.size, self._messages = messages.rank, messages.size, messages
        self.vote_on_version()

    def maximum(self, votes: np.ndarray) -> None:
        found = np.tile(votes, (self.size, 1))
        self._messages.exchange([votes] * self.size, list(found))
        found.max(axis=0, out=votes)

    def gather_strings(self, text: str) -> list[str]:
        mine = np.frombuffer(text.encode(errors="backslashreplace"), np.uint8)
        lengths = np.full((self.size, 1), mine.size)
        self._messages.exchange([lengths[self.rank]] * self.size, list(lengths))
        texts = [np.empty(n, np.uint8) for n in lengths.reshape(-1).tolist()]
        texts[self.rank] = mine
        self._messages.exchange([mine] * self.size, texts)
        return [part.tobytes().decode() for part in texts]

    def subgroup(self, members: tuple[int, ...]) -> "MessageControl":
        return MessageControl(self._messages.among(members))

    def close(self) -> None:
        self._messages.close()


def _encode(error: Exception) -> str:
    kind = next((k for k in type(error).__mro__ if k in RAISED and k is not RuntimeError), type(error))
    try:
        return json.dumps([kind.__name__, str(error)])
    except Exception:  # an error that cannot even be printed must not stop the vote
        return json.dumps([kind.__name__, "(its text could not be made)"])


def _first_difference(plans: Sequence[list[str]]) -> str:
    """Return an error text that names the first line in which a rank differs from rank 0."""
    differing = next(r for r, plan in enumerate(plans) if plan != plans[0])
    left, right = plans[0], plans[differing]
    line = next((k for k, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    first, second = (plan[line] if line < len(plan) else "nothing" for plan in (left, right))
    return f"ranks differ: rank 0 has {first}, rank {differing} has {second}"


def agreed(error: E, speaks: bool, patience: float = 0.0) -> E:
    """Mark an error that every rank raises alike, and return it."""
    # speaks: whether this rank prints the traceback if the error is not caught; one rank should.
    # patience: seconds between the traceback and the end of the job.
    error.agreed = (speaks, patience)  # type: ignore[attr-defined]
    return error


def by_rank(reports: list[str]) -> str:
    """Return the reports of the ranks that have one, in one line.

    Example:
        >>> by_rank(["", "late"])
        'rank 1: late'
    """
    return "; ".join(f"rank {r}: {report}" for r, report in enumerate(reports) if report)
