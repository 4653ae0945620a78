"""SIGTERM and Ctrl-C as a wish, which the ranks' next vote makes known to all of them."""

import signal
from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGINT)

asked = 0  # the number of the signal that came, 0 for none


def listen() -> None:
    """From now on the first such signal is noted, and the second one does what the first would have done.

    Raises ValueError in a thread other than the main one, as ``signal.signal``.
    """
    before = {number: signal.getsignal(number) for number in NUMBERS}

    def note(number: int, frame: FrameType | None) -> None:
        global asked
        asked = number
        for other, handler in before.items():
            signal.signal(other, handler)

    for number in NUMBERS:
        signal.signal(number, note)
