"""What the vote costs: distopt run -n 2 -m benchmarks.vote

A vote against a bare MPI all-reduce of the same 64 bytes, and as a share of a whole step; all in one run, interleaved.
"""

import statistics
import time

import numpy as np
from mpi4py import MPI

import distopt
from benchmarks.models import MODELS
from distopt.comm.mpi import brand

ROUNDS = 7


def timed(function, calls):
    """Seconds per call of the slowest rank."""
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return MPI.COMM_WORLD.allreduce((time.perf_counter() - start) / calls, MPI.MAX)


def step_of(model):
    """One step of a model whose gradients are already there."""
    params = [distopt.Parameter(name, np.zeros(shape, np.float32)) for name, shape in reversed(MODELS[model]())]
    opt = distopt.DistOpt(distopt.optim.SGD(0.1, momentum=0.9))
    pairs = list(zip(params, [np.full(p.data.shape, 1e-3, np.float32) for p in params], strict=True))
    opt(pairs)
    return lambda: opt(pairs)


def main():
    world = distopt.world()
    bare = np.zeros(8, np.int64)
    cases = {
        "bare MPI_Allreduce of 64 bytes": (lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, bare, MPI.MAX), 2000),
        "a vote": (lambda: world.control.vote("a vote", 1, list), 2000),
        "a step, resnet50 (161 tensors)": (step_of("resnet50"), 5),
        "a step, tiny (2000 tensors)": (step_of("tiny"), 20),
    }
    times = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, (function, calls) in cases.items():
            times[name].append(timed(function, calls))
    if world.rank == 0:
        vote = statistics.median(times["a vote"])
        print(f"{brand()}, {world.size} ranks; medians of {ROUNDS} rounds [min - max], slowest rank")
        for name, t in times.items():
            middle = statistics.median(t)
            spread = f"[{min(t) * 1e6:.1f} - {max(t) * 1e6:.1f}]"
            print(f"{name:32} {middle * 1e6:12.1f} us {spread:24} vote / this {vote / middle:.4f}")


if __name__ == "__main__":
    main()
