"""A backward pass that takes as long as the exchange: python -m benchmarks.backward [--ranks 2,4] [--rate R] [--save]

ResNet-50 on two hosts in network namespaces (benchmarks/namespaces.py: needs root), over MPI.  A loss yields gradients
at an even pace, element by element, in as many seconds as their exchange takes if they lie ready.  It waits for them,
as a rank does for its GPU, or computes them on the core that exchanges too.  Buckets leave meanwhile, or afterwards.
The anchor of a loss that waits is the longer one of both, and the update, which one rank alone has been timed with; of
one that computes it is the pass, and the seconds of CPU of all the rest, of all ranks of a core.  All cases of a mode
take turns.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

import distopt
from benchmarks.link import gradients, stepper
from benchmarks.measure import interleaved, report, table, versions
from benchmarks.namespaces import measured, missing, shape
from distopt.comm.mpi_control import brand
from distopt.compress import Dense, ErrorFeedback, Half, Int8, Packed, TopK
from distopt.resilience.environment import launched

MODES = {
    "dense": Dense(),
    "half": Half(),
    "int8": ErrorFeedback(Int8()),
    "top-K 0.1 %, packed": ErrorFeedback(Packed(TopK(0.001))),
}
ROUNDS, LIMIT = 6, 1200  # seconds
BUDGETS = {"waits, early": 1.12, "computes, early": 1.05}  # x the anchor
ALONE = "gradients ready"


def waits(pairs, seconds):
    """Yield gradients that come at an even pace, while this thread sleeps."""
    end, total, done = time.perf_counter() + seconds, sum(view.size for _, view in pairs), 0
    for pair in pairs:
        done += pair[1].size
        time.sleep(max(0.0, end - seconds * (1 - done / total) - time.perf_counter()))
        yield pair


def computes(pairs, seconds):
    """Yield gradients that come at an even pace of this thread's own seconds."""
    a, total, done, begin = np.ones((64, 64), np.float32), sum(view.size for _, view in pairs), 0, time.thread_time()
    for pair in pairs:
        done += pair[1].size
        while time.thread_time() - begin < seconds * done / total:
            a @ a
        yield pair


def timed_alone(grads, comm):
    """Seconds of a dense step of one rank, which exchanges nothing."""
    step, write, _ = stepper(Dense(), grads, "auto", comm, overlap=False)
    return statistics.median(interleaved({"": lambda: step(list)}, 3, 1, write)[""])


def measure(rate, file):
    """On each of the ranks: rank 0 writes {mode: [backward, update, CPU, {case: seconds}]}, in seconds."""
    from mpi4py import MPI

    grads, found = gradients(), {}
    update = distopt.run_ranks(1, lambda comm: timed_alone(grads, comm))[0]

    def slowest(seconds):
        return MPI.COMM_WORLD.allreduce(seconds, MPI.MAX)

    for name, compressor in MODES.items():
        (late, write, _), (early, write_too, _) = (
            stepper(compressor, grads, "auto", overlap=overlap) for overlap in (False, True)
        )

        def start(both=(write, write_too)):
            for write in both:
                write()
            MPI.COMM_WORLD.Barrier()

        def timed(step, clock=time.perf_counter, start=start):
            return statistics.median(interleaved({"": step}, 3, 1, start, slowest, clock=clock)[""])

        shape("10gbit")
        for step in (late, early):
            start()
            step(list)
        shape(rate)
        backward = timed(lambda step=late: step(list)) - update
        # in a backward pass that is longer, since a rank that has nothing else to do does not sleep while it waits
        cpu = timed(lambda step=early, s=backward: step(lambda p: waits(p, 2 * s)), time.process_time)
        cases = {ALONE: lambda step=late: step(list)}
        for loss in (waits, computes):
            for when, step in (("late", late), ("early", early)):
                cases[f"{loss.__name__}, {when}"] = lambda step=step, loss=loss, s=backward: step(lambda p: loss(p, s))
        found[name] = backward, update, cpu, interleaved(cases, ROUNDS, 1, start, slowest)
        del late, early, cases
        gc.collect()
    if distopt.world().rank == 0:
        Path(file).write_text(json.dumps([brand(), found]))


def show(ranks, rate, found):
    """Tables for each mode, of losses that wait and of those that compute."""
    for name, (backward, update, cpu, times) in found.items():
        parts = {"backward": backward, "update": update, "CPU of exchange and update": cpu}
        both = ", ".join(f"{part} {1e3 * seconds:.0f} ms" for part, seconds in parts.items())
        for kind, anchor, each in (
            ("waits", "the longer one, and the update", [max(backward + update, alone) for alone in times[ALONE]]),
            ("computes", "backward and CPU", [(backward + cpu) * max(1.0, ranks / os.cpu_count())] * ROUNDS),
        ):
            cases = {anchor: each, ALONE: times[ALONE]} | {n: s for n, s in times.items() if n.startswith(kind)}
            yield table(f"{name}, {ranks} ranks on two hosts, {rate}: {both}", cases, anchor, BUDGETS)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--save", action="store_true", help="keep the tables as results/backward.txt")
    parser.add_argument("--file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if launched():
        measure(args.rate, args.file)
        return 0
    if reason := missing():
        print(f"benchmarks.backward: {reason}", file=sys.stderr)
        return 2
    tables = []
    for ranks in map(int, args.ranks.split(",")):
        library, found = measured(["-m", "benchmarks.backward", "--rate", args.rate], [ranks // 2] * 2, LIMIT)
        tables += show(ranks, args.rate, found)
    report("backward", "\n".join([versions("numpy", "mpi4py"), library, *tables]), args.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
