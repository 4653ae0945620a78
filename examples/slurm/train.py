"""Train a small network on handwritten digits, and go on where the last job stopped.

    sbatch examples/slurm/mpich.sbatch

When Slurm asks the ranks to end, by ``scancel``, before the time limit (``--signal=TERM@120``) or for a job of higher
priority, all of them save after the same step and exit with 143.  The script is the same under MPICH, Open MPI,
torchrun and ``distopt run --elastic``.  The network and the data are those of ../digits.py.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from digits import MODELS, accuracy, backward, digits, forward, loss_and_slope

import distopt


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=64, help="samples per step, shared out over the ranks")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="that all nodes see")
    return parser.parse_args()


def main():
    given = arguments()
    world = distopt.world()
    (images, labels), (test_images, test_labels) = digits(np)
    layers = MODELS["mlp"](np.random.default_rng(1))
    params = [p for layer in layers for p in layer.params]
    opt = distopt.DistOpt(distopt.optim.SGD(0.1, momentum=0.9), world)
    opt.save_when_stopped(given.folder, params)
    opt.load(given.folder, params)
    node = os.environ.get("SLURMD_NODENAME", "this machine")
    print(f"rank {world.rank} of {world.size} on {node} begins at step {opt.step_counter}", flush=True)
    while opt.step_counter < given.steps:
        batch = np.random.default_rng(opt.step_counter).permutation(len(labels))[: given.batch]
        mine = batch[world.rank :: world.size]  # also when a rank was lost
        loss, slope = loss_and_slope(forward(layers, images[mine]), labels[mine])
        opt(backward(layers, slope))
        if world.rank == 0 and opt.step_counter % 100 == 0:
            print(f"step {opt.step_counter}  loss {loss:.4f}", flush=True)
    if world.rank == 0:
        print(f"test accuracy {accuracy(layers, test_images, test_labels):.4f}")


if __name__ == "__main__":
    main()
