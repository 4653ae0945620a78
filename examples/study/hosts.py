"""A round of training steps of two ranks, one on each of two hosts, with modes that take turns.

``study.py`` starts it on two network namespaces of benchmarks/namespaces.py:

    hosts.py RATE WINDOWS MODE ... --file FILE
"""

import argparse
import json
import sys
from pathlib import Path

sys.path += map(str, Path(__file__).parents[1:3])  # of the examples, and of the benchmarks

import trainings

import distopt
from benchmarks.measure import interleaved
from benchmarks.namespaces import shape_closely
from distopt.comm import LocalCommunicator
from distopt.comm.mpi_control import brand

ALONE = "one rank alone"  # a dense step that sends nothing, on both hosts at once
BEFORE = 12  # steps that are not timed: residuals fill, DGC's warm-up ends


def measure(rate, windows, names):
    """{mode: seconds of a step, window by window}, of the slower rank."""
    from mpi4py import MPI

    world = distopt.world()
    cases = {ALONE: trainings.window_of("dense", LocalCommunicator())}
    cases |= {name: trainings.window_of(name, world) for name in names}
    steps = {ALONE: 1} | {name: trainings.every(name) for name in names}
    shape_closely("10gbit")
    for name, window in cases.items():
        for _ in range(max(1, BEFORE // steps[name])):
            window()
    shape_closely(rate)
    slowest = lambda seconds: MPI.COMM_WORLD.allreduce(seconds, MPI.MAX)  # noqa: E731
    times = interleaved(cases, windows, 1, world.barrier, slowest, uncounted=0)
    return {name: [seconds / steps[name] for seconds in taken] for name, taken in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rate")
    parser.add_argument("windows", type=int)
    parser.add_argument("modes", nargs="+")
    parser.add_argument("--file", type=Path, required=True)
    args = parser.parse_args()
    found = measure(args.rate, args.windows, args.modes)
    if distopt.world().rank == 0:
        args.file.write_text(json.dumps({"library": brand(), "seconds": found}))


if __name__ == "__main__":
    main()
