"""``distopt run`` whose first ranks are forks of itself, for a process that has imported torch (``forks.py``).

They are children of the launcher, with pipes, a line and an environment of its making, and end as Python itself does.
"""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import forks

from distopt.cli import main
from distopt.run.processes import RANK

Popen = subprocess.Popen


def start(command, **options):
    """A process: a fork if it is a rank, and this process has no threads yet, which a fork would miss."""
    if command[:2] != [sys.executable, str(RANK)] or threading.active_count() > 1:
        return Popen(command, **options)
    sys.stdout.flush()
    before, kept = options.pop("preexec_fn"), options.get("pass_fds", ())
    return Popen(command, preexec_fn=lambda: be_rank(command[1:], options["env"], before, kept), **options)


def be_rank(command, environment, before, kept):
    """Run a script to its end, where another process would have been executed."""
    before()
    weakref.finalize._registry.clear()  # of the launcher's folders
    gc.freeze()  # its sockets are closed now, not when their numbers are another file's
    low = 3
    for fd in (*sorted(kept), os.sysconf("SC_OPEN_MAX")):
        os.closerange(low, fd)
        low = fd + 1
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # a pipe, and the launcher's may be a file
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "distopt"]:
        del sys.modules[name]
    code = 0
    try:
        forks.become(command, environment, os.getcwd())
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    ctypes.pythonapi.Py_Exit(code)


if __name__ == "__main__":
    subprocess.Popen = start
    sys.exit(main())
