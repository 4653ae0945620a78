"""Socket by which processes connect to the first of them, on one machine or on several.

The first one, rank 0, accepts processes that prove that they know the secret.  Any process can connect to a socket.  So
local connections of other users are closed before anything is read, and each of the others is read in a thread with a
time limit, so that a silent one does not block the ranks.
"""

import contextlib
import json
import os
import socket
import struct
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import NamedTuple

from distopt.comm.control import agreed

ACCEPTED, REFUSED = b"W", b"R"  # first byte of rank 0's answer
# seconds in which a connection must prove that it knows the secret; a rank may connect again
PROOF_SECONDS = 10.0
MAX_UNPROVEN = 64  # connections that may do so at a time, in addition to one per rank
CONNECT_SECONDS = 5.0  # for one attempt to connect to another machine
TICK = 0.2  # seconds between two checks for connections that are late
MAX_MESSAGE_BYTES = 200  # of the message with a rank and a world size
Address = str | tuple[str, int]  # in Linux's abstract namespace; or host and port


class Words(NamedTuple):
    """How error texts call those that connect, and the options with their number and the number of all."""

    one: str
    number: str
    total: str


RANKS = Words("rank", "local_rank=", "world_size=")
CREDENTIALS, TIMEVAL = struct.Struct("iII"), struct.Struct("ll")
UNPROVEN = AuthenticationError, AssertionError, EOFError, OSError, TypeError, ValueError


class RankListener:
    """Listening socket of rank 0; a thread accepts connections until ``connections`` has been called."""

    def __init__(self, address: Address, key: bytes, size: int, patience: float, words: Words = RANKS):
        # patience: seconds that the ranks have to connect, for error texts
        self._key, self._size, self._patience, self._words = key, size, patience, words
        self._connected: list[tuple[int, Connection]] = []
        # deadlines of connections that have proved nothing yet
        self._unproven: dict[socket.socket, float] = {}
        self._problem, self._closed = "", False
        self._changed = threading.Condition()
        self._listener = _socket(address)
        self._listener.setblocking(False)
        try:
            self._listener.bind(address)
            self._listener.listen(max(size, socket.SOMAXCONN))
        except OSError as error:
            self._listener.close()
            raise RuntimeError(
                f"two processes were told {words.number}0, or the {'id' if isinstance(address, str) else 'port'} is "
                f"used again: {error}"
            ) from error
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="votes' listener", daemon=True)
        self._thread.start()

    def connections(self, deadline: float) -> dict[int, Connection]:
        """Wait until ``deadline`` (of ``time.monotonic``) for all other ranks; return their connections by rank."""
        # Raises RuntimeError on every rank that has connected, if one has not in time, or if ranks differ in the world
        # size or claim the same rank.
        with self._changed:
            self._changed.wait_for(
                lambda: self._problem or len(self._connected) == self._size - 1, deadline - time.monotonic()
            )
            missing = sorted(set(range(1, self._size)) - {rank for rank, _ in self._connected})
            self._closed = True
        self.close()
        if missing and not self._problem:
            names = f"{self._words.one}{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            self._problem = f"{names} of {self._size} did not come within {self._patience:g} s: see what they printed"
        for _, line in self._connected:
            # the first vote finds out that a rank has ended meanwhile
            with contextlib.suppress(OSError):
                line.send_bytes(REFUSED + self._problem.encode() if self._problem else ACCEPTED)
        if self._problem:
            raise agreed(RuntimeError(self._problem), speaks=True)
        return dict(sorted(self._connected))

    def comers(self) -> list[tuple[int, Connection]]:
        """Return the ranks that have come since the last call, and their connections."""
        with self._changed:
            (come, self._connected), (problem, self._problem) = (self._connected, []), (self._problem, "")
        for _, line in come:
            with contextlib.suppress(OSError):
                line.send_bytes(REFUSED + problem.encode() if problem else ACCEPTED)
        return [] if problem else come

    def close(self) -> None:
        """Listen no longer."""
        self._closed = True
        self._wake.close()
        self._thread.join()

    def _listen(self) -> None:
        with self._listener, self._woken:
            while not self._closed:
                full = len(self._unproven) >= MAX_UNPROVEN + self._size
                if self._listener in wait([self._woken] if full else [self._woken, self._listener], TICK):
                    self._accept()
                self._shut_down_late(time.monotonic())
        self._shut_down_late(float("inf"))

    def _accept(self) -> None:
        """Accept one connection, and read it in a separate thread; close it if it is another user's."""
        try:
            line, _ = self._listener.accept()
        except OSError:  # the other end has closed it, or there are too many open files
            time.sleep(0.01)
            return
        if line.family == socket.AF_UNIX and peer_uid(line) != os.geteuid():
            line.close()
            return
        line.setblocking(True)
        with self._changed:
            self._unproven[line] = time.monotonic() + PROOF_SECONDS
        threading.Thread(target=self._authenticate, args=(line,), name="votes' authentication", daemon=True).start()

    def _shut_down_late(self, now: float) -> None:
        """Shut down the connections whose deadline is before ``now``, which ends the threads that read them."""
        with self._changed:
            for line in (line for line, until in self._unproven.items() if until < now):
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

    def _authenticate(self, line: socket.socket) -> None:
        connection = None
        try:
            connection = Connection(os.dup(line.fileno()))
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            rank, size = json.loads(connection.recv_bytes(MAX_MESSAGE_BYTES))
            proven = isinstance(rank, int) and isinstance(size, int)
        except UNPROVEN:
            proven = False
        with self._changed:
            del self._unproven[line]
            line.close()
            if connection is None:
                return
            if not proven or self._closed:
                connection.close()
                return
            if size != self._size:
                one, _, total = self._words
                self._problem = f"{one} {rank} was told {total}{size}, {one} 0 {total}{self._size}"
            elif rank in [0, *(other for other, _ in self._connected)]:
                self._problem = f"two processes were told {self._words.number}{rank}"
            self._connected.append((rank, connection))
            self._changed.notify()


def connect(address: Address, key: bytes, rank: int, size: int, deadline: float) -> tuple[Connection, bytes]:
    """Connect to rank 0, and wait for its answer, which comes when all ranks have connected or the time is over."""
    # Raises TimeoutError without an answer by then, AuthenticationError if the process that answers does not know the
    # secret, or is another user's.
    # deadline: time at which to give up, of `time.monotonic`.
    while True:
        try:
            line = _authenticated_connection(address, key, deadline)
            line.send_bytes(json.dumps([rank, size]).encode())
            # rank 0's answer says which ranks are missing
            if line.poll(max(0.0, deadline - time.monotonic()) + 1.0):
                return line, line.recv_bytes()
        except AssertionError as error:
            raise AuthenticationError(str(error)) from None
        except (EOFError, OSError):  # rank 0 does not listen yet, its queue is full, its machine has no name so far
            time.sleep(0.02 if isinstance(address, str) else TICK)
        if time.monotonic() > deadline:
            raise TimeoutError


def peer_uid(line: socket.socket) -> int:
    """Return the id of the user whose process is at the other end, according to the kernel."""
    return int(CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[1])


def _socket(address: Address) -> socket.socket:
    if isinstance(address, str):
        return socket.socket(socket.AF_UNIX)
    made = socket.socket(socket.AF_INET)
    # else the next job would have to wait for a minute
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def _authenticated_connection(address: Address, key: bytes, deadline: float) -> Connection:
    with _socket(address) as line:
        # A local connect() would wait for ever for room in a full queue; one of TCP takes its time.
        line.settimeout(0.0 if isinstance(address, str) else CONNECT_SECONDS)
        line.connect(address)
        if isinstance(address, str) and peer_uid(line) != os.geteuid():
            raise AuthenticationError("it is another user's process")
        line.setblocking(True)
        _limit(line, max(0.0, deadline - time.monotonic()) + 1.0)
        connection = Connection(os.dup(line.fileno()))
        try:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
        except BaseException:
            connection.close()
            raise
        _limit(line, 0.0)
        return connection


def _limit(line: socket.socket, seconds: float) -> None:
    """Set the seconds that a read or a write may take; 0 for no limit."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        line.setsockopt(socket.SOL_SOCKET, option, TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6)))
