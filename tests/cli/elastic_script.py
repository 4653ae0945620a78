"""Scripts of elastic jobs that use nothing but their line to the launcher, and what is said of them."""

import time

from distopt.resilience import job

HEAD = """
import os, signal, sys, threading, time
from distopt.resilience import job, membership
from distopt.resilience.abort import abort_on_exception
from distopt.resilience.operation_log import OperationLog, recorder
from distopt.resilience.timeouts import limits
from distopt.resilience.watchdog import Watchdog

line = membership.line()
me = line.member


def meet():
    epoch = line.ask("world", f"I am {me}")
    assert epoch.texts == [f"I am {member}" for member in epoch.members]
    print("epoch", epoch.number, epoch.members, flush=True)


def steps(first, last):
    for step in range(first, last + 1):
        job.note(f"step {step}")
        time.sleep(0.002)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


"""


def told(output):
    """What the command itself has said."""
    return [line.removeprefix("distopt run: ") for line in output.splitlines() if line.startswith("distopt run: ")]


def all_gone(pids):
    deadline = time.monotonic() + 10
    while any(job.state(pid) not in "ZX" for pid in pids):
        assert time.monotonic() < deadline, "ranks have outlived their launcher"
        time.sleep(0.05)
    return True
