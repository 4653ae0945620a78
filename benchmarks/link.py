"""A step over a network: python -m benchmarks.link [--ranks 2,4] [--rates 1gbit,100mbit] [--save]

ResNet-50 on two hosts in network namespaces (benchmarks/namespaces.py: needs root), joined by a link of each rate in
turn.  All cases, MPI's and gloo's, are of the same processes, and those of a family, as many as there is memory for,
take turns; so the exchanges of a compressor do: a gather, two phases, and, with several ranks on a host, nodes, which
add up inside of a host first.  Everything is launched twice.  Gradients lie ready: what is timed is exchange and update
(SGD with momentum, which with DGC is the compressor's), and with torch a backward that has nothing to compute
(benchmarks/backward.py has those that take their time).  The anchor is the formula: the bytes of a dense all-reduce
between the hosts, with 4.5 % for headers.  With more ranks than cores, half of what takes milliseconds is waiting for
the core.
"""

import argparse
import functools
import gc
import json
import statistics
import sys
from pathlib import Path

import numpy as np

import distopt
from benchmarks.measure import interleaved, ratios, report, table, versions
from benchmarks.namespaces import ADDRESSES, bits_per_second, measured, missing, shape
from distopt.comm.mpi_control import brand
from distopt.compress import ALL, Dense, Half
from distopt.lab.models import resnet50
from distopt.optim import SGD
from distopt.resilience.environment import launched

FLOOR = "line floor, dense, by formula"
BUDGETS = {(2, "1gbit"): {"distopt, top-K 0.1 %, gather": 0.045, "distopt, DGC 0.1 %, gather": 0.045}}  # seconds a step
LAUNCHES, LIMIT = 2, 1200  # seconds of each
SCALE = 1e-3  # of the gradients
PLAIN = {"dense": Dense, "half": Half}
GATHERED = {  # or exchanged in two phases, or between nodes
    name: functools.partial(timed.make, SCALE / timed.density)
    for about in ALL.values()
    for name, timed in about().timed.items()
    if not timed.make(SCALE).traits.summable
}
EXCHANGES = {"gather": "gather", "two_phase": "two phases", "nodes": "nodes"}


def exchanges(ranks):
    """Those of so many ranks, the gather first; with one rank on each host there is nothing to add up inside."""
    return {exchange: words for exchange, words in EXCHANGES.items() if ranks > 2 or exchange != "nodes"}


def floor(rate, hosts=2):
    """Seconds for a dense all-reduce: each of two hosts sends as many bytes as there are in the gradients."""
    return 2 * (hosts - 1) / hosts * 4 * sum(np.prod(s) for _, s in resnet50()) * 8 / bits_per_second(rate) * 1.045


def gradients():
    rng = np.random.default_rng(distopt.world().rank)
    return {name: np.float32(SCALE) * rng.standard_normal(shape, np.float32) for name, shape in reversed(resnet50())}


def stepper(compressor, grads, exchange, comm=None, momentum=0.9, **options):
    """What makes a step with a loss of gradients in the memory that is exchanged, what writes them; the optimizer."""
    params = [distopt.Parameter(name, np.zeros_like(g)) for name, g in grads.items()]
    opt = distopt.DistOpt(SGD(0.1, momentum=0.0 if compressor.traits.corrects_momentum else momentum), comm, **options)
    pairs = list(zip(params, opt.gradient_views(params), strict=True))

    def write():
        for (_, view), g in zip(pairs, grads.values(), strict=True):
            view[...] = g

    return lambda loss: opt.step(loss(pairs), compressor, exchange=exchange), write, opt


def distopt_step(compressor, grads, exchange="gather"):
    """A step whose gradients lie ready, and what writes them."""
    step, write, _ = stepper(compressor, grads, exchange)
    return lambda: step(list), write


def ddp_steps(world, grads, momentum=0.9):
    """What makes torch's own steps, by name, or none without torch; their gradients are never overwritten."""
    try:
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    except ImportError:
        return {}
    from benchmarks import ddp

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://{ADDRESSES[0]}:29500", rank=world.rank, world_size=world.size)
    ready = [torch.from_numpy(g) for g in reversed(grads.values())]

    def step(hook=None, **options):
        model = ddp.distributed(ddp.Model([g.shape for g in ready], lambda: ready), **options)
        if hook:
            model.register_comm_hook(*hook)
        return ddp.step_of(model, lr=0.1, momentum=momentum), lambda: None

    def power():
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        # with more buckets its collectives start in different orders on the ranks, and gloo aborts
        return step((state, powerSGD_hook.powerSGD_hook), bucket_cap_mb=4096)

    return {
        "torch DDP": step,
        "torch DDP, fp16": lambda: step((None, default_hooks.fp16_compress_hook)),
        "torch DDP, PowerSGD rank 1": power,
    }


def sum_of_one_array(grads):
    """MPI's own sum, of zeros."""
    from mpi4py import MPI

    flat = np.zeros(sum(g.size for g in grads.values()), np.float32)
    return lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat), lambda: flat.fill(0)


def families(world, grads):
    """Functions that make cases, {name: (step, what writes its gradients)}; one family's memory is the next one's."""

    def plain():
        cases = {"MPI Allreduce of one array, no update": sum_of_one_array(grads)}
        return cases | {f"distopt, {name}": distopt_step(make(), grads) for name, make in PLAIN.items()}

    def gathered(name, make):
        steps = {words: distopt_step(make(), grads, exchange) for exchange, words in exchanges(world.size).items()}
        return {f"distopt, {name}, {words}": step for words, step in steps.items()}

    several = [lambda name=name, make=make: gathered(name, make) for name, make in GATHERED.items()]
    return [plain, *several, lambda: {name: make() for name, make in ddp_steps(world, grads).items()}]


def take_turns(cases, rates):
    """{rate: {case: seconds, round by round}} of the slowest rank; cases as of ``families``."""
    from mpi4py import MPI

    steps = {name: step for name, (step, _) in cases.items()}

    def start():
        for _, write in cases.values():
            write()
        MPI.COMM_WORLD.Barrier()

    def slowest(seconds):
        return MPI.COMM_WORLD.allreduce(seconds, MPI.MAX)

    shape("10gbit")
    interleaved(steps, rounds=2, calls=1, start=start, uncounted=0)
    times = {}
    for rate in rates:
        shape(rate)
        times[rate] = interleaved(steps, 4 if is_fast(rate) else 2, 1, start, slowest, uncounted=0)
    return times


def is_fast(rate):
    return floor(rate) < 2


def measure(rates, file):
    """On each of the ranks: rank 0 writes {rate: {case: seconds, round by round}}."""
    world, grads = distopt.world(), gradients()
    times = {rate: {} for rate in rates}

    for make in families(world, grads):
        for rate, found in take_turns(make(), rates).items():
            times[rate] |= found
        gc.collect()
    if world.rank == 0:
        Path(file).write_text(json.dumps([brand(), times]))


def launches(ranks, rates):
    """The MPI library, and times as ``measure`` has them, with the rounds of all launches."""
    script, of_hosts = ["-m", "benchmarks.link", "--rates", ",".join(rates)], [ranks // 2] * 2
    found = [measured(script, of_hosts, LIMIT) for _ in range(LAUNCHES)]
    (library, first), *others = found
    for _, times in others:
        for rate, cases in times.items():
            for name, seconds in cases.items():
                first[rate][name] += seconds
    return library, first


def show(ranks, times):
    """A table per rate, and how the two exchanges compare."""
    for rate, cases in times.items():
        rounds = len(next(iter(cases.values())))
        cases = {FLOOR: [floor(rate)] * rounds, **cases}
        seconds = BUDGETS.get((ranks, rate), {})
        budgets = {name: round(budget / floor(rate), 4) for name, budget in seconds.items()}
        title = f"{ranks} ranks on two hosts, {rate}, {rounds} rounds of 1 step, slowest rank"
        yield table(title, cases, FLOOR, budgets)
        yield from (f"  budget of {name}: {budget * 1e3:g} ms" for name, budget in seconds.items())
        gather, *others = exchanges(ranks).values()
        for words in others:
            yield f"  {words} over a {gather}, round by round, as median [min - max]"
            for name in GATHERED:
                r = ratios(cases, f"distopt, {name}, {words}", f"distopt, {name}, {gather}")
                yield f"    {name:42} {statistics.median(r):18.3f}  [{min(r):.3f} - {max(r):.3f}]"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rates", default="1gbit,100mbit")
    parser.add_argument("--save", action="store_true", help="keep the tables as results/link.txt")
    parser.add_argument("--file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    rates = args.rates.split(",")
    if launched():
        measure(rates, args.file)
        return 0
    reason = missing()
    if reason:
        print(f"benchmarks.link: {reason}", file=sys.stderr)
        return 2
    tables = []
    for ranks in map(int, args.ranks.split(",")):
        library, times = launches(ranks, rates)
        tables += show(ranks, times)
    report("link", "\n".join([versions("numpy", "mpi4py", "torch"), library, *tables]), args.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
