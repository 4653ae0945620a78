"""The memberships of a job's communicators, and the thread that hears who asks for the next epoch."""

import contextlib
import json
import os
import selectors
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from distopt.resilience.job import AWAITED
from distopt.resilience.membership import MESSAGE, Membership

PIPE = 1 << 12  # bytes that are read at once
WORLD = "world"  # the communicator that all ranks which were started are in


class Memberships:
    """A ``Membership`` for each communicator of a job, and a line to each of its processes.

    The first epoch of a communicator waits for all processes that live when it is asked for first; that of ``WORLD``
    waits for all that were started.

    Args:
        size: the number of processes.

        folder: of the job, where it leaves a file while a process waits to be let in.

    Attributes:
        lines: the sockets for the processes, by member; they are closed by whoever has handed them over.
    """

    def __init__(self, size: int, folder: Path):
        self.lines: list[socket.socket] = []
        self._ours: list[socket.socket] = []
        self._living: set[int] = set()
        for _ in range(size):
            self._add()
        self._awaited = folder / AWAITED
        self._of = {WORLD: Membership(self._living)}
        self._lock = threading.Lock()
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._hear, name="distopt's memberships", daemon=True)

    def start(self) -> None:
        """Start to hear; processes are forked before."""
        self._thread.start()

    def add(self) -> int:
        """Make a line for one more process, which is let in when all members of ``WORLD`` say so; return its number."""
        with self._lock:
            member = self._add()
        os.write(self._stopped, b"new")
        return member

    def _add(self) -> int:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        member = len(self._ours)
        self._ours.append(ours)
        self.lines.append(theirs)
        self._living.add(member)
        return member

    def lose(self, member: int) -> None:
        """Let the others go on without a member, which has ended."""
        with self._lock:
            if member in self._living:
                self._living.remove(member)
                for name, membership in self._of.items():
                    membership.lose(member)
                    self._begin(name)
                if not self._of[WORLD].members:  # nobody is left who could let the others in
                    for waiting in self._of[WORLD].newcomers():
                        self._ours[waiting].shutdown(socket.SHUT_RDWR)

    def awaited(self) -> set[int]:
        """Return the members that have not asked for an epoch that others wait for."""
        with self._lock:
            return set().union(*(membership.awaited() for membership in self._of.values()))

    def close(self) -> None:
        """Stop to hear."""
        os.close(self._stopped)
        self._thread.join()
        os.close(self._stop)
        for line in self._ours:
            line.close()

    def _hear(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._stop, selectors.EVENT_READ)
            known = 0
            while True:
                for member, line in list(enumerate(self._ours))[known:]:
                    ready.register(line, selectors.EVENT_READ, member)
                    known += 1
                for key, _ in ready.select():
                    if key.fd == self._stop:
                        if not os.read(self._stop, PIPE):
                            return
                        continue
                    message = self._receive(key.data)
                    if message:
                        self._ask(key.data, **json.loads(message))
                    else:  # a process that ends closes its line, unless it has forked others
                        ready.unregister(key.fileobj)
                        self.lose(key.data)

    def _receive(self, member: int) -> bytes:
        with contextlib.suppress(ConnectionError):
            return self._ours[member].recv(MESSAGE)
        return b""

    def _ask(self, member: int, of: str, text: str, lets_in: bool = False, first: Sequence[int] = ()) -> None:
        with self._lock:
            if member in self._living:  # what it has sent may come after the news of its end
                members = self._living & set(first) if first else self._living
                self._of.setdefault(of, Membership(members)).ask(member, text, lets_in)
                self._begin(of)

    def _begin(self, name: str) -> None:
        """Tell the members of a communicator of its next epoch, if it begins."""
        epoch = self._of[name].begin()
        if name == WORLD and bool(self._of[name].newcomers()) != self._awaited.exists():
            self._awaited.unlink() if self._awaited.exists() else self._awaited.touch(mode=0o600)
        if epoch:
            told = json.dumps({"of": name, **epoch._asdict()}).encode()
            for member in epoch.members:
                with contextlib.suppress(ConnectionError):  # it has ended, which will be heard
                    self._ours[member].send(told)
