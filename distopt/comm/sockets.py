"""Votes between the processes of one machine without MPI: a star of local sockets, whose centre is rank 0.

Both ends of a socket belong to one user, as the kernel says, and prove that they know the job's secret
(``distopt.comm.door``).  There is no port and no file, and what is sent are plain bytes: nothing that is received is
ever executed.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import multiprocessing.util
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, wait

import numpy as np

from distopt.comm.door import REFUSED, WELCOME, Door, enter
from distopt.guard import Control, PeerLeft, agreed
from distopt.numbers import whole
from distopt.watch import Log, Watchman, limits, recorder

MAXIMUM, GATHER, LEFT, CRASHED = b"M", b"G", b"L", b"C"  # what a message is


class SocketControl(Control):
    """One of ``size`` processes of this machine that know the same ``secret``, which only they should know.

    A rank that waits for longer than the time limit says where it is itself and ends with exit code 75; it cannot ask
    the others.

    Waits until all have come.  Raises TypeError or ValueError for a rank or size that is none, and RuntimeError, on all
    ranks that are there, if one has not come within ``patience`` seconds or if they differ in what they were told.
    """

    PATIENCE = 60.0

    def __init__(self, secret: bytes, rank: int, size: int, patience: float = PATIENCE):
        self.size = whole("world_size", size, 1)
        self.rank = whole("local_rank", rank, 0)
        if self.rank >= self.size:
            raise ValueError(f"local_rank must be below world_size={size}, got {rank}")
        self._lines: dict[int, Connection] = {}
        self._ended: set[int] = set()  # whose line has nothing more to say
        self._farewell, self._crashed = "", False  # of the first that ended
        key = hashlib.blake2b(secret, digest_size=32, person=b"distopt votes").digest()
        name = "\0distopt-" + hashlib.blake2b(secret, digest_size=16, person=b"distopt name").hexdigest()
        deadline = time.monotonic() + patience
        if rank == 0:
            self._lines = Door(name, key, size, patience).guests(deadline)
        else:
            self._lines[0] = self._call(name, key, patience, deadline)
        self._came: dict[int, deque[bytes]] = {other: deque() for other in self._lines}  # and was not asked for yet
        self._votes = self.log("votes")
        self.waits = Log(recorder, "this rank's waits", [self.rank])
        _controls.append(self)
        _say_farewell()
        if self.size > 1:
            _watch(self.rank)
        self.meet()

    def _call(self, name: str, key: bytes, patience: float, deadline: float) -> Connection:
        """Connect to rank 0, when it is there, and hear that all others are."""
        try:
            line, answer = enter(name, key, self.rank, self.size, deadline)
        except TimeoutError:
            raise self._absent(patience) from None
        except AuthenticationError as error:
            raise RuntimeError(f"rank {self.rank}: who answers for rank 0 does not know the id: {error}") from error
        if answer[:1] == REFUSED:
            raise agreed(RuntimeError(answer[1:].decode()), speaks=False)
        if answer[:1] != WELCOME:
            raise self._absent(patience)
        return line

    def _absent(self, patience: float) -> RuntimeError:
        return RuntimeError(
            f"rank {self.rank} of {self.size}: rank 0 did not come within {patience:g} s; were all ranks started, on "
            "this machine and with the same id?"
        )

    def log(self, name: str) -> Log:
        """What records operations that all ranks have alike."""
        return Log(recorder, f"{name} over sockets {next(_numbers)}", range(self.size))

    # ------------------------------------------------------------------------------------------- the two verbs

    def maximum(self, votes: np.ndarray) -> None:
        """Replace an int64 vector by its elementwise maximum over ranks."""
        votes[:] = np.frombuffer(self._meet(MAXIMUM, votes.tobytes(), _maximum), np.int64)

    def _gather(self, text: str) -> list[str]:
        """One text per rank, in rank order."""
        mine = json.dumps(text.encode(errors="backslashreplace").decode()).encode()
        return list(json.loads(self._meet(GATHER, mine, _gather)))

    def _meet(self, kind: bytes, mine: bytes, combine: Callable[[list[bytes]], bytes]) -> bytes:
        """All ranks' messages go to rank 0, which combines them; every rank gets the result."""
        if self._gone:
            raise self._gone
        recorder.step = self.progress
        with self._votes("vote" if kind == MAXIMUM else "gather", 0, self.progress + self.part):
            return self._exchange(kind, mine, combine)

    def _exchange(self, kind: bytes, mine: bytes, combine: Callable[[list[bytes]], bytes]) -> bytes:
        if len(self._lines) < (1 if self.rank else self.size - 1):
            raise RuntimeError(f"rank {self.rank} has closed its votes, and cannot come to {self.progress}")
        if self.rank:
            self._send(0, kind + mine)
            return self._receive(0, kind)
        result = combine([mine, *(self._receive(other, kind) for other in self._lines)])
        for other in self._lines:
            self._send(other, kind + result)
        return result

    def _send(self, other: int, message: bytes) -> None:
        """Who has ended is found when something is wanted of it, after all that it sent before."""
        with contextlib.suppress(OSError):
            self._lines[other].send_bytes(message)

    def _receive(self, other: int, kind: bytes) -> bytes:
        while not self._came[other]:
            if self._farewell:
                raise self._lost()
            wait([line for rank, line in self._lines.items() if rank not in self._ended])
            self._look()
        message = self._came[other].popleft()
        if message[:1] != kind:
            raise RuntimeError(f"rank {self.rank} expects {kind!r} of rank {other}, and got {message!r:.9}")
        return message[1:]

    # ------------------------------------------------------------------------------------------- who has left

    def check(self) -> None:
        """Raise PeerLeft if another rank is known to have ended without a word; who says it has done its part."""
        self._look()
        if self._crashed:
            raise self._gone or self._lost()

    def _look(self) -> None:
        """Take what has come, from any rank."""
        for other, line in self._lines.items():
            try:
                while other not in self._ended and line.poll():
                    message = line.recv_bytes()
                    if message[:1] in (LEFT, CRASHED):
                        self._note(other, message[1:].decode(), message[:1] == CRASHED)
                    else:
                        self._came[other].append(message)
            except (EOFError, OSError):
                self._note(other, f"rank {other} ended without a word", True)

    def _note(self, other: int, text: str, crashed: bool) -> None:
        self._ended.add(other)
        self._farewell = self._farewell or text
        self._crashed = self._crashed or crashed

    def _lost(self) -> PeerLeft:
        """The error for this vote and all later ones; rank 0 passes it on, since it is what the others wait for."""
        if self.rank == 0:
            for other in self._lines:
                self._send(other, (CRASHED if self._crashed else LEFT) + self._farewell.encode())
        self._gone = agreed(PeerLeft(f"{self._farewell}, before {self.progress}"), speaks=self.rank == 0)
        return self._gone

    def close(self) -> None:
        """Tell the others, if they are still there, that this rank is gone, and how far it came."""
        error = _failing()
        word = f"failed with {type(error).__name__}: {error}," if error else "left"
        for other in self._lines:
            if not self._gone:
                self._send(
                    other, (CRASHED if error else LEFT) + f"rank {self.rank} {word} after {self.progress}".encode()
                )
        self.hang_up()

    def hang_up(self) -> None:
        """Give the sockets back without a word."""
        if self in _controls:
            _controls.remove(self)
        for line in self._lines.values():
            line.close()
        self._lines = {}


def _maximum(messages: list[bytes]) -> bytes:
    result: bytes = np.maximum.reduce([np.frombuffer(m, np.int64) for m in messages]).tobytes()
    return result


def _gather(messages: list[bytes]) -> bytes:
    return json.dumps([json.loads(m) for m in messages]).encode()


_controls: list[SocketControl] = []
_numbers = itertools.count()
_registered: list[int] = []  # the process that has


def _say_farewell() -> None:
    """At the end of this process, a child's too, which has no atexit."""
    if _registered != [os.getpid()]:
        _registered[:] = [os.getpid()]
        multiprocessing.util.Finalize(None, _leave, exitpriority=1)


@functools.cache
def _watch(rank: int) -> None:
    """From now on this process watches over its own waits; the others learn from its end."""
    allowed = limits()
    if allowed:
        Watchman(rank, recorder, allowed, None)


def _failing() -> BaseException | None:
    """The exception that ends this process, if one does."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) and not error.code else error


def _leave() -> None:
    for control in _controls[:]:
        control.close()


def _forget() -> None:
    """In a child: it is no rank, and must not keep a rank's lines open."""
    for control in _controls[:]:
        control.hang_up()


os.register_at_fork(after_in_child=_forget)
