"""What it costs to count and to look, in steps of ResNet-50: python -m benchmarks.observe [--save]

Two ranks are processes of MPI.  Their gradients are there: exchange and update are measured, in turns, without a
ledger, with one (``Metered``), and looked at.  Of ``observe(every=100)`` one step in a hundred is looked at, and the
others have to find that they are not.  A step of training has a forward and a backward pass too, here for 32 images a
rank: 24.6 Gflop each, no faster than this machine multiplies matrices.  Times are the smallest, since the machine may
be shared; ratios are to a step of training, and in brackets to exchange and update alone.
"""

import argparse
import os
import subprocess
import sys

import numpy as np

import distopt
from benchmarks.measure import MALLOC, interleaved, report, versions
from benchmarks.models import MODELS
from distopt.cli.launcher import find_launcher
from distopt.comm import Metered
from distopt.compress import DeepGradientCompression, ErrorFeedback, TopK, TwoBit

EVERY, BUDGET = 100, 1.01
IMAGES, FLOP, SIDE = 32, 24.6e9, 1024  # a rank's; of an image, 3 x 4.1 G multiplications and additions; of a matrix
COMPRESSORS = {
    "dense": None,
    "2 bits": ErrorFeedback(TwoBit(1e-3)),
    "top-K, 1 %": ErrorFeedback(TopK(0.01)),
    "DGC, 0.1 %": DeepGradientCompression(TopK(0.001)),
}


def step_of(compressor, metered, every):
    """One step; gradients are what a backward pass wrote last, as random as the first."""
    world = distopt.world()
    rng = np.random.default_rng(world.rank)
    shapes = list(reversed(MODELS["resnet50"]()))
    params = [distopt.Parameter(name, np.zeros(shape, np.float32)) for name, shape in shapes]
    pairs = [(p, rng.standard_normal(p.data.shape).astype(np.float32) * 1e-3) for p in params]
    opt = distopt.DistOpt(distopt.optim.SGD(1e-6), Metered(world) if metered else world)
    opt.observe((lambda step, numbers: None) if world.rank == 0 else None, every)
    return lambda: opt.step(pairs, compressor)


def row_of(name, compressor, rounds):
    """Milliseconds and ratios of one mode."""
    from mpi4py import MPI

    world, square = MPI.COMM_WORLD, np.ones((SIDE, SIDE), np.float32)
    cases = {
        "plain": step_of(compressor, False, 0),
        "metered": step_of(compressor, True, 0),
        "not looked at": step_of(compressor, False, 10**9),
        "looked at": step_of(compressor, False, 1),
        "product": lambda: square @ square,
    }
    times = interleaved(cases, rounds, 3, world.Barrier, lambda seconds: world.allreduce(seconds, MPI.MAX))
    least = {case: min(found) for case, found in times.items()}
    passes = IMAGES * FLOP / (2 * SIDE**3) * least["product"]
    plain, looked = least["plain"], least["looked at"] / EVERY + least["not looked at"] * (1 - 1 / EVERY)
    line = f"{name:12} {passes * 1e3:9.0f} {plain * 1e3:9.1f} {least['metered'] * 1e3:9.1f}"
    line += f" {least['looked at'] * 1e3:9.1f}"
    for found in (least["metered"], looked):
        ratio = (passes + found) / (passes + plain)
        line += f"  {ratio:.4f} ({found / plain:.3f}) {'met' if ratio <= BUDGET else 'MISSED'}"
    return line


def work(given):
    """What every rank does."""
    head = f"{'ms':12} {'passes':>9} {'step':>9} {'metered':>9} {'looked at':>9}  x metered{'':10}  x every {EVERY}"
    lines = [head, *(row_of(*case, given.rounds) for case in COMPRESSORS.items())]
    if distopt.world().rank == 0:
        report("observe", "\n".join([versions("numpy", "mpi4py"), f"budgets: {BUDGET}", "", *lines]), given.save)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--save", action="store_true", help="keep the table in benchmarks/results")
    given = parser.parse_args()
    if os.environ.get("DISTOPT_RUN"):
        work(given)
        return 0
    launcher = find_launcher()
    plain = [flag for flag in launcher.command(2) if flag != "-l"]
    env = launcher.environment(2) | MALLOC
    return subprocess.run([*plain, sys.executable, "-m", "benchmarks.observe", *sys.argv[1:]], env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
