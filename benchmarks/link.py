"""A step over a network: python -m benchmarks.link [--rates 1gbit,100mbit] [--save]

ResNet-50 on two hosts in network namespaces (benchmarks/namespaces.py: needs root), joined by a link of each rate in
turn.  All cases, MPI's and gloo's, take turns in one pair of processes.  Their gradients lie ready: what is timed is
exchange and update (SGD with momentum, which with DGC is the compressor's), and with torch a backward that has nothing
to compute; but for two cases, in which a backward computes for as long as the line takes at 1 Gbit/s, and buckets
travel meanwhile or afterwards.  The anchor is the formula: the bytes of a dense all-reduce, with 4.5 % for headers.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import distopt
from benchmarks.measure import MALLOC, interleaved, report, table, versions
from benchmarks.namespaces import ADDRESSES, INTERFACE, missing, shape, two_hosts
from distopt.cli.launcher import find_launcher
from distopt.comm.mpi_control import brand, launched
from distopt.compress import DeepGradientCompression, Dense, ErrorFeedback, Half, Packed, TopK
from distopt.optim import SGD
from distopt.volume.models import resnet50

FLOOR = "line floor, dense, by formula"
BUDGETS = {"1gbit": {"distopt, top-K 0.1 %": 0.045, "distopt, DGC 0.1 %": 0.045}}  # seconds a step
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
LIMIT = 240  # seconds


def bits_per_second(rate):
    number, unit = re.fullmatch(r"(\d+)(\w+)", rate).groups()
    return int(number) * UNITS[unit]


def floor(rate):
    """Seconds for a dense all-reduce of two ranks: each sends as many bytes as there are in the gradients."""
    return 4 * sum(np.prod(s) for _, s in resnet50()) * 8 / bits_per_second(rate) * 1.045


def gradients():
    rng = np.random.default_rng(distopt.world().rank)
    return {name: 1e-3 * rng.standard_normal(shape, np.float32) for name, shape in reversed(resnet50())}


def distopt_step(optimizer, compressor, grads):
    """A step whose gradients are in the memory that is exchanged, and what writes them there."""
    params = [distopt.Parameter(name, np.zeros_like(g)) for name, g in grads.items()]
    opt = distopt.DistOpt(optimizer)
    views = opt.gradient_views(params)
    pairs = list(zip(params, views, strict=True))

    def write():
        for view, g in zip(views, grads.values(), strict=True):
            view[...] = g

    return lambda: opt.step(pairs, compressor), write


def computing_step(grads, overlap):
    """A dense step whose gradients take as long to compute as the line takes at 1 Gbit/s; and what writes them."""
    params = [distopt.Parameter(name, np.zeros_like(g)) for name, g in grads.items()]
    opt = distopt.DistOpt(SGD(0.1, momentum=0.9), overlap=overlap)
    views = opt.gradient_views(params)
    a, b, total = np.ones((256, 256), np.float32), np.ones((256, 256), np.float32), sum(g.size for g in grads.values())
    begin = time.perf_counter()
    for _ in range(100):
        a @ b
    wanted = floor("1gbit") * 100 / (time.perf_counter() - begin)  # products

    def backward():
        done = 0.0
        for pair in zip(params, views, strict=True):
            before, done = done, done + wanted * pair[1].size / total
            for _ in range(int(done) - int(before)):
                a @ b
            yield pair

    def write():
        for view, g in zip(views, grads.values(), strict=True):
            view[...] = g

    return lambda: opt(backward()), write


def ddp_cases(rank, grads):
    """torch's own steps, or none without torch."""
    try:
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    except ImportError:
        return {}
    from benchmarks import ddp

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://{ADDRESSES[0]}:29500", rank=rank, world_size=2)
    ready = [torch.from_numpy(g) for g in reversed(grads.values())]

    def step(hook=None, **options):
        model = ddp.distributed(ddp.Model([g.shape for g in ready], lambda: ready), **options)
        if hook:
            model.register_comm_hook(*hook)
        return ddp.step_of(model, lr=0.1, momentum=0.9)

    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return {
        "torch DDP": step(),
        "torch DDP, fp16": step((None, default_hooks.fp16_compress_hook)),
        # with more buckets its collectives start in different orders on the ranks, and gloo aborts
        "torch DDP, PowerSGD rank 1": step((state, powerSGD_hook.powerSGD_hook), bucket_cap_mb=4096),
    }


def measure(rates, file):
    """On each of the ranks: rank 0 writes {rate: {case: seconds, round by round}}."""
    from mpi4py import MPI

    world, grads = distopt.world(), gradients()
    flat = np.zeros(sum(g.size for g in grads.values()), np.float32)
    cases, writes = {"MPI Allreduce of one array, no update": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat)}, []
    for name, compressor in {
        "dense": Dense(),
        "half": Half(),
        "top-K 1 %": ErrorFeedback(TopK(0.01)),
        "top-K 0.1 %": ErrorFeedback(TopK(0.001)),
        "DGC 0.1 %": DeepGradientCompression(Packed(TopK(0.001)), momentum=0.9),
    }.items():
        momentum = 0.0 if isinstance(compressor, DeepGradientCompression) else 0.9
        cases[f"distopt, {name}"], write = distopt_step(SGD(0.1, momentum), compressor, grads)
        writes.append(write)
    cases |= ddp_cases(world.rank, grads)
    computing = {}
    for overlap in (False, True):
        name = f"distopt, dense, computing as long, overlap {'on' if overlap else 'off'}"
        computing[name], write = computing_step(grads, overlap)
        writes.append(write)

    def start():
        for write in writes:
            write()
        MPI.COMM_WORLD.Barrier()

    def slowest(seconds):
        return MPI.COMM_WORLD.allreduce(seconds, MPI.MAX)

    interleaved(cases | computing, rounds=2, calls=1, start=start, uncounted=0)  # while the link is fast
    times = {}
    for rate in rates:
        shape(rate)
        fast = floor(rate) < 2
        chosen = cases | computing if fast else cases
        times[rate] = interleaved(chosen, 5 if fast else 2, 1, start, slowest, uncounted=0)
    if world.rank == 0:
        Path(file).write_text(json.dumps([brand(), times]))


def show(times):
    """One table per rate."""
    for rate, measured in times.items():
        rounds = len(next(iter(measured.values())))
        measured = {FLOOR: [floor(rate)] * rounds, **measured}
        budgets = {name: round(seconds / floor(rate), 4) for name, seconds in BUDGETS.get(rate, {}).items()}
        yield table(f"{rate}, {rounds} rounds of 1 step, slowest rank", measured, FLOOR, budgets)
        for name, seconds in BUDGETS.get(rate, {}).items():
            yield f"  budget of {name}: {seconds * 1e3:g} ms"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
    launcher = find_launcher()
    with two_hosts() as hosts:
        file = hosts.folder / "times"
        script = [sys.executable, "-m", "benchmarks.link", "--rates", args.rates, "--file", str(file)]
        env = launcher.environment(2) | hosts.environment(launcher.brand)
        env |= MALLOC | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
        subprocess.run(hosts.on(0, [*launcher.command(2), *script]), env=env, timeout=LIMIT, check=True)
        library, times = json.loads(file.read_text())
    report("link", "\n".join([versions("numpy", "mpi4py", "torch"), library, *show(times)]), args.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
