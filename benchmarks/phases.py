"""Where two phases lose against a gather: python -m benchmarks.phases [--ranks 2,4] [--rates 1gbit,100mbit] [--save]

Small steps on two hosts in network namespaces (benchmarks/namespaces.py: needs root), joined by a link of each rate in
turn.  A rank's payloads of all others together are so many bytes of int8; ``step`` gathers what is below
``GATHER_BELOW``.  The link has no latency but that of the machine, and lets little through at once after a pause
(``shape_closely`` there).  The last rows are those of examples/digits.py's wide network.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import numpy as np

import distopt
from benchmarks.measure import interleaved, ratios, report, versions
from benchmarks.namespaces import measured, missing, shape_closely
from distopt.comm.mpi_control import brand
from distopt.compress import ErrorFeedback, Int8, OneBit, Packed, TopK
from distopt.exchange.choice import GATHER_BELOW
from distopt.optim import SGD
from distopt.resilience.environment import launched

BYTES = (4_000, 16_000, 60_000, 70_000, 130_000, 260_000, 1_000_000)
DIGITS = {"w0": (64, 512), "b0": (512,), "w1": (512, 512), "b1": (512,), "w2": (512, 10), "b2": (10,)}
EXCHANGES = ("gather", "two_phase")
ROUNDS, CALLS, LIMIT = 15, 6, 300  # seconds


def steps_of(name, shapes, compressor):
    """{(name, exchange): a step}, of gradients of random numbers."""
    rng, steps = np.random.default_rng(distopt.world().rank), {}
    for exchange in EXCHANGES:
        params = [distopt.Parameter(key, np.zeros(shape, np.float32)) for key, shape in shapes.items()]
        pairs, opt = [(p, rng.standard_normal(p.data.shape, np.float32)) for p in params], distopt.DistOpt(SGD(0.1))
        steps[name, exchange] = lambda opt=opt, pairs=pairs, exchange=exchange: opt.step(
            pairs, ErrorFeedback(compressor), exchange=exchange
        )
    return steps


def all_steps(size):
    """Those of all sizes, and of the digits."""
    steps = {}
    for total in BYTES:
        steps |= steps_of(f"{total:,} bytes", {"w": (total // (size - 1),)}, Int8())
    steps |= steps_of("digits, 1 bit", DIGITS, OneBit())
    return steps | steps_of("digits, packed top-K 1 %", DIGITS, Packed(TopK(0.01)))


def measure(rates, file):
    """On each of the ranks: rank 0 writes {rate: {case: {exchange: seconds, round by round}}}."""
    from mpi4py import MPI

    def slowest(seconds):
        return MPI.COMM_WORLD.allreduce(seconds, MPI.MAX)

    world, times = distopt.world(), {}
    steps = all_steps(world.size)
    for rate in rates:
        shape_closely(rate)
        taken = interleaved(steps, ROUNDS, CALLS, MPI.COMM_WORLD.Barrier, slowest)
        times[rate] = {}
        for (name, exchange), seconds in taken.items():
            times[rate].setdefault(name, {})[exchange] = seconds
    if world.rank == 0:
        Path(file).write_text(json.dumps([brand(), times]))


def show(ranks, times):
    """A table per rate."""
    for rate, cases in times.items():
        yield f"{ranks} ranks on two hosts, {rate}, {ROUNDS} rounds of {CALLS} steps, slowest rank"
        yield f"  {'from the others':26} {'gather ms':>10} {'two phases ms':>14}  two phases over a gather [min - max]"
        for name, found in cases.items():
            gather, phases = (1e3 * statistics.median(found[exchange]) for exchange in EXCHANGES)
            r = ratios(found, "two_phase", "gather")
            spread = f"{statistics.median(r):8.2f}  [{min(r):.2f} - {max(r):.2f}]"
            yield f"  {name:26} {gather:10.3f} {phases:14.3f}  {spread}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rates", default="1gbit,100mbit")
    parser.add_argument("--save", action="store_true", help="keep the tables as results/phases.txt")
    parser.add_argument("--file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if launched():
        measure(args.rates.split(","), args.file)
        return 0
    reason = missing()
    if reason:
        print(f"benchmarks.phases: {reason}", file=sys.stderr)
        return 2
    tables = []
    for ranks in map(int, args.ranks.split(",")):
        library, times = measured(["-m", "benchmarks.phases", "--rates", args.rates], [ranks // 2] * 2, LIMIT)
        tables += show(ranks, times)
    heads = [versions("numpy", "mpi4py"), library, f"a step gathers below {GATHER_BELOW:,} bytes, or with 2 ranks"]
    report("phases", "\n".join([*heads, *tables]), args.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
