"""Output of ranks, in whole lines, with the rank's number before each: as MPICH's ``mpiexec -l`` has it."""

import contextlib
import math
import os
import select
import selectors
import threading
import time
from collections.abc import Mapping

PIECE = 1 << 16  # bytes that are read at once
SOON = 0.05  # seconds between two looks for the end
REST = 1.0  # seconds for what is left after the end


class Tagged:
    """A thread that copies what ranks write, line by line."""

    def __init__(self, pipes: Mapping[int, int], to: int):
        # pipes: the ranks, by the file descriptor of their output's pipe, which this object closes
        # to: the file descriptor that gets the lines
        self._pending, self._ranks, self._to = dict.fromkeys(pipes, b""), dict(pipes), to
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="distopt's output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Return when all is copied that the ranks, which have ended, have written."""
        self._ended.set()
        self._thread.join()

    def _copy(self) -> None:
        """Copy until all pipes are closed; what a rank has left running may hold its pipe open, and write on."""
        with selectors.DefaultSelector() as ready:
            for pipe in self._pending:
                ready.register(pipe, selectors.EVENT_READ)
            deadline = math.inf
            try:
                while self._pending and time.monotonic() < deadline:
                    if self._ended.is_set():
                        deadline = min(deadline, time.monotonic() + REST)
                    events = ready.select(SOON)
                    for key, _ in events:
                        if not self._read(key.fd):
                            ready.unregister(key.fd)
                            self._drop(key.fd)
                    if not events and deadline < math.inf:
                        break
                while self._pending:
                    self._drop(next(iter(self._pending)))
            except OSError:  # nobody takes it any more, and ranks must learn that, or they would wait
                for pipe in self._pending:
                    os.close(pipe)

    def _read(self, pipe: int) -> bool:
        """Copy the lines that can be read; return False at the end of a pipe."""
        piece = os.read(pipe, PIECE)
        lines, newline, rest = piece.rpartition(b"\n")
        if newline:
            self._write(pipe, self._pending[pipe] + lines)
            self._pending[pipe] = rest
        else:
            self._pending[pipe] += rest
        return bool(piece)

    def _drop(self, pipe: int) -> None:
        """Copy a last line without an end, and close a pipe."""
        if self._pending[pipe]:
            self._write(pipe, self._pending[pipe])
        del self._pending[pipe]
        os.close(pipe)

    def _write(self, pipe: int, lines: bytes) -> None:
        """Write lines, in pieces that nobody else's output comes between."""
        tag, text = b"[%d] " % self._ranks[pipe], b""
        for line in lines.split(b"\n"):
            if len(text) + len(tag) + len(line) >= select.PIPE_BUF:
                self._write_all(text)
                text = b""
            text += tag + line + b"\n"
        self._write_all(text)

    def _write_all(self, text: bytes) -> None:
        while text:  # a pipe that nobody waits for takes a part, or nothing now
            with contextlib.suppress(BlockingIOError):
                text = text[os.write(self._to, text) :]
                continue
            select.select([], [self._to], [])
