"""What time limits cost: distopt run -n 2 -m benchmarks.limits

Dense steps with the recorder, in turns with steps without it, while the watch looks; and an operation on its own.
"""

import os
import statistics
import time

os.environ["DISTOPT_TIMEOUT"] = "never"  # the watch is started here, and stopped

import numpy as np
from mpi4py import MPI

import distopt
from benchmarks.models import MODELS
from distopt.comm import mpi
from distopt.watch import Limits, Log, Recorder, Watchman, recorder, silent

ROUNDS = 201
RECORDS = Log.__call__


def small():
    """10,255 elements."""
    return [("w1", (64, 128)), ("b1", (128,)), ("w2", (128, 15)), ("b2", (15,))]


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


def with_limits(step, calls):
    """The same, recorded."""
    Log.__call__ = RECORDS
    try:
        return timed(step, calls)
    finally:
        Log.__call__ = unrecorded


def unrecorded(log, *args, **options):
    """What is not recorded."""
    return silent("")


def recorded():
    """Nanoseconds for one operation."""
    log, begin = Log(Recorder(), "an operation", [0]), time.perf_counter()
    for _ in range(100_000):
        with RECORDS(log, "all_reduce", 4096, "bucket 3"):
            pass
    return (time.perf_counter() - begin) * 1e4


def looked():
    """Microseconds for one look of the watch."""
    watchman = Watchman(MPI.COMM_WORLD.rank, recorder, Limits(), None, mpi._mails)
    watchman.stop()
    begin = time.perf_counter()
    for _ in range(1000):
        watchman._take_mail()
        watchman._look(time.monotonic(), 0.0)
    return (time.perf_counter() - begin) * 1e3


def main():
    world = distopt.world()
    Log.__call__ = unrecorded
    cost = statistics.median(recorded() for _ in range(7))
    look = statistics.median(looked() for _ in range(7))
    if world.rank == 0:
        print(
            f"{mpi.brand()}, {world.size} ranks; an operation: {cost:.0f} ns, one of 10 looks a second: {look:.0f} us"
        )
    watchman = Watchman(world.rank, recorder, Limits(), None, mpi._mails)
    for name, shapes, calls in (("resnet50", MODELS["resnet50"](), 1), ("10,255 elements", small(), 150)):
        step, ratios, seconds = step_of(shapes), [], []
        for k in range(ROUNDS):
            order = (with_limits, timed) if k % 2 else (timed, with_limits)
            found = {run: run(step, calls) for run in order}
            ratios.append(found[with_limits] / found[timed])
            seconds.append(found[timed])
        if world.rank == 0:
            low, middle, high = (np.quantile(ratios, q) for q in (0.25, 0.5, 0.75))
            print(
                f"{name:16} {statistics.median(seconds) * 1e6:10.1f} us a step without; with / without, median of "
                f"{ROUNDS} rounds: {middle:.3f} [quartiles {low:.3f} - {high:.3f}]",
                flush=True,
            )
    watchman.stop()


if __name__ == "__main__":
    main()
