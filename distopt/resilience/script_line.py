"""The line of the user's script that the main thread has come to."""

import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

OWN = str(Path(__file__).parent.parent)
INSTALLED = tuple({OWN, "<", *(sysconfig.get_path(p) for p in ("stdlib", "platstdlib", "purelib", "platlib"))})


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the main thread, from the innermost one out."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame:
        yield frame
        frame = frame.f_back


def _line(frame: FrameType, short: bool) -> str:
    name = frame.f_code.co_filename
    return f"{Path(name).name if short else name}:{frame.f_lineno} in {frame.f_code.co_name}"


def script_line() -> str:
    """Return the innermost line of the main thread that is in a script, not in distopt or an installed package."""
    # Without such a line it is the innermost one of all; '' if there is none.
    frames = list(_frames())
    scripts = [f for f in frames if not f.f_code.co_filename.startswith(INSTALLED)]
    return next((_line(f, short=True) for f in scripts or frames), "")


def stack() -> list[str]:
    """Return all lines of the main thread, from the innermost one out."""
    return [_line(f, short=False) for f in _frames()]
