"""Nobody hangs, nothing is half-applied: the vote before data moves, and the end of a job when one rank fails.

A step is *collect, check, vote, exchange, update*.  What goes wrong on one rank before the vote is kept as an error and
handed to the vote, so that every rank raises the same text and nothing is applied anywhere.
"""

import abc
import builtins
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import stat
import struct
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np

from distopt import job, signals
from distopt.version import __version__
from distopt.watch import flight, recorder, silent
from distopt.watch.watchman import say

# The entries of a vote, an int64 vector of which each rank gets the maximum over ranks.
FINGERPRINT, MINUS_FINGERPRINT, ERROR, REPORT, LEAVING, STAYING, STOP, JOINED, DOUBTS = range(9)
LEAVE = (0, 0, False, False, True, False, 0, False, False)  # what a rank whose script has ended votes

NO_TEXT = "\0no text: "  # before the type of what is none
RAISED = (ValueError, TypeError, FloatingPointError, MemoryError, RuntimeError)  # on every rank, if one has it

Describe = Callable[[], list[str]]
Waits = Callable[..., AbstractContextManager[None]]  # distopt.watch.Log
E = TypeVar("E", bound=Exception)


class PeerLeft(RuntimeError):
    """Another rank has left the job while this one still wants to exchange."""


def fingerprint(lines: Iterable[str]) -> int:
    """63 bits of the lines' hash: a vote compares what the ranks are about to do by it."""
    digest = hashlib.blake2b("\n".join(lines).encode(errors="backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Control(abc.ABC):
    """Small host messages between the ranks of one communicator; never NCCL, and nothing but votes.

    A communicator implements the two verbs ``maximum`` and ``_gather``.
    """

    rank: int
    size: int
    progress = "the start"  # what this rank voted for last
    part = ""  # of it
    optimizers = 0  # that were made here
    stop = 0  # the signal by which a rank was asked to end, as of the last vote
    live = 0  # ranks that had not joined, as of the last vote
    doubted = False  # does a rank doubt that the sums will be finite, as of the last vote?
    waits: Waits = staticmethod(silent)  # records what this rank alone waits for
    _gone: PeerLeft | None = None
    _process = 0  # that votes

    @abc.abstractmethod
    def maximum(self, votes: np.ndarray) -> None:
        """Replace an int64 vector by its elementwise maximum over ranks."""

    @abc.abstractmethod
    def _gather(self, text: str) -> list[str]:
        """One text per rank, in rank order."""

    def gather(self, text: str) -> list[str]:
        """One text per rank, in rank order.  Raises TypeError, on every rank alike, if one gives anything else."""
        texts = self._gather(text if isinstance(text, str) else NO_TEXT + type(text).__name__)
        for rank, found in enumerate(texts):
            if found.startswith(NO_TEXT):
                remedy = "broadcast_object takes other plain values"
                error = TypeError(f"rank {rank}: gather must be given a text, got {found[len(NO_TEXT) :]}; {remedy}")
                raise agreed(error, self.rank == rank)
        return texts

    def log(self, name: str) -> Waits:
        """What records operations that all ranks have alike.  Called where all of them are; by default nobody looks."""
        return silent

    def check(self) -> None:  # noqa: B027  most learn it from the next vote, or are ended
        """Raise PeerLeft if another rank is known to have ended."""

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Give back what it holds."""

    def vote(
        self,
        name: str,
        mark: int,
        describe: Describe,
        error: Exception | None = None,
        report: str = "",
        part: str = "",
        joined: bool = False,
        doubts: bool = False,
    ) -> list[str]:
        """Agree that every rank is about to do the same thing, and that no rank has an error.

        ``mark`` is the fingerprint of what this rank is about to do, and ``describe`` lists it in lines when ranks
        differ; ``name`` says it in a word, and ``part`` what of it, if it has several votes.  ``joined``: this rank
        only keeps the others company.  ``doubts``: sums of what it brings may overflow.  Returns the ranks' reports,
        one text per rank, or [] if none has any.

        Raises on every rank alike: the error of the lowest rank that has one; ValueError naming the first line that
        differs; PeerLeft if a rank has ended.
        """
        if self._gone:
            raise self._gone
        if self._process != os.getpid():
            if self._process:
                raise RuntimeError(f"this process is a child of rank {self.rank}, which alone can come to {name}")
            self._process = os.getpid()
        self.progress, self.part, encoded = name, part, _encode(error)
        job.note(name)
        flags = (error is not None, bool(report), False, True, signals.asked, joined, doubts)
        votes = np.array([mark, -mark, *flags], np.int64)
        self.maximum(votes)
        if votes[LEAVING]:
            self._gone = self._peer_left(self.gather(""))
            raise self._gone
        if votes[ERROR]:
            self._raise_first(self.gather(encoded), error)
        if votes[FINGERPRINT] != -votes[MINUS_FINGERPRINT]:
            plans = [json.loads(t) for t in self.gather(json.dumps(describe()))]
            raise agreed(ValueError(_first_difference(plans)), speaks=self.rank == 0)
        self.stop, self.doubted = int(votes[STOP]), bool(votes[DOUBTS])
        self.live = self.gather("joined" * joined).count("") if votes[JOINED] else self.size
        return self.gather(report) if votes[REPORT] else []

    def meet(self) -> None:
        """The first vote: ValueError on every rank if they differ in what must be the same for all."""
        lines = [f"distopt {__version__}", f"{sys.byteorder}-endian numbers"]
        self.vote("the start", fingerprint(lines), lambda: lines)

    @property
    def broken(self) -> bool:
        """Has another rank left, so that no vote is possible any more?"""
        return self._gone is not None

    def finish_leaving(self, votes: np.ndarray) -> None:
        """After a vote that began as ``LEAVE``: tell those who stay, if any do, how far this rank came."""
        if votes[STAYING]:
            self.gather(f"rank {self.rank} left after {self.progress}")

    def _peer_left(self, texts: list[str]) -> PeerLeft:
        left = "; ".join(filter(None, texts))
        return agreed(PeerLeft(f"{left}, before {self.progress}"), self.rank == texts.index(""), patience=0.5)

    def _raise_first(self, texts: list[str], own: Exception | None) -> NoReturn:
        """Raise the lowest failing rank's error on every rank, with its built-in type, or as a RuntimeError."""
        rank, text = next((r, t) for r, t in enumerate(texts) if t)
        name, message = json.loads(text)
        kind = getattr(builtins, name, None)
        if kind not in RAISED:
            kind, message = RuntimeError, f"{name}: {message}"
        raise agreed(kind(f"rank {rank}: {message}"), speaks=self.rank == rank) from own


def _encode(error: Exception | None) -> str:
    if error is None:
        return ""
    kind = next((k for k in type(error).__mro__ if k in RAISED and k is not RuntimeError), type(error))
    try:
        return json.dumps([kind.__name__, str(error)])
    except Exception:  # an error that cannot even be printed must not stop the vote
        return json.dumps([kind.__name__, "(its text could not be made)"])


def _first_difference(plans: list[list[str]]) -> str:
    """Name the first line in which a rank differs from rank 0."""
    other = next(r for r, plan in enumerate(plans) if plan != plans[0])
    ours, theirs = plans[0], plans[other]
    line = next((k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    first, second = (plan[line] if line < len(plan) else "nothing" for plan in (ours, theirs))
    return f"ranks differ: rank 0 has {first}, rank {other} has {second}"


def agreed(error: E, speaks: bool, patience: float = 0.0) -> E:
    """Mark an error that every rank raises alike; if nobody catches it, only the one that ``speaks`` says where."""
    error.agreed = (speaks, patience)  # type: ignore[attr-defined]
    return error


def by_rank(reports: list[str]) -> str:
    """What the ranks reported, in one line."""
    return "; ".join(f"rank {r}: {report}" for r, report in enumerate(reports) if report)


def abort_on_exception(rank: int, abort: Callable[[int], Any]) -> None:
    """From now on an exception that nobody catches, in any thread, ends the whole job: peers must not wait for ever.

    A hook that was there is called too, before the job ends, and it alone in a forked child, which is no rank.
    """
    process, before, before_in_thread = os.getpid(), sys.excepthook, threading.excepthook
    chained = before is not sys.__excepthook__

    def end(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        if os.getpid() != process:
            _tell(before, kind, error, trace)
            return
        if ending.is_set():  # by the hook that this one has called, or in another thread
            if chained:
                _tell(before, kind, error, trace)
            return
        ending.set()
        flight.write_if_wanted(recorder, rank, f"{kind.__name__}: {error}")
        speaks, patience = getattr(error, "agreed", (True, 0.0))
        if speaks:
            _say(f"rank {rank}: " + "".join(traceback.format_exception(kind, error, _without_runner(trace))))
            time.sleep(patience)
        else:
            _say(f"rank {rank}: {kind.__name__}: {error}\n")
            time.sleep(5)  # the rank that speaks prints where, and ends the job
        if chained:
            _tell(before, kind, error, trace)
        code = 130 if kind is KeyboardInterrupt else 1
        wait_until_read(patience=2)
        abort(code)
        time.sleep(5)  # MPI_Abort may return before the launcher ends this process, which must not go on meanwhile
        os._exit(code)

    def end_thread(args: threading.ExceptHookArgs) -> None:
        if os.getpid() != process:
            before_in_thread(args)
        elif args.exc_type is not SystemExit:  # which ends a thread, not the process
            end(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook, threading.excepthook = end, end_thread


ending = threading.Event()  # this process ends the job


def _tell(hook: Callable[..., Any], *error: Any) -> None:
    """Another library's hook, which must not stop the end of the job."""
    try:
        hook(*error)
    except Exception as failure:
        _say(f"the hook for exceptions failed: {type(failure).__name__}: {failure}\n")


@functools.cache
def announce_exit(rank: int) -> None:
    """From now on ``os._exit`` says who leaves, once: it ends the whole job, which MPICH's may call a success."""
    leave, process = os._exit, os.getpid()

    def announced(status: int) -> NoReturn:
        if os.getpid() == process and not ending.is_set():  # children end so; and who has said why already
            _say(f"rank {rank}: left by os._exit({status}) after {recorder.step or 'the start'}\n")
        leave(status)

    os._exit = announced


def _without_runner(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script on, without the frames of ``python -m mpi4py``."""
    while trace and trace.tb_next:
        module = trace.tb_frame.f_globals
        if module["__name__"] != "runpy" and module.get("__package__") != "mpi4py":
            break
        trace = trace.tb_next
    return trace


def wait_until_read(patience: float) -> None:
    """A launcher that hears of the end before it has read the reason throws the reason away: wait while it reads."""
    deadline = time.monotonic() + patience
    with contextlib.suppress(OSError):  # no such file any more, or one that cannot tell
        while stat.S_ISFIFO(os.fstat(2).st_mode) and time.monotonic() < deadline:
            (unread,) = struct.unpack("i", fcntl.ioctl(2, termios.FIONREAD, bytes(4)))
            if unread == 0:
                break
            time.sleep(0.01)


def _say(text: str) -> None:
    """To the standard error of this process, whatever ``sys.stderr`` is meanwhile."""
    with contextlib.suppress(OSError, ValueError):  # closed
        sys.stdout.flush()
    say(text)
