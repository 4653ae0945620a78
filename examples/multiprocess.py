"""Train a small network on handwritten digits, one process per GPU, without MPI.

    python examples/multiprocess.py [--ranks 2] [--epochs 10]

The parent makes an id and hands it to its children, which is all that they need to find each other: their votes go over
local sockets, their gradients over NCCL.  The model is that of digits.py.
"""

import argparse
import multiprocessing

import numpy as np
from digits import MODELS, accuracy, backward, digits, forward, loss_and_slope

import distopt
from distopt.comm import nccl_unique_id
from distopt.device import gpu_count, gpu_state


def train(nccl_id, rank, ranks, given):
    """One rank: the same script as under a launcher, but for how the ranks find each other."""
    sgd = distopt.optim.SGD(given.lr, momentum=0.9)
    opt = distopt.DistOpt(sgd, nccl_id=nccl_id, local_rank=rank, world_size=ranks)
    xp = opt.communicator.xp
    (images, labels), (test_images, test_labels) = digits(xp)
    rng = np.random.default_rng(given.seed)
    layers = MODELS["mlp"](rng, xp)

    share = max(1, given.batch // ranks)
    steps = len(labels) // (share * ranks)
    for epoch in range(given.epochs):
        order = rng.permutation(len(labels))[: steps * share * ranks].reshape(steps, ranks, share)
        for mine in map(xp.asarray, order[:, rank]):
            loss, slope = loss_and_slope(forward(layers, images[mine]), labels[mine])
            opt(backward(layers, slope))
        if rank == 0:
            print(f"epoch {epoch + 1}/{given.epochs}  loss {loss:.4f}", flush=True)
    if rank == 0:
        print(f"test accuracy {accuracy(layers, test_images, test_labels):.4f}")
    opt.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="processes, each with a GPU of its own (default: all GPUs)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="samples per step, shared out over the ranks")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if gpu_state() != "ok":
        print(f"nothing to do: {gpu_state()}")
        return 0
    ranks = given.ranks or gpu_count()
    processes = multiprocessing.get_context("spawn")  # a forked child could not use a GPU
    nccl_id = nccl_unique_id()
    children = [processes.Process(target=train, args=(nccl_id, rank, ranks, given)) for rank in range(ranks)]
    for child in children:
        child.start()
    for child in children:  # the parent stays: NCCL's ranks find each other through it
        child.join()
    return int(any(child.exitcode for child in children))


if __name__ == "__main__":
    raise SystemExit(main())
