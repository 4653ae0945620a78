"""Sockets to the processes that this one has started, and the thread that reads them."""

import contextlib
import json
import os
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from distopt.resilience.membership import MESSAGE

PIPE = 1 << 12  # bytes that are read at once


class Lines:
    """A socket to each process that this one has started, by its number, and the thread that reads them."""

    def __init__(self, hear: Callable[[int, dict[str, Any] | None], object]):
        self._hear_of, self._ours = hear, dict[int, socket.socket]()
        self._stop, self._stopped = os.pipe()
        # hear: is given a number, and a message of that process; None when it has ended
        self._thread = threading.Thread(target=self._hear, name="distopt's lines", daemon=True)

    def start(self) -> None:
        """Start to read; fork processes before, not after."""
        self._thread.start()

    def add(self, member: int) -> socket.socket:
        """Return the socket for one more process; who hands it over closes it."""
        self._ours[member], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.write(self._stopped, b"new")
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
        os.close(self._stopped)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._stop)
        for line in self._ours.values():
            line.close()

    def _hear(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._stop, selectors.EVENT_READ)
            known: set[int] = set()
            while True:
                for member in [member for member in self._ours if member not in known]:
                    ready.register(self._ours[member], selectors.EVENT_READ, member)
                    known.add(member)
                for key, _ in ready.select():
                    if key.fd == self._stop:
                        if not os.read(self._stop, PIPE):
                            return
                        continue
                    message = self._receive(key.data)
                    # a process that ends closes its line, unless it has forked others
                    if not message:
                        ready.unregister(key.fileobj)
                    self._hear_of(key.data, json.loads(message) if message else None)

    def _receive(self, member: int) -> bytes:
        with contextlib.suppress(ConnectionError):
            return self._ours[member].recv(MESSAGE)
        return b""
