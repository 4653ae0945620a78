"""The rendezvous of an elastic job's processes: a line to each, who asks for the next epoch, and who hears of it."""

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from distopt.resilience.job import AWAITED
from distopt.resilience.membership import MESSAGE, SIZE, Quorum

WORLD = "world"  # the communicator that all ranks which were started are in


class RankLinks:
    """A socket to each process that this one has started, by its number, and a thread that reads it."""

    def __init__(self, hear: Callable[[int, dict[str, Any] | None], object]):
        # hear: is given a number, and a message of that process; None when it has ended
        self._hear, self._ours = hear, dict[int, socket.socket]()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start to read; fork processes before, not after."""
        for member in list(self._ours)[len(self._threads) :]:
            thread = threading.Thread(target=self._read, args=[member], name=f"distopt's line to {member}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def add(self, member: int) -> socket.socket:
        """Return the socket for one more process; who hands it over closes it."""
        self._ours[member], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if self._threads:
            self.start()
        return theirs

    def send(self, member: int, message: Mapping[str, Any]) -> None:
        """Send a message to a process; one that never reads them is given up, and nobody waits for it."""
        try:
            self._ours[member].send(json.dumps(message).encode(), socket.MSG_DONTWAIT)
        except BlockingIOError:
            self.end(member)
        except ConnectionError:  # it has ended, which will be heard
            pass

    def end(self, member: int) -> None:
        """Shut a process's socket: it reads that nothing more will come."""
        with contextlib.suppress(OSError):
            self._ours[member].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop reading, and close the sockets."""
        for member in self._ours:
            self.end(member)
        for thread in self._threads:
            thread.join()
        for line in self._ours.values():
            line.close()

    def _read(self, member: int) -> None:
        message = b"some"
        # a process that ends closes its line, unless it has forked others
        while message:
            message = b""
            with contextlib.suppress(ConnectionError):
                message = self._ours[member].recv(MESSAGE)
            self._hear(member, json.loads(message) if message else None)


class Rendezvous:
    """A ``Quorum`` for each communicator of a job, and what its processes tell each other."""

    # The first epoch of a communicator waits for all processes that live when it is asked for first; that of `WORLD`
    # waits for all that were started.

    def __init__(
        self,
        members: Iterable[int],
        send: Callable[[int, Mapping[str, Any]], object],
        folder: Path,
        most: int = sys.maxsize,
    ):
        # most: members of WORLD at once.
        self._send = send  # is given a number, and a message for that process
        self._living = set(members)
        self._awaited = folder / AWAITED
        self._of = {WORLD: Quorum(self._living, most)}
        self.missing = 0  # processes that the others want to be more
        self._lock = threading.Lock()

    def add(self, member: int) -> None:
        """Add one more process, which is admitted when all members of ``WORLD`` say so."""
        with self._lock:
            self._living.add(member)

    def hear(self, member: int, message: Mapping[str, Any] | None) -> None:
        """Act on what a process says; None when it has ended: the others continue without it."""
        with self._lock:
            if member not in self._living:  # what it has sent may come after the news of its end
                return
            match message:
                case None:
                    self._living.remove(member)
                    for other in self._living:
                        self._send(other, {"lost": member})
                    for name, quorum in self._of.items():
                        quorum.lose(member)
                        self._begin(name)
                case {"put": _, "to": to}:
                    for other in self._living.intersection(to):
                        self._send(other, message)
                case {"of": name, "text": text, "lets_in": lets_in, "first": first}:
                    if name.startswith(SIZE):
                        self._of[WORLD].most = int(text)
                        self.missing = int(text) - len(self._living)
                    living = self._living & set(first) if first else self._living
                    self._of.setdefault(name, Quorum(living)).ask(member, text, lets_in)
                    self._begin(name)

    def limit(self, change: int) -> None:
        """Change the number of members of ``WORLD`` that there may be."""
        with self._lock:
            self._of[WORLD].most += change

    def awaited(self) -> set[int]:
        """The members that have not asked for an epoch that others wait for."""
        with self._lock:
            return set().union(*(quorum.awaited() for quorum in self._of.values()))

    def _begin(self, name: str) -> None:
        """Tell the members of a communicator of its next epoch, if it begins."""
        epoch = self._of[name].begin()
        if name == WORLD and bool(self._of[name].joiners()) != self._awaited.exists():
            self._awaited.unlink() if self._awaited.exists() else self._awaited.touch(mode=0o600)
        if epoch:
            for member in epoch.members:
                self._send(member, {"of": name, **epoch._asdict()})
