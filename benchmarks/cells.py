"""Modes as they are called, on any layout of ranks: python -m benchmarks.cells [--cells 2x1,3x2,3+1] [--save]

A cell is hosts x ranks, or the ranks of each host (3+1): network namespaces on one switch (benchmarks/namespaces.py:
needs root), each with a cable of each rate in turn.  ResNet-50's gradients lie ready; what is timed is exchange and
plain SGD.  Each mode as called, by ``exchange="auto"``, takes turns with every exchange that trains the same, forced,
and with torch's DistributedDataParallel and its equivalent hook.  The anchor is the least time of a dense all-reduce
between the hosts; on one host it is MPI's own sum of one array.  With more ranks than cores, half of what takes
milliseconds is waiting for the core.
"""

import argparse
import functools
import gc
import json
import statistics
import sys
from pathlib import Path

import distopt
from benchmarks.link import FLOOR, ddp_steps, floor, gradients, stepper, sum_of_one_array, take_turns
from benchmarks.measure import ratios, report, table, versions
from benchmarks.namespaces import measured, missing
from distopt.comm.mpi_control import brand
from distopt.compress import Dense, ErrorFeedback, Half, Int4, Int8, Packed, TopK
from distopt.resilience.environment import launched

ALL_REDUCE = "MPI Allreduce of one array, no update"
ALIKE = "distopt, {}, forced: {}"  # of every exchange that trains the same
MODES = {  # each with the exchanges that train the same, and DDP's step with as many bytes
    "dense": (Dense(), ("gather", "nodes"), "torch DDP"),
    "half": (Half(), ("gather", "nodes"), "torch DDP, fp16"),
    "int8": (ErrorFeedback(Int8()), ("gather", "two_phase", "nodes"), None),
    "int4": (ErrorFeedback(Int4()), ("gather", "two_phase", "nodes"), None),
    "top-K 0.1 %, packed": (ErrorFeedback(Packed(TopK(0.001))), ("gather", "two_phase"), "torch DDP, PowerSGD rank 1"),
}
BUDGET = 1.10  # x the best exchange
LIMIT = 1500  # seconds of a cell


def measure(modes, rates, file):
    """On each of the ranks: rank 0 writes the MPI library, what 'auto' chose by mode, and {rate: {mode: times}}."""
    world, grads, chosen = distopt.world(), gradients(), {}
    torchs, found = ddp_steps(world, grads, momentum=0.0), {rate: {} for rate in rates}

    for mode in modes:
        compressor, forced, rival = MODES[mode]
        shared = 1 < len(set(world.hosts)) < world.size
        cases, exchanges = {}, ["auto", *(exchange for exchange in forced if exchange != "nodes" or shared)]
        if mode == modes[0]:
            cases[ALL_REDUCE] = sum_of_one_array(grads)
        made = {exchange: stepper(compressor, grads, exchange, momentum=0.0) for exchange in exchanges}
        for exchange, (step, write, _) in made.items():
            name = f"distopt, {mode}" if exchange == "auto" else ALIKE.format(mode, exchange)
            cases[name] = functools.partial(step, list), write
        if rival in torchs:
            cases[rival] = torchs[rival]()
        for rate, times in take_turns(cases, rates).items():
            found[rate][mode] = times
        chosen[mode] = made["auto"][2].plan.exchange or "added on the wire"
        del cases, made
        gc.collect()
    if world.rank == 0:
        Path(file).write_text(json.dumps([brand(), chosen, found]))


def show(cell, ranks, chosen, found):
    """A table per rate, and of each mode how it compares with the best exchange, and with torch's."""
    for rate, modes in found.items():
        cases = {name: times for of_mode in modes.values() for name, times in of_mode.items()}
        anchor, rounds = (FLOOR if len(ranks) > 1 else ALL_REDUCE), len(cases[ALL_REDUCE])
        if len(ranks) > 1:
            cases = {FLOOR: [floor(rate, len(ranks))] * rounds, **cases}
        yield table(f"{cell}: {len(ranks)} hosts, {sum(ranks)} ranks, {rate}, {rounds} rounds of 1 step", cases, anchor)
        yield "  as called, x the best exchange and x DDP's, round by round, as median [min - max]; what auto chose"
        for mode, times in modes.items():
            name, rival = f"distopt, {mode}", MODES[mode][2]
            best = min((n for n in times if n.startswith(name)), key=lambda n: statistics.median(times[n]))
            r = ratios(times, name, best)
            line = f"    {mode:20} {statistics.median(r):6.3f} [{min(r):.3f} - {max(r):.3f}]"
            line += f" {'met' if statistics.median(r) <= BUDGET else 'MISSED'}"
            if rival in times:
                r = ratios(times, name, rival)
                line += f", {statistics.median(r):6.3f} [{min(r):.3f} - {max(r):.3f}] of {rival}"
            yield f"{line}; {chosen[mode]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default="2x1,2x2,4x1,4x2,1x4,3x2,3+1")
    parser.add_argument("--rates", default="1gbit")
    parser.add_argument("--modes", default=";".join(MODES), help="some of: %(default)s")
    parser.add_argument("--save", action="store_true", help="keep the tables as results/cells.txt")
    parser.add_argument("--file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if launched():
        measure(args.modes.split(";"), args.rates.split(","), args.file)
        return 0
    if reason := missing():
        print(f"benchmarks.cells: {reason}", file=sys.stderr)
        return 2
    tables, library = [], ""
    for cell in args.cells.split(","):
        hosts, _, each = cell.partition("x")
        ranks = [int(each)] * int(hosts) if each else [int(n) for n in cell.split("+")]
        script = ["-m", "benchmarks.cells", "--modes", args.modes, "--rates", args.rates]
        library, chosen, found = measured(script, ranks, LIMIT)
        tables += show(cell, ranks, chosen, found)
    report("cells", "\n".join([versions("numpy", "mpi4py", "torch"), library, *tables]), args.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
