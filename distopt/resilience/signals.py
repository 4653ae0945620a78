"""SIGTERM and SIGINT as requests to stop, of which the ranks' next vote tells all of them."""

import math
import signal
import time
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGTERM, signal.SIGINT)
# Seconds in which another SIGTERM is the same request: a batch system tells each process of a job, and each launcher
# that it tells passes the signal on, so that a rank may get it three times.  A second SIGINT is somebody's key.
SAME = 2.0

asked = 0  # the number of the signal that came, 0 for none


class Requests:
    """Requests to end, each of which may come as several signals."""

    def __init__(self) -> None:
        self.count, self._until = 0, -math.inf

    def count_signal(self, number: int) -> bool:
        """Count a signal if it is a request of its own, and tell if it is."""
        now = time.monotonic()
        if number == signal.SIGTERM and now < self._until:
            return False
        self.count, self._until = self.count + 1, now + SAME
        return True


_before: dict[int, Any] = {}  # the handlers that were installed before
_requests = Requests()


def listen() -> None:
    """From now on note the first request to stop; the second one does what the first would have done."""
    global _requests
    _requests = Requests()
    for number in NUMBERS:
        handler = signal.signal(number, _note)
        if handler is not _note:
            # None: C code installed it
            _before[number] = signal.SIG_DFL if handler is None else handler


def _note(number: int, frame: FrameType | None) -> None:
    global asked
    if not _requests.count_signal(number):
        return
    if _requests.count == 1:
        asked = number
        return
    for other, handler in _before.items():
        signal.signal(other, handler)
    signal.raise_signal(number)
