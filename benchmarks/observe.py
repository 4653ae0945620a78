"""What it costs to count and to look: python -m benchmarks.observe [--rounds N] [--save]

Two ranks are processes of MPI.  Their gradients are there: a step is the exchange and the update alone, of ResNet-50,
and of a model that is small enough for Python to be all that takes time.  What the ledger takes is timed inside of it,
a mean over all steps, and not as the difference of two steps, which vary by more.  Steps that are looked at take turns
with others; of ``observe(every=100)`` they are one in a hundred.  Shares are of exchange and update alone, and of a
step with 0.1 s of passes, as a GPU takes for 32 images.  Times are the smallest, since the machine may be shared.
"""

import argparse
import contextlib
import functools
import os
import subprocess
import sys
import time

import numpy as np

import distopt
from benchmarks.measure import MALLOC, interleaved, report, versions
from benchmarks.models import MODELS
from distopt import lab
from distopt.comm import Metered
from distopt.comm.meter import Meter
from distopt.run.launcher import find_launcher

EVERY, BUDGET, PASSES = 100, 0.01, 0.1
CALLS = 3
VERBS = "all_reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all", "lengths", "look"
MODES = "dense", "half", "2bit=0.001", "1bit", "topk=0.01", "topk=0.01+packed", "dgc=0.001", "dgc=0.001+packed"
SMALL = [(f"p{k}", (64, 10)) for k in range(6)]


class Inside:
    """Seconds that calls take, while they are watched."""

    def __init__(self):
        self.seconds = 0.0

    @contextlib.contextmanager
    def watched(self):
        """What is done here counts."""
        begin = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begin

    def watch(self, owner, name):
        """So does every call of this method."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def timed(*args, **options):
            with self.watched():
                return method(*args, **options)

        setattr(owner, name, timed)


def step_of(shapes, compressor, wire, every):
    """One step; gradients are what a backward pass wrote last, as random as the first."""
    rng = np.random.default_rng(distopt.world().rank)
    params = [distopt.Parameter(name, np.zeros(shape, np.float32)) for name, shape in reversed(shapes)]
    pairs = [(p, rng.standard_normal(p.data.shape).astype(np.float32) * 1e-3) for p in params]
    opt = distopt.DistOpt(distopt.optim.SGD(1e-6), wire)
    opt.observe((lambda step, numbers: None) if wire.rank == 0 else None, every)
    return lambda: opt.step(pairs, compressor)


def row_of(model, shapes, name, rounds, inside):
    """Milliseconds and shares of one mode."""
    from mpi4py import MPI

    world, compressor = MPI.COMM_WORLD, lab.mode(name).compressor
    counted, inside.seconds = Metered(distopt.world()), 0.0
    cases = {
        "metered": step_of(shapes, compressor, counted, 0),
        "not looked at": step_of(shapes, compressor, distopt.world(), 10**9),
        "looked at": step_of(shapes, compressor, distopt.world(), 1),
    }
    times = interleaved(cases, rounds, CALLS, world.Barrier, lambda seconds: world.allreduce(seconds, MPI.MAX))
    plain, looked = min(times["not looked at"]), min(times["looked at"])
    with inside.watched():
        counted.ledger.total()  # makes what is not made yet
    own_seconds = inside.seconds / (CALLS * (rounds + 1))
    more, verdict = max(0.0, looked - plain) / EVERY, "met" if own_seconds <= BUDGET * (plain + PASSES) else "MISSED"
    shares = [f"{100 * x / y:7.2f} %" for x in (own_seconds, more) for y in (plain, plain + PASSES)]
    times = f"{plain * 1e3:8.2f} {own_seconds * 1e3:9.3f} {shares[0]} {shares[1]} {verdict:6}"
    return f"{model:10} {name:18} {times} {looked * 1e3:9.2f} {shares[2]} {shares[3]}"


def work(given):
    """What every rank does."""
    inside = Inside()
    for verb in VERBS:
        inside.watch(Meter, verb)
    columns = ("step ms", 8), ("ledger ms", 9), ("alone", 9), ("+ passes", 16), ("looked at", 9), ("alone", 9)
    head = " ".join([" " * 29, *(f"{name:>{width}}" for name, width in columns), f"{'+ passes':>9}"])
    models = {"resnet50": (MODELS["resnet50"](), MODES), "6 x 640": (SMALL, ("dense", "topk=0.01"))}
    rows = [row_of(m, shapes, mode, given.rounds, inside) for m, (shapes, modes) in models.items() for mode in modes]
    if distopt.world().rank == 0:
        about = f"budget of the ledger: {BUDGET:.0%} of a step with passes"
        report("observe", "\n".join([versions("numpy", "mpi4py"), about, "", head, *rows]), given.save)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="keep the table in benchmarks/results")
    args = parser.parse_args()
    if os.environ.get("DISTOPT_RUN"):
        work(args)
        return 0
    launcher = find_launcher()
    plain = [flag for flag in launcher.command(2) if flag != "-l"]
    env = launcher.environment(2) | MALLOC
    return subprocess.run([*plain, sys.executable, "-m", "benchmarks.observe", *sys.argv[1:]], env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
