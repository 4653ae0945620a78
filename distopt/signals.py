"""SIGTERM and Ctrl-C as a wish, which the ranks' next vote makes known to all of them."""

import signal
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGTERM, signal.SIGINT)

asked = 0  # the number of the signal that came, 0 for none


_before: dict[int, Any] = {}  # what else the signals would do


def listen() -> None:
    """From now on the first such signal is noted, and the second one does what the first would have done.

    Raises ValueError in a thread other than the main one, as ``signal.signal``.
    """
    for number in NUMBERS:
        before = signal.signal(number, _note)
        if before is not _note:
            _before[number] = signal.SIG_DFL if before is None else before  # None: a library's, which nobody can name


def _note(number: int, frame: FrameType | None) -> None:
    global asked
    asked = number
    for other, handler in _before.items():
        signal.signal(other, handler)
