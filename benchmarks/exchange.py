"""One step on one machine, exchange and momentum SGD: python -m benchmarks.exchange [--ranks 2] [--save]

The anchor is what somebody would write by hand: one flat MPI_Allreduce in place on a warm buffer, then one pass of C
over the parameters; all in huge pages, and with glibc told to keep its memory, which makes MPI 2.6 x faster.  torch's
DDP runs in the same processes over gloo; its gradients appear in a backward of their own, whose time without DDP is
taken off.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile

import numpy as np

import distopt
from benchmarks import floor
from benchmarks.measure import MALLOC, interleaved, report, table, versions
from benchmarks.models import MODELS
from distopt.device import zeros
from distopt.run.launcher import find_launcher

BUDGETS = {
    "resnet50": {
        "distopt, gradients in their bucket": {2: 0.75, 4: 0.8},
        "distopt, parameters shared too, update sharded": {2: 0.4},
        "the same, nobody looks for NaN": {2: 0.4},
        "distopt, gradients in separate arrays": {2: 1.1},
    },
    "tiny": {"distopt, gradients in separate arrays": {2: 1.2}},
}
RULE = {"lr": 1e-6, "momentum": 0.9, "weight_decay": 1e-4}


def arrays(model):
    """Gradients that differ per rank and tensor, in backward order."""
    rng = np.random.default_rng(distopt.world().rank)
    return [rng.standard_normal(shape).astype(np.float32) * 1e-3 for _, shape in reversed(MODELS[model]())]


def by_hand(model):
    """The anchor."""
    from mpi4py import MPI

    grads, _ = floor.flat(arrays(model), zeros)
    p, m = zeros(grads.size, np.float32), zeros(grads.size, np.float32)
    ranks = MPI.COMM_WORLD.size

    def step():
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, grads)
        floor.update("sgd", p, grads, m, scale=1 / ranks, lr=RULE["lr"])
        grads[0] = 0  # sums of sums grow; what is added does not matter

    return step


def parameters(model):
    return [distopt.Parameter(name, np.full(shape, 0.1, np.float32)) for name, shape in reversed(MODELS[model]())]


def separate(model):
    params, grads = parameters(model), arrays(model)
    opt = distopt.DistOpt(distopt.optim.SGD(**RULE))
    return lambda: opt(zip(params, grads, strict=True))


def in_bucket(model):
    params = parameters(model)
    opt = distopt.DistOpt(distopt.optim.SGD(**RULE))
    return step_in_views(opt, params, model)


def step_in_views(opt, params, model):
    views = opt.gradient_views(params)
    for view, grad in zip(views, arrays(model), strict=True):
        view[...] = grad
    return lambda: opt(zip(params, views, strict=True))


def sharded(model, **options):
    params = parameters(model)
    opt = distopt.DistOpt(distopt.optim.SGD(**RULE), **options)
    for p, view in zip(params, opt.parameter_views(params), strict=True):
        p.data = view
    return step_in_views(opt, params, model)


def torch_cases(model, folder):
    """DDP with gradients as views of its buckets and torch's fused SGD, and the same without DDP."""
    import torch
    import torch.distributed

    from benchmarks import ddp

    torch.set_num_threads(1)
    world = distopt.world()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=world.rank, world_size=world.size
    )
    grads = [torch.from_numpy(g) for g in arrays(model)]

    def make():
        return ddp.Model([g.shape for g in grads], lambda: [g.clone() for g in grads])  # each one fresh memory

    alone = make()

    def backward():
        alone().backward()
        alone.zero_grad()

    step = ddp.step_of(ddp.distributed(make()), **RULE)
    return {"torch DDP + fused SGD, its backward included": step, "that backward, without DDP": backward}


CASES = {
    "MPI_Allreduce of one flat array + one pass of C": by_hand,
    "distopt, gradients in their bucket": in_bucket,
    "distopt, parameters shared too, update sharded": sharded,
    "the same, nobody looks for NaN": lambda model: sharded(model, nonfinite="propagate"),
    "distopt, gradients in separate arrays": separate,
}


def work(given):
    """What every rank does."""
    from mpi4py import MPI

    from distopt.comm.mpi_control import brand

    world, tables = MPI.COMM_WORLD, []
    for model, budgets in BUDGETS.items():
        cases = {name: make(model) for name, make in CASES.items()}
        if importlib.util.find_spec("torch"):
            folder = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
            cases |= torch_cases(model, folder)
        times = interleaved(cases, given.rounds, 3, world.Barrier, lambda seconds: world.allreduce(seconds, MPI.MAX))
        step, backward = list(cases)[-2:]
        if "DDP" in step:
            pairs = zip(times[step], times.pop(backward), strict=True)
            times["torch DDP + fused SGD, less its backward"] = [a - b for a, b in pairs]
        anchor = next(iter(cases))
        limits = {name: by_ranks[world.size] for name, by_ranks in budgets.items() if world.size in by_ranks}
        tables.append(table(f"{model}, {world.size} ranks, {brand()}", times, anchor, limits))
        del cases
        if importlib.util.find_spec("torch"):
            import torch.distributed

            torch.distributed.destroy_process_group()
    if world.rank == 0:
        text = "\n\n".join([versions("numpy", "mpi4py", "torch"), *tables])
        report("exchange" if world.size == 2 else f"exchange-{world.size}", text, given.save)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="keep the tables in benchmarks/results")
    args = parser.parse_args()
    if os.environ.get("DISTOPT_RUN"):
        work(args)
        return 0
    launcher = find_launcher()
    plain = [flag for flag in launcher.command(args.ranks) if flag != "-l"]
    env = launcher.environment(args.ranks) | MALLOC
    return subprocess.run([*plain, sys.executable, "-m", "benchmarks.exchange", *sys.argv[1:]], env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
