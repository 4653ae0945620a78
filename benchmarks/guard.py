"""What the guard costs: distopt run -n 2 -m benchmarks.guard

Dense steps with votes and flight records, in turns with the same steps without; a vote against a bare MPI all-reduce
of the same 64 bytes; one operation, and one look of the watch, on their own.  Gradients are looked at for NaN in both.
"""

import contextlib
import os
import statistics
import sys
import time

os.environ["DISTOPT_TIMEOUT"] = "never"  # the watch is started here, and stopped

import numpy as np
from mpi4py import MPI

import distopt
from benchmarks import measure
from benchmarks.models import MODELS
from distopt.comm import mpi_control, mpi_start
from distopt.resilience.operation_log import OperationLog, OperationRecorder, recorder, silent
from distopt.resilience.timeouts import Limits
from distopt.resilience.watchdog import Watchdog

ROUNDS = 101
RECORDS = OperationLog.__call__
BUDGET = 1.02


def step_of(shapes):
    """One step of a model whose gradients are already there."""
    params = [distopt.Parameter(name, np.zeros(shape, np.float32)) for name, shape in reversed(shapes)]
    opt = distopt.DistOpt(distopt.optim.SGD(0.1, momentum=0.9))
    pairs = list(zip(params, [np.full(p.data.shape, 1e-3, np.float32) for p in params], strict=True))
    opt(pairs)
    return lambda: opt(pairs)


def timed(step, calls):
    """Seconds per call of the slowest rank."""
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return MPI.COMM_WORLD.allreduce((time.perf_counter() - start) / calls, MPI.MAX)


@contextlib.contextmanager
def unguarded(control):
    """No votes; where one stands between writing and reading shared memory, a bare barrier is left."""

    def vote(name, mark, describe, error=None, report="", part="", *more, **named):
        if part:
            MPI.COMM_WORLD.Barrier()
        return []

    control.vote = vote
    try:
        with unrecorded():
            yield
    finally:
        del control.vote


@contextlib.contextmanager
def unrecorded():
    """Votes, but nothing is recorded."""
    OperationLog.__call__ = lambda log, *args, **options: silent("")
    try:
        yield
    finally:
        OperationLog.__call__ = RECORDS


def an_operation():
    """Nanoseconds to record one."""
    log, begin = OperationLog(OperationRecorder(), "an operation", [0]), time.perf_counter()
    for _ in range(100_000):
        with log("all_reduce", 4096, "bucket 3"):
            pass
    return (time.perf_counter() - begin) * 1e4


def a_look():
    """Microseconds for one look of the watch."""
    watchdog = Watchdog(MPI.COMM_WORLD.rank, recorder, Limits(), None, mpi_start.mailboxes)
    watchdog.stop()
    begin = time.perf_counter()
    for _ in range(1000):
        watchdog._take_messages()
        watchdog._check_operations(time.monotonic(), 0.0)
    return (time.perf_counter() - begin) * 1e3


def a_vote(control):
    """Microseconds of a vote, and of a bare all-reduce of the same bytes."""
    bare = np.zeros(8, np.int64)
    cases = lambda: control.vote("a vote", 1, list), lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, bare, MPI.MAX)
    rounds = [[1e6 * timed(case, 1000) for case in cases] for _ in range(7)]
    return np.median(rounds, axis=0)


def main():
    world = distopt.world()
    vote, bare = a_vote(world.control)
    operation = statistics.median(an_operation() for _ in range(7))
    look = statistics.median(a_look() for _ in range(7))
    lines = [
        measure.versions("numpy", "mpi4py"),
        f"{mpi_control.brand()}, {world.size} ranks; to record an operation {operation:.0f} ns; a look, ten times a "
        f"second, {look:.0f} us; a vote {vote:.1f} us, a bare all-reduce of its 64 bytes {bare:.1f} us",
        f"medians of {ROUNDS} rounds [quartiles]; budget {BUDGET}",
    ]
    watchdog = Watchdog(world.rank, recorder, Limits(), None, mpi_start.mailboxes)
    small = [("w1", (64, 128)), ("b1", (128,)), ("w2", (128, 15)), ("b2", (15,))]
    for name, shapes, calls in (
        ("resnet50, 161 tensors", MODELS["resnet50"](), 2),
        ("tiny, 2000 tensors", MODELS["tiny"](), 10),
        ("small, 10,255 elements", small, 150),
    ):
        step = step_of(shapes)
        cases = {
            "guarded": contextlib.nullcontext,
            "votes": unrecorded,
            "without": lambda: unguarded(world.control),
        }
        seconds = {case: [] for case in cases}
        for k in range(ROUNDS):
            for case in sorted(cases, reverse=bool(k % 2)):
                with cases[case]():
                    seconds[case].append(timed(step, calls))
        for case in ("guarded", "votes"):
            low, middle, high = np.quantile(np.divide(seconds[case], seconds["without"]), (0.25, 0.5, 0.75))
            lines.append(
                f"  {name:24} {statistics.median(seconds['without']) * 1e6:9.1f} us a step without; with "
                f"{'votes and records' if case == 'guarded' else 'votes alone':18} x {middle:.3f} "
                f"[{low:.3f} - {high:.3f}]"
            )
    watchdog.stop()
    if world.rank == 0:
        measure.report("guard", "\n".join(lines), "--save" in sys.argv)


if __name__ == "__main__":
    main()
