"""SIGTERM and SIGINT as requests to stop, of which the ranks' next vote tells all of them."""

import signal
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGTERM, signal.SIGINT)

asked = 0  # the number of the signal that came, 0 for none


_before: dict[int, Any] = {}  # the handlers that were installed before


def listen() -> None:
    """From now on note the first SIGTERM or SIGINT; the second one does what the first would have done."""
    for number in NUMBERS:
        handler = signal.signal(number, _note)
        if handler is not _note:
            # None: C code installed it
            _before[number] = signal.SIG_DFL if handler is None else handler


def _note(number: int, frame: FrameType | None) -> None:
    global asked
    asked = number
    for other, handler in _before.items():
        signal.signal(other, handler)
