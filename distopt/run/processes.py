"""Processes that ``distopt run`` starts: how they are asked to end, and ended with all that they have started."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distopt.resilience import job

RANK = Path(job.__file__).with_name("rank.py")
TIMED_OUT = 124  # the exit code of timeout(1)
GRACE = 5.0  # seconds between asking a job to end and ending it
# for a launcher to end a job after one of its ranks, and again when it is told to
END_SECONDS = 0.7
POLL_SECONDS = 0.2  # between two checks of the ranks
ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # what asks a job to end


@contextlib.contextmanager
def handling_signals(ask: Callable[[int], None], numbers: Iterable[int] | None = None) -> Iterator[None]:
    """A context in which a function is called for signals, by default those that ask this process to end."""
    before = {n: signal.signal(n, lambda n, _: ask(n)) for n in (asking() if numbers is None else numbers)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def asking() -> list[signal.Signals]:
    """The signals that ask this process to end, without those that nohup or a shell makes it ignore."""
    hushed = [number for number in (signal.SIGHUP, signal.SIGQUIT) if signal.getsignal(number) is signal.SIG_IGN]
    return [number for number in ASKING if number not in hushed]


def say(text: str) -> None:
    """Print a line of this command, if somebody still reads: a job must end too where nobody does."""
    try:
        sys.stderr.write(f"distopt run: {text}\n")  # at once: print writes the end of the line apart
        sys.stderr.flush()
    except OSError:
        # What is left of the old one would fail at the end again.  Its descriptor stays: ranks whose lines are copied
        # to it must learn that nobody reads them (``Tagged``).
        sys.stderr = open(os.devnull, "w")


def end(processes: Sequence[Any], grace: float = GRACE) -> None:
    """Ask processes to end, and kill what is left after ``grace`` seconds, ranks that ignore signals too."""
    # launchers start sessions of their own
    family = [pid for process in processes for pid in descendants(process.pid)]
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + grace
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for pid in [*family, *(pid for process in processes for pid in descendants(process.pid))]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.kill()
        process.wait()


def finished(
    command: Sequence[str], seconds: float, env: Mapping[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Run a command; return its exit code, None if it was killed after these seconds, and its two outputs."""
    # A process that hangs in a driver cannot be killed, and is not waited for.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env)
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            for pid in (*descendants(process.pid), process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            code = None
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()


def descendants(pid: int) -> list[int]:
    """Return the process ids of all children and their children; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = stat.read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    pids = children.get(pid, [])
    for child in pids:
        pids.extend(children.get(child, []))
    return pids
