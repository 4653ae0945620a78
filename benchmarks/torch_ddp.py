"""A step in PyTorch beside DistributedDataParallel: python -m benchmarks.torch_ddp [--ranks 2] [--launcher torchrun]

    [--save]              exchange and update of ResNet-50's 161 tensors
    --end-to-end [--save] a small CNN and a ResNet-18 that compute, on random images
    --link 1gbit [--save] exchange and update of ResNet-50 between two hosts (benchmarks/namespaces.py: needs root)
    --link 100mbit --local [--save] models that compute, with exchanges every 30 steps, between two hosts

The anchor is DDP with gradients as views of its buckets, and torch's fused optimizer.  It and all cases of distopt are
in the same processes, of one thread each, and take turns.  ResNet-50's gradients are there already: its backward clones
them into fresh memory, and its time is taken off; so is, from what an exchange takes, that of torch's update.  Under
torchrun distopt has torch's process group, under mpirun it has MPI; DDP has gloo in both.
"""

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack

import numpy as np
import torch
import torch.distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import distopt
import distopt.torch as dt
from benchmarks import ddp
from benchmarks.measure import MALLOC, interleaved, report, table, versions
from benchmarks.models import MODELS
from benchmarks.namespaces import ADDRESSES, INTERFACE, joined_hosts, missing
from benchmarks.torch_models import loss_on_random_images, resnet18, small_cnn
from distopt.compress import Chunks, DeepGradientCompression, ErrorFeedback, Half, Int8, Packed, TopK
from distopt.run.launcher import find_launcher

RULES = {
    "SGD": {"lr": 1e-6, "momentum": 0.9, "weight_decay": 1e-4},
    "AdamW": {"lr": 1e-6, "weight_decay": 1e-2},
}
DDP, SYNCHRONIZE, COMPRESS = "torch DDP + fused", "dt.synchronize + fused", "dt.compress(ddp) + fused"
FUSED, WRAPPED = "DistOpt(distopt.optim, params=model)", "DistOpt(torch.optim, fused)"
SHARED = "the same, its parameter_views"
BACKWARD, ALONE = "backward", "backward + fused, nothing exchanged"
STEP, EXCHANGE = {FUSED: 1 / 2.5, SHARED: 1 / 2.5}, {SYNCHRONIZE: 1 / 2}  # of DDP's time, at most
NEVER_SLOWER = {SYNCHRONIZE: 1, FUSED: 1}
PORT = 29500


# -- steps of a model, of which ``loss`` runs the forward


def fused(model, rule="SGD", **changed):
    return getattr(torch.optim, rule)(model.parameters(), fused=True, **(RULES[rule] | changed))


def step_of(model, optimizer, loss):
    """What a script does in its loop."""

    def step():
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step


def backward(model, loss):
    def step():
        model.zero_grad()
        loss(model).backward()

    return step


def alone(model, loss, rule):
    return step_of(model, fused(model, rule), loss)


def in_ddp(model, loss, rule):
    model = ddp.distributed(model)
    return step_of(model, fused(model, rule), loss)


def synchronized(model, loss, rule):
    dt.synchronize(model)
    return step_of(model, fused(model, rule), loss)


def compressed(model, loss, rule):
    model = ddp.distributed(model)
    dt.compress(model)
    return step_of(model, fused(model, rule), loss)


def fused_by_distopt(model, loss, rule):
    opt = distopt.DistOpt(getattr(distopt.optim, rule)(**RULES[rule]), params=model)
    return lambda: opt(loss(model))


def in_shared_memory(model, loss, rule):
    opt = distopt.DistOpt(getattr(distopt.optim, rule)(**RULES[rule]), params=model)
    opt.parameter_views(model)
    return lambda: opt(loss(model))


def wrapped(model, loss, rule):
    opt = distopt.DistOpt(fused(model, rule))
    return lambda: opt(loss(model))


CASES = {
    DDP: in_ddp,
    SYNCHRONIZE: synchronized,
    COMPRESS: compressed,
    FUSED: fused_by_distopt,
    SHARED: in_shared_memory,
    WRAPPED: wrapped,
    ALONE: alone,
}


# -- steps between hosts


def hooked(hook=None, state=None, **options):
    """A case of DDP with a hook of torch's."""

    def make(model, loss):
        model = ddp.distributed(model, **options)
        if hook:
            model.register_comm_hook(state, hook)
        return step_of(model, fused(model), loss)

    return make


def power_sgd():
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    # with more buckets its collectives start in different orders on the ranks, and gloo aborts
    return hooked(powerSGD_hook.powerSGD_hook, state, bucket_cap_mb=4096)


def sending(compressor=None, momentum=0.9):
    """A case of ``dt.synchronize``; ``momentum`` is that of the optimizer."""

    def make(model, loss):
        optimizer = fused(model, momentum=momentum)
        dt.synchronize(model, compressor, optimizer=optimizer)
        return step_of(model, optimizer, loss)

    return make


def between_hosts():
    """Families of cases, {name: what makes a step}, whose first one is the anchor."""
    dense = {
        DDP: hooked(),
        "torch DDP, fp16": hooked(default_hooks.fp16_compress_hook),
        "torch DDP, PowerSGD rank 1": power_sgd(),
        "dt.synchronize, dense": sending(),
        "dt.synchronize, half": sending(Half()),
    }
    sparse = DeepGradientCompression(Packed(TopK(0.001)), momentum=0.9)
    compressed = {
        DDP: hooked(),
        "dt.synchronize, int8": sending(ErrorFeedback(Int8())),
        "dt.synchronize, packed top-K 0.1 %": sending(ErrorFeedback(Packed(TopK(0.001)))),
        "dt.synchronize, DGC 0.1 %": sending(sparse, momentum=0.0),
    }
    return [dense, compressed]


# -- windows of local steps between hosts


def windows(every, **options):
    """A case of ``dt.local_steps``: a call is all steps of a window."""

    def make(model, loss):
        optimizer = fused(model)
        dt.local_steps(model, optimizer, every=every, **options)
        return repeated(step_of(model, optimizer, loss), every)

    return make


def repeated(step, times):
    def steps():
        for _ in range(times):
            step()

    return steps


def sparse_loco():
    compressor = ErrorFeedback(Packed(Chunks(64, 4096), value="2bit"), decay=0.95)
    return {"compressor": compressor, "outer": distopt.optim.SGD(1.0), "over": "senders"}


EVERY = 30
LOCAL = {
    f"dt.local_steps, every {EVERY}": windows(EVERY),
    "the same in 5 fragments, taken 3 steps later": windows(EVERY, fragments=5, delay=3, alpha=0.5),
    "SparseLoCo: 64 of 4,096 in two bits": windows(EVERY, **sparse_loco()),
}


# -- tables


def resnet50():
    """A function that makes a model with the shapes of ResNet-50, whose backward clones gradients of this rank's."""
    generator = torch.Generator().manual_seed(distopt.world().rank)
    gradients = [torch.randn(shape, generator=generator) * 1e-3 for _, shape in MODELS["resnet50"]()]
    return lambda: ddp.Model([g.shape for g in gradients], lambda: [g.clone() for g in gradients])


def forward(model):
    return model()


def take_turns(cases, rounds, calls):
    """The seconds of the slowest rank, round by round; then the cases are gone, and their memory is free."""
    world = distopt.world()

    def slowest(seconds):
        return max(float(x[0]) for x in world.all_gather(np.array([seconds])))

    times = interleaved(cases, rounds, calls, world.barrier, slowest, uncounted=2)
    cases.clear()
    gc.collect()
    return times


def less(times, taken_off):
    """Times, round by round, without those of a part that all of them have."""
    return {name: [a - b for a, b in zip(seconds, taken_off, strict=True)] for name, seconds in times.items()}


def exchange_and_update(given, ranks):
    make_model = resnet50()
    for rule in RULES:
        cases = {name: make(make_model(), forward, rule) for name, make in CASES.items()}
        cases[BACKWARD] = backward(make_model(), forward)
        times = take_turns(cases, given.rounds, 3)
        without, updated, title = times.pop(BACKWARD), times.pop(ALONE), f"resnet50, {rule}, {ranks}"
        yield table(f"{title}: exchange and update, the backward taken off", less(times, without), DDP, STEP)
        del times[FUSED], times[SHARED]
        yield table(f"{title}: exchange, torch's update taken off too", less(times, updated), DDP, EXCHANGE)


def end_to_end(given, ranks):
    rank = distopt.world().rank
    for name, make_model, shape, calls in [
        ("small CNN, 64 images of 8 x 8", small_cnn, (64, 1, 8, 8), 50),
        ("ResNet-18, 8 images of 32 x 32", resnet18, (8, 3, 32, 32), 2),
    ]:
        loss = loss_on_random_images(shape, rank)
        times = take_turns({case: make(make_model(), loss, "SGD") for case, make in CASES.items()}, given.rounds, calls)
        yield table(f"{name} a rank, SGD, {ranks}: whole steps", times, DDP, NEVER_SLOWER)
        yield "\n".join(f"  {case:44} {1 / statistics.median(s):9.2f} steps a second" for case, s in times.items())


def over_a_link(given, ranks):
    make_model = resnet50()
    for family in between_hosts():
        cases = {name: make(make_model(), forward) for name, make in family.items()}
        cases[BACKWARD] = backward(make_model(), forward)
        times = take_turns(cases, given.rounds, 1)
        times = less(times, times.pop(BACKWARD))
        yield table(f"resnet50, SGD, {ranks}: exchange and update, the backward taken off", times, DDP)


def local_over_a_link(given, ranks):
    """Whole windows of local steps, divided by their steps, beside steps that exchange gradients."""
    rank = distopt.world().rank
    for name, make_model, shape in [
        ("small CNN, 64 images of 8 x 8", small_cnn, (64, 1, 8, 8)),
        ("ResNet-18, 8 images of 32 x 32", resnet18, (8, 3, 32, 32)),
    ]:
        loss = loss_on_random_images(shape, rank)
        cases = {
            DDP: hooked()(make_model(), loss),
            "dt.synchronize, int8": sending(ErrorFeedback(Int8()))(make_model(), loss),
            **{case: make(make_model(), loss) for case, make in LOCAL.items()},
        }
        seconds = take_turns(cases, given.rounds, 1)
        for case in LOCAL:
            seconds[case] = [s / EVERY for s in seconds[case]]
        yield table(f"{name} a rank, SGD, {ranks}: the mean step", seconds, DDP)
        yield "\n".join(f"  {case:44} {1 / statistics.median(s):9.3f} steps a second" for case, s in seconds.items())


# -- ranks


def work(given):
    """What every rank does."""
    torch.set_num_threads(1)
    start_gloo()
    world = distopt.world()
    kind = "link" if given.link else f"{'end_to_end-' * given.end_to_end}{given.launcher}"
    make = over_a_link if given.link else end_to_end if given.end_to_end else exchange_and_update
    if given.local:
        kind, make = f"local-{given.link}", local_over_a_link
    tables = list(make(given, f"{world.size} ranks, {f'two hosts, {given.link}' if given.link else given.launcher}"))
    if world.rank == 0:
        text = "\n\n".join([f"{versions('numpy', 'mpi4py', 'torch')}\n{world.reason}", *tables])
        report(f"torch_ddp-{kind}-{world.size}", text, given.save)
    world.barrier()
    torch.distributed.destroy_process_group()


def start_gloo():
    """Make the process group of DDP: as the environment tells, or by a file where MPI has started the ranks."""
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        return
    world = distopt.world()  # before there is a group: it is MPI's
    folder = world.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else None)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=world.rank, world_size=world.size)


SCRIPT = ["-m", "benchmarks.torch_ddp"]
ONE_THREAD = MALLOC | {"OMP_NUM_THREADS": "1"}


def launch(given):
    """Start the ranks on this machine; return their exit status."""
    if given.launcher == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.ranks)]
        command, env = [sys.executable, *torchrun], os.environ
    else:
        launcher = find_launcher()
        command = [*(flag for flag in launcher.command(given.ranks) if flag != "-l"), sys.executable]
        env = launcher.environment(given.ranks)
    return subprocess.run([*command, *SCRIPT, *sys.argv[1:]], env=env | ONE_THREAD).returncode


def launch_on_two_hosts(given):
    """Start half of the ranks on each of two hosts, without a launcher; return the worst exit status."""
    reason = missing()
    if reason:
        print(f"benchmarks.torch_ddp: {reason}", file=sys.stderr)
        return 2
    with joined_hosts(rate=given.link) as hosts, ExitStack() as stack:
        meeting = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": INTERFACE}
        ranks = []
        for rank in range(given.ranks):
            host, local = divmod(rank, given.ranks // 2)
            who = {"RANK": str(rank), "WORLD_SIZE": str(given.ranks), "LOCAL_RANK": str(local)}
            command = hosts.on(host, [sys.executable, *SCRIPT, *sys.argv[1:]])
            ranks.append(stack.enter_context(subprocess.Popen(command, env=os.environ | ONE_THREAD | meeting | who)))
        return max(abs(rank.wait()) for rank in ranks)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launcher", choices=("torchrun", "mpirun"), default="torchrun")
    parser.add_argument("--end-to-end", action="store_true", help="models that compute")
    parser.add_argument("--link", metavar="RATE", help="two hosts, and what the cable between them carries: 1gbit")
    parser.add_argument("--local", action="store_true", help="with --link: windows of local steps")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="keep the tables in benchmarks/results")
    given = parser.parse_args()
    if os.environ.keys() & {"DISTOPT_RUN", "RANK"}:
        work(given)
        return 0
    return launch_on_two_hosts(given) if given.link else launch(given)


if __name__ == "__main__":
    sys.exit(main())
