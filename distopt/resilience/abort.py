"""The end of a job when one rank fails: peers do not wait for ever, and the reason is read before all are gone.

In a job that goes on without the ranks it loses, it is the end of this rank alone.
"""

import contextlib
import fcntl
import functools
import os
import stat
import struct
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from distopt.resilience import flight_recorder, job, membership
from distopt.resilience.operation_log import recorder
from distopt.resilience.watchdog import say


def abort_on_exception(rank: int, abort: Callable[[int], Any]) -> None:
    """From now on uncaught exceptions, in any thread, end the whole job: the other ranks would wait for ever."""
    # An exception hook that was installed before is called too, before the job ends.  In a forked child, which is no
    # rank, only that hook is called.
    # abort: ends all processes of the job, with an exit code.  It is not called if the others go on without this one.
    alone = membership.wanted()
    if alone:
        abort = os._exit
    process, previous, previous_in_thread = os.getpid(), sys.excepthook, threading.excepthook
    chained = previous is not sys.__excepthook__

    def end(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        if os.getpid() != process:
            _tell(previous, kind, error, trace)
            return
        if ending.is_set():  # by the hook that this one has called, or in another thread
            if chained:
                _tell(previous, kind, error, trace)
            return
        ending.set()
        code = 130 if kind is KeyboardInterrupt else 1
        if alone:
            job.mark(job.SPOKEN, code)  # now, so that ranks which end together are seen to do so
        flight_recorder.write_if_wanted(recorder, rank, f"{kind.__name__}: {error}")
        speaks, patience = getattr(error, "agreed", (True, 0.0))
        if speaks:
            _say(f"rank {rank}: " + "".join(traceback.format_exception(kind, error, _without_runner(trace))))
            time.sleep(patience)
        else:
            _say(f"rank {rank}: {kind.__name__}: {error}\n")
            if not alone:
                time.sleep(5)  # the rank that speaks prints where, and ends the job
        if chained:
            _tell(previous, kind, error, trace)
        wait_until_read(patience=2)
        abort(code)
        # MPI_Abort may return before the launcher ends this process, which must not go on meanwhile
        time.sleep(5)
        os._exit(code)

    def end_thread(args: threading.ExceptHookArgs) -> None:
        if os.getpid() != process:
            previous_in_thread(args)
        elif args.exc_type is not SystemExit:  # which ends a thread, not the process
            end(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook, threading.excepthook = end, end_thread


ending = threading.Event()  # set when this process ends the job


def _tell(hook: Callable[..., Any], *error: Any) -> None:
    """Call another library's exception hook, whose own failure must not stop the end of the job."""
    try:
        hook(*error)
    except Exception as failure:
        _say(f"the hook for exceptions failed: {type(failure).__name__}: {failure}\n")


@functools.cache
def announce_exit(rank: int, tell: Callable[[int], None]) -> None:
    """From now on, the first ``os._exit`` says which rank leaves, and ``tell`` is called with its code."""
    # That ends the whole job.
    leave, process = os._exit, os.getpid()

    def announced(status: int) -> NoReturn:
        # children end so; and who has said why already
        if os.getpid() == process and not ending.is_set():
            _say(f"rank {rank}: left by os._exit({status}) after {recorder.step or 'the start'}\n")
            tell(status)
        leave(status)

    os._exit = announced


def _without_runner(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the script on, without the frames of ``python -m mpi4py``."""
    while trace and trace.tb_next:
        module = trace.tb_frame.f_globals
        if module["__name__"] != "runpy" and module.get("__package__") != "mpi4py":
            break
        trace = trace.tb_next
    return trace


def wait_until_read(patience: float) -> None:
    """Wait until standard error and output, if they are pipes, have been read, for ``patience`` seconds at most."""
    # A launcher that learns of the end before it has read the reason throws the reason away.
    deadline = time.monotonic() + patience
    for descriptor in (2, 1):  # the second one may have what a hook of another library has said
        with contextlib.suppress(OSError):  # no such file any more, or one that cannot tell
            while stat.S_ISFIFO(os.fstat(descriptor).st_mode) and time.monotonic() < deadline:
                (unread,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
                if unread == 0:
                    break
                time.sleep(0.01)


def _say(text: str) -> None:
    """Write a text to the standard error of this process, whatever ``sys.stderr`` is now."""
    with contextlib.suppress(Exception):  # closed, none, or an object of the script's
        sys.stdout.flush()
    say(text)
