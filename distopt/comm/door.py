"""Where processes of one machine meet: rank 0 opens a socket, and takes in those of its user that know the secret.

Anybody may connect to a socket once it is there, whatever its name: strangers are sent away unheard, and nobody who is
let in and says nothing keeps the others out.
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

from distopt.guard import agreed

WELCOME, REFUSED = b"W", b"R"  # what the door says in the end
PROOF = 10.0  # seconds in which a guest must prove that it knows the secret; it may come again
CROWD = 64  # guests of this user who may do so at a time, beside the ranks
TICK = 0.2  # seconds between two looks at who is late
LONGEST = 200  # bytes of what a guest says of itself
CREDENTIALS, TIMEVAL = struct.Struct("iII"), struct.Struct("ll")
UNPROVEN = AuthenticationError, AssertionError, EOFError, OSError, TypeError, ValueError


class Door:
    """Opened by rank 0; a thread lets guests in until ``guests`` has been called."""

    def __init__(self, name: str, key: bytes, size: int, patience: float):
        self._key, self._size, self._patience = key, size, patience
        self._came: list[tuple[int, Connection]] = []
        self._waiting: dict[socket.socket, float] = {}  # guests who have not proved anything yet, and until when
        self._wrong, self._closed = "", False
        self._changed = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        try:
            self._listener.bind(name)
            self._listener.listen(max(size, socket.SOMAXCONN))
        except OSError as error:
            self._listener.close()
            raise RuntimeError(f"two processes were told local_rank=0, or the id is used again: {error}") from error
        self._bell, self._hears_bell = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="votes' door", daemon=True)
        self._thread.start()

    def guests(self, deadline: float) -> dict[int, Connection]:
        """The lines to all other ranks, when they have come; RuntimeError here and there if they have not in time."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._wrong or len(self._came) == self._size - 1, deadline - time.monotonic()
            )
            missing = sorted(set(range(1, self._size)) - {rank for rank, _ in self._came})
            self._closed = True
        self._bell.close()
        self._thread.join()
        if missing and not self._wrong:
            names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            self._wrong = f"{names} of {self._size} did not come within {self._patience:g} s: see what they printed"
        for _, line in self._came:
            with contextlib.suppress(OSError):  # one that has ended meanwhile is missed at the first vote
                line.send_bytes(REFUSED + self._wrong.encode() if self._wrong else WELCOME)
        if self._wrong:
            raise agreed(RuntimeError(self._wrong), speaks=True)
        return dict(sorted(self._came))

    def _listen(self) -> None:
        with self._listener, self._hears_bell:
            while not self._closed:
                full = len(self._waiting) >= CROWD + self._size
                if self._listener in wait([self._hears_bell] if full else [self._hears_bell, self._listener], TICK):
                    self._let_in()
                self._send_away(time.monotonic())
        self._send_away(float("inf"))

    def _let_in(self) -> None:
        """Hear one guest, in a thread of its own; another user's process is none."""
        try:
            line, _ = self._listener.accept()
        except OSError:  # it has gone again, or there are too many open files
            time.sleep(0.01)
            return
        if user(line) != os.geteuid():
            line.close()
            return
        line.setblocking(True)
        with self._changed:
            self._waiting[line] = time.monotonic() + PROOF
        threading.Thread(target=self._hear, args=(line,), name="votes' guest", daemon=True).start()

    def _send_away(self, now: float) -> None:
        """Those who are late; the threads that hear them end."""
        with self._changed:
            for line in (line for line, until in self._waiting.items() if until < now):
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

    def _hear(self, line: socket.socket) -> None:
        guest = None
        try:
            guest = Connection(os.dup(line.fileno()))
            deliver_challenge(guest, self._key)
            answer_challenge(guest, self._key)
            rank, size = json.loads(guest.recv_bytes(LONGEST))
            proven = isinstance(rank, int) and isinstance(size, int)
        except UNPROVEN:
            proven = False
        with self._changed:
            del self._waiting[line]
            line.close()
            if guest is None:
                return
            if not proven or self._closed:
                guest.close()
                return
            if size != self._size:
                self._wrong = f"rank {rank} was told world_size={size}, rank 0 {self._size}"
            elif rank in [0, *(other for other, _ in self._came)]:
                self._wrong = f"two processes were told local_rank={rank}"
            self._came.append((rank, guest))
            self._changed.notify()


def enter(name: str, key: bytes, rank: int, size: int, deadline: float) -> tuple[Connection, bytes]:
    """The line to the door of this name, and what it says when all have come or the deadline is over.

    Both ends have proved that they know the secret.  Raises TimeoutError if nobody has answered by the deadline,
    AuthenticationError if who answers does not know the secret, or is another user's process.
    """
    while True:
        try:
            line = _knock(name, key, deadline)
            line.send_bytes(json.dumps([rank, size]).encode())
            if line.poll(max(0.0, deadline - time.monotonic()) + 1.0):  # rank 0 knows who is missing
                return line, line.recv_bytes()
        except AssertionError as error:
            raise AuthenticationError(str(error)) from None
        except (EOFError, OSError):  # nobody is there yet, the queue is full, or it took too long
            time.sleep(0.02)
        if time.monotonic() > deadline:
            raise TimeoutError


def user(line: socket.socket) -> int:
    """Whose process is at the other end, as the kernel knows."""
    return int(CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[1])


def _knock(name: str, key: bytes, deadline: float) -> Connection:
    with socket.socket(socket.AF_UNIX) as line:
        line.setblocking(False)  # a full queue must not let us wait
        line.connect(name)
        if user(line) != os.geteuid():
            raise AuthenticationError("it is another user's process")
        line.setblocking(True)
        _limit(line, max(0.0, deadline - time.monotonic()) + 1.0)
        door = Connection(os.dup(line.fileno()))
        try:
            answer_challenge(door, key)
            deliver_challenge(door, key)
        except BaseException:
            door.close()
            raise
        _limit(line, 0.0)
        return door


def _limit(line: socket.socket, seconds: float) -> None:
    """How long reading and writing may take; 0 for ever."""
    for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        line.setsockopt(socket.SOL_SOCKET, way, TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6)))
