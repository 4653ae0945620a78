"""Train a PyTorch network on handwritten digits, on any number of ranks, with any compressor.

    torchrun --nproc-per-node 2 examples/torch_digits.py [--mode topk --density 0.001] [--ddp]
    distopt run -n 2 examples/torch_digits.py [--mode int8] [--ddp]

It also starts under mpirun, srun, or alone.  The loop is a plain one, and ``synchronize`` is the line that makes
gradients means over ranks; with --ddp DistributedDataParallel exchanges them, and ``compress`` is that line;
--reference is DistributedDataParallel alone, and --powersgd RANK its PowerSGD hook, to compare with.  The batch is
shared out over the ranks, so that every number of ranks trains alike.  The data are those of digits.py.
"""

import argparse
import socket

import numpy as np
import torch
import torch.distributed as dist
from digits import digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import distopt
import distopt.torch as dt
from distopt.compress import DeepGradientCompression, ErrorFeedback, Half, Int4, Int8, Packed, TopK

MODES = {  # what is sent of the gradients; the argument is the fraction that top-K and DGC send
    "dense": lambda density: None,
    "half": lambda density: Half(),
    "int8": lambda density: ErrorFeedback(Int8()),
    "int4": lambda density: ErrorFeedback(Int4()),
    "topk": lambda density: ErrorFeedback(Packed(TopK(density))),
    "dgc": lambda density: DeepGradientCompression(Packed(TopK(density)), momentum=0.9),
}


def network():
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10)),
    )


def join_process_group(world):
    """Make the process group that DistributedDataParallel needs; ranks of torchrun have it already."""
    if not dist.is_initialized():
        host = socket.gethostname()
        first = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if world.rank == 0 else None
        host, port = world.broadcast_object(first and [host, first.port])
        dist.init_process_group(store=first or dist.TCPStore(host, port), rank=world.rank, world_size=world.size)


def accuracy(model, images, labels):
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def train(given, world):
    """Yield the training loss, the mean of all ranks, and the test accuracy of every epoch."""
    training, test = (TensorDataset(*map(torch.from_numpy, arrays)) for arrays in digits(np))
    sampler = DistributedSampler(training, world.size, world.rank, seed=given.seed, drop_last=True)
    batches = DataLoader(training, max(1, given.batch // world.size), sampler=sampler, drop_last=True)

    torch.manual_seed(given.seed)
    model = network()
    momentum = 0.0 if given.mode == "dgc" else 0.9  # DGC has it in the compressor
    optimizer = torch.optim.SGD(model.parameters(), given.lr, momentum, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.epochs)

    compressor = MODES[given.mode](given.density)
    if given.ddp or given.reference or given.powersgd:
        join_process_group(world)
        model = DistributedDataParallel(model)
    if given.powersgd:  # torch's default is to wait for 1,000 steps, more than there are
        state = powerSGD_hook.PowerSGDState(None, given.powersgd, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif given.ddp:
        dt.compress(model, compressor, optimizer=optimizer, group=world)
    elif not given.reference:
        dt.synchronize(model, compressor, optimizer=optimizer, group=world)

    for epoch in range(given.epochs):
        sampler.set_epoch(epoch)
        total = np.zeros(1)
        for images, labels in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()  # and p.grad is the mean of all ranks
            optimizer.step()
            total += loss.item()
        schedule.step()
        world.all_reduce(total)
        yield float(total[0]) / len(batches) / world.size, accuracy(model, *test.tensors)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=MODES, default="dense")
    parser.add_argument("--density", type=float, default=0.01, help="fraction of the gradients that topk and dgc send")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--ddp", action="store_true", help="exchange gradients by DistributedDataParallel and compress")
    how.add_argument("--reference", action="store_true", help="train by DistributedDataParallel without distopt")
    how.add_argument("--powersgd", type=int, metavar="RANK", help="the same with its PowerSGD hook of this rank")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="samples per step, shared out over the ranks")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main():
    given = arguments()
    world = distopt.comm.Metered(distopt.world())
    for epoch, (loss, correct) in enumerate(train(given, world), 1):
        if world.rank == 0:
            print(f"epoch {epoch}/{given.epochs}  loss {loss:.4f}  test accuracy {correct:.4f}", flush=True)
    if world.rank == 0 and not (given.reference or given.powersgd):
        print(f"sent per rank: {world.ledger.total_of_steps()['sent'] / 1e6:.3f} MB ({world.size} ranks, {given.mode})")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
