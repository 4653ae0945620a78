"""PyTorch: python -m benchmarks.torch_ddp [--ranks 2] [--launcher torchrun] [--save], and two other tables:

    --end-to-end   steps a second of a small CNN and a ResNet-18 on random images
    --link 1gbit   exchange and update of ResNet-50 between two hosts (benchmarks/namespaces.py: needs root)

The anchor is torch's DistributedDataParallel with gradients as views of its buckets and a fused optimizer.  It and all
cases of distopt are in the same processes, one thread each, and take turns.  The first table is a step of ResNet-50's
161 tensors whose gradients are there already: a backward has but to clone them into fresh memory, and its time is taken
off; so is, for what an exchange takes, that of torch's update.  Under torchrun distopt has torch's process group, under
mpirun MPI, while DDP has gloo in both.
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile

import numpy as np
import torch
import torch.distributed

import distopt
import distopt.torch as dt
from benchmarks import ddp
from benchmarks.measure import MALLOC, Times, interleaved, report, table, versions
from benchmarks.models import MODELS
from distopt.cli.launcher import find_launcher

RULES = {
    "SGD": {"lr": 1e-6, "momentum": 0.9, "weight_decay": 1e-4},
    "AdamW": {"lr": 1e-6, "weight_decay": 1e-2},
}
DDP, SYNCHRONIZE, COMPRESS = "torch DDP + fused", "dt.synchronize + fused", "dt.compress(ddp) + fused"
FUSED, WRAPPED = "DistOpt(distopt.optim, params=model)", "DistOpt(torch.optim, fused)"
BACKWARD, ALONE = "backward", "backward + fused"
STEP, EXCHANGE = {FUSED: 1 / 2.5}, {SYNCHRONIZE: 1 / 2}  # at most so much of DDP's time
LAUNCHERS = ("torchrun", "mpirun")


# -- models


def ready(gradients):
    """A model with the shapes of ResNet-50, whose backward clones these gradients."""
    return ddp.Model([g.shape for g in gradients], lambda: [g.clone() for g in gradients])


def resnet50_gradients():
    """Gradients that differ per rank and tensor, in forward order."""
    generator = torch.Generator().manual_seed(distopt.world().rank)
    return [torch.randn(shape, generator=generator) * 1e-3 for _, shape in MODELS["resnet50"]()]


# -- steps: each function makes one of a model; ``loss`` runs its forward


def fused(name, model):
    return getattr(torch.optim, name)(model.parameters(), fused=True, **RULES[name])


def stepping(model, optimizer, loss):
    """The loop of a script."""

    def step():
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step


def alone(name, model, loss):
    return stepping(model, fused(name, model), loss)


def in_ddp(name, model, loss):
    model = ddp.distributed(model)
    return stepping(model, fused(name, model), loss)


def synchronized(name, model, loss):
    dt.synchronize(model)
    return stepping(model, fused(name, model), loss)


def compressed(name, model, loss):
    model = ddp.distributed(model)
    dt.compress(model)
    return stepping(model, fused(name, model), loss)


def fused_by_distopt(name, model, loss):
    opt = distopt.DistOpt(getattr(distopt.optim, name)(**RULES[name]), params=model)
    return lambda: opt(loss(model))


def wrapped(name, model, loss):
    opt = distopt.DistOpt(fused(name, model))
    return lambda: opt(loss(model))


CASES = {
    DDP: in_ddp,
    SYNCHRONIZE: synchronized,
    COMPRESS: compressed,
    FUSED: fused_by_distopt,
    WRAPPED: wrapped,
}


# -- tables


def backward(model, loss):
    def step():
        model.zero_grad()
        loss(model).backward()

    return step


def less(times: Times, taken_off: list[float]) -> Times:
    """Times, round by round, without those of a part that all of them have."""
    return {name: [a - b for a, b in zip(seconds, taken_off, strict=True)] for name, seconds in times.items()}


def take_turns(cases, rounds, calls):
    """The seconds of the slowest rank."""
    world = distopt.world()

    def slowest(seconds):
        return max(float(x[0]) for x in world.all_gather(np.array([seconds])))

    return interleaved(cases, rounds, calls, world.barrier, slowest, uncounted=2)


def exchange_and_update(given):
    """Tables of a step of ResNet-50 whose gradients are there."""
    gradients, world = resnet50_gradients(), distopt.world()
    for name in RULES:
        cases = {case: make(name, ready(gradients), lambda model: model()) for case, make in CASES.items()}
        cases[BACKWARD] = backward(ready(gradients), lambda model: model())
        cases[ALONE] = alone(name, ready(gradients), lambda model: model())
        times = take_turns(cases, given.rounds, 3)
        del cases
        gc.collect()
        without, updated = times.pop(BACKWARD), times.pop(ALONE)
        title = f"resnet50, {name}, {world.size} ranks, {given.launcher}"
        yield table(f"{title}: exchange and update, the backward taken off", less(times, without), DDP, STEP)
        times.pop(FUSED)
        yield table(f"{title}: exchange, torch's update taken off too", less(times, updated), DDP, EXCHANGE)


# -- launching


def work(given):
    """What every rank does."""
    torch.set_num_threads(1)
    start_gloo()
    world = distopt.world()
    tables = list(exchange_and_update(given))
    if world.rank == 0:
        name = f"torch_ddp-{given.launcher}-{world.size}"
        report(name, "\n\n".join([f"{versions('numpy', 'mpi4py', 'torch')}\n{world!r}", *tables]), given.save)
    torch.distributed.destroy_process_group()


def start_gloo():
    """Make the process group of DDP: as torchrun tells, or by a file where MPI started the ranks."""
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        torch.distributed.init_process_group("gloo")
        return
    world = distopt.world()  # before the group is there: it is MPI's
    folder = world.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else None)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=world.rank, world_size=world.size
    )


def launched(given):
    """Run this in ranks."""
    script = ["-m", "benchmarks.torch_ddp", *sys.argv[1:]]
    if given.launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.ranks)]
        env = os.environ
    else:
        launcher = find_launcher()
        command = [*(flag for flag in launcher.command(given.ranks) if flag != "-l"), sys.executable]
        env = launcher.environment(given.ranks)
    return subprocess.run([*command, *script], env=env | MALLOC | {"OMP_NUM_THREADS": "1"}).returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="torchrun")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="keep the tables in benchmarks/results")
    given = parser.parse_args()
    if os.environ.get("DISTOPT_RUN") or os.environ.get("TORCHELASTIC_RUN_ID"):
        work(given)
        return 0
    return launched(given)


if __name__ == "__main__":
    sys.exit(main())
