"""Votes between the processes of one machine without MPI: every rank has a local socket to rank 0.

Both ends of a socket belong to one user, according to the kernel, and prove that they know the job's secret
(``distopt.comm.listener``).  There is no port and no file.  Messages are plain bytes, and are never executed.
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

from distopt.checks import check_int
from distopt.comm.control import ControlChannel, PeerLeft, agreed
from distopt.comm.listener import ACCEPTED, REFUSED, RankListener, connect
from distopt.comm.local import LocalControl
from distopt.resilience.operation_log import OperationLog, log_of_one, recorder
from distopt.resilience.timeouts import limits
from distopt.resilience.watchdog import Watchdog

MAXIMUM, GATHER, LEFT, CRASHED = b"M", b"G", b"L", b"C"  # first byte of a message: its kind


class SocketControl(ControlChannel):
    """Votes between processes of this machine.  Making one waits for all of them."""

    # A rank that waits for longer than the time limit prints where it waits, and ends with exit code 75.  It does not
    # know where the others are.
    # Raises RuntimeError on all ranks that have connected, if one has not within `patience` seconds, or if ranks differ
    # in `size` or have the same `rank`.

    CONNECT_SECONDS = 60.0  # for all ranks to connect

    def __init__(self, secret: bytes, rank: int, size: int, patience: float = CONNECT_SECONDS):
        # secret: the same bytes on all ranks, known to them only
        # patience: seconds for all ranks to connect
        self.size = check_int("world_size", size, 1)
        self.rank = check_int("local_rank", rank, 0)
        if self.rank >= self.size:
            raise ValueError(f"local_rank must be below world_size={size}, got {rank}")
        self._lines: dict[int, Connection] = {}
        self._ended: set[int] = set()  # ranks that send no more messages
        # last text of the first rank that ended; whether any has failed
        self._farewell, self._crashed = "", False
        key = hashlib.blake2b(secret, digest_size=32, person=b"distopt votes").digest()
        name = "\0distopt-" + hashlib.blake2b(secret, digest_size=16, person=b"distopt name").hexdigest()
        deadline = time.monotonic() + patience
        if rank == 0:
            self._lines = RankListener(name, key, size, patience).connections(deadline)
        else:
            self._lines[0] = self._connect(name, key, patience, deadline)
        # messages not asked for yet
        self._came: dict[int, deque[bytes]] = {other: deque() for other in self._lines}
        self._votes = self.log("votes")
        self.waits = log_of_one(self.rank, "waits")
        _controls.append(self)
        _say_farewell()
        if self.size > 1:
            watch(self.rank)
        self.vote_on_version()

    def _connect(self, name: str, key: bytes, patience: float, deadline: float) -> Connection:
        """Connect to rank 0, and return the connection when all ranks have connected."""
        try:
            line, answer = connect(name, key, self.rank, self.size, deadline)
        except TimeoutError:
            raise self._absent(patience) from None
        except AuthenticationError as error:
            raise RuntimeError(
                f"rank {self.rank}: the process that answers for rank 0 does not know the id: {error}"
            ) from error
        if answer[:1] == REFUSED:
            raise agreed(RuntimeError(answer[1:].decode()), speaks=False)
        if answer[:1] != ACCEPTED:
            raise self._absent(patience)
        return line

    def _absent(self, patience: float) -> RuntimeError:
        return RuntimeError(
            f"rank {self.rank} of {self.size}: rank 0 did not come within {patience:g} s; were all ranks started, on "
            "this machine and with the same id?"
        )

    def log(self, name: str) -> OperationLog:
        return OperationLog(recorder, f"{name} over sockets {next(_numbers)}", range(self.size))

    # ------------------------------------------------------------------------------------------- messages

    def maximum(self, votes: np.ndarray) -> None:
        votes[:] = np.frombuffer(self._meet(MAXIMUM, votes.tobytes(), _maximum), np.int64)

    def gather_strings(self, text: str) -> list[str]:
        encoded = json.dumps(text.encode(errors="backslashreplace").decode()).encode()
        return list(json.loads(self._meet(GATHER, encoded, _gather)))

    def subgroup(self, members: tuple[int, ...]) -> ControlChannel:
        """Return a channel of this rank alone: others are reached through rank 0, which may be in another group."""
        if len(members) > 1:
            raise ValueError(f"members must be one rank over sockets, got {list(members)}; start the ranks by MPI")
        return LocalControl()

    def _meet(self, kind: bytes, message: bytes, combine: Callable[[list[bytes]], bytes]) -> bytes:
        """Send this rank's message to rank 0, which combines those of all ranks, and return the result.  Collective."""
        # combine: makes the answer from the messages of all ranks, in rank order.
        if self._gone:
            raise self._gone
        recorder.step = self.progress
        with self._votes("vote" if kind == MAXIMUM else "gather", 0, self.progress + self.part):
            return self._exchange(kind, message, combine)

    def _exchange(self, kind: bytes, message: bytes, combine: Callable[[list[bytes]], bytes]) -> bytes:
        if len(self._lines) < (1 if self.rank else self.size - 1):
            raise RuntimeError(f"rank {self.rank} has closed its votes, and cannot come to {self.progress}")
        if self.rank:
            self._send(0, kind + message)
            return self._receive(0, kind)
        result = combine([message, *(self._receive(other, kind) for other in self._lines)])
        for other in self._lines:
            self._send(other, kind + result)
        return result

    def _send(self, rank: int, message: bytes) -> None:
        """Send a message to a rank, if it has not ended."""
        # _receive notices the end, after all messages that the rank sent before it
        with contextlib.suppress(OSError):
            self._lines[rank].send_bytes(message)

    def _receive(self, rank: int, kind: bytes) -> bytes:
        while not self._came[rank]:
            if self._farewell:
                raise self._peer_left_error()
            wait([line for r, line in self._lines.items() if r not in self._ended])
            self._poll()
        message = self._came[rank].popleft()
        if message[:1] != kind:
            raise RuntimeError(
                f"rank {self.rank}: a message of rank {rank} must begin with {kind!r}, got {message!r:.9}"
            )
        return message[1:]

    # ------------------------------------------------------------------------------------------- ends of ranks

    def check(self) -> None:
        """Raise PeerLeft if another rank is known to have failed; one that has left in order has done its part."""
        self._poll()
        if self._crashed:
            raise self._gone or self._peer_left_error()

    def _poll(self) -> None:
        """Read all messages that have arrived, from any rank, without waiting."""
        for other, line in self._lines.items():
            try:
                while other not in self._ended and line.poll():
                    message = line.recv_bytes()
                    if message[:1] in (LEFT, CRASHED):
                        self._note_end(other, message[1:].decode(), message[:1] == CRASHED)
                    else:
                        self._came[other].append(message)
            except (EOFError, OSError):
                self._note_end(other, f"rank {other} ended without a word", True)

    def _note_end(self, rank: int, text: str, crashed: bool) -> None:
        self._ended.add(rank)
        self._farewell = self._farewell or text
        self._crashed = self._crashed or crashed

    def _peer_left_error(self) -> PeerLeft:
        """Return the error for this vote and all later ones; rank 0 sends it to the others, which wait for rank 0."""
        if self.rank == 0:
            for other in self._lines:
                self._send(other, (CRASHED if self._crashed else LEFT) + self._farewell.encode())
        self._gone = agreed(PeerLeft(f"{self._farewell}, before {self.progress}"), speaks=self.rank == 0)
        return self._gone

    def close(self) -> None:
        """Tell the other ranks that this one leaves, and after which call; then close the sockets."""
        error = _failing()
        word = f"failed with {type(error).__name__}: {error}," if error else "left"
        for other in self._lines:
            if not self._gone:
                self._send(
                    other, (CRASHED if error else LEFT) + f"rank {self.rank} {word} after {self.progress}".encode()
                )
        self.hang_up()

    def hang_up(self) -> None:
        """Close the sockets without telling the other ranks."""
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
_registered: list[int] = []  # id of the process that has registered _leave


def _say_farewell() -> None:
    """Close the votes when this process ends; a child of multiprocessing does not run atexit's functions."""
    if _registered != [os.getpid()]:
        _registered[:] = [os.getpid()]
        multiprocessing.util.Finalize(None, _leave, exitpriority=1)


@functools.cache
def watch(rank: int) -> None:
    """Start a watchdog for the waits of this process; the other ranks notice when it ends this process."""
    allowed = limits()
    if allowed:
        Watchdog(rank, recorder, allowed, None)


def _failing() -> BaseException | None:
    """Return the exception that ends this process, or None."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) and not error.code else error


def _leave() -> None:
    for control in _controls[:]:
        control.close()


def _forget() -> None:
    """Close the sockets in a forked child, which is no rank and must not keep a rank's connections open."""
    for control in _controls[:]:
        control.hang_up()


os.register_at_fork(after_in_child=_forget)
