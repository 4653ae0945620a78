"""Compare Muon with SGD and AdamW on handwritten digits, at equal numbers of updates.

    distopt run -n 2 examples/muon.py [--updates 30 60 120]

Muon has the hidden matrices, AdamW the last layer and all vectors.  Each optimizer is tried with several learning
rates, which fall to 0 on the way; the batch is shared out over the ranks.
"""

import argparse

import numpy as np
from digits import MODELS, accuracy, backward, digits, forward, loss_and_slope

import distopt
from distopt.optim import SGD, AdamW, Muon, Poly


def falling(rate, updates):
    """A learning rate that is 0 in the end."""
    return Poly(rate, updates, pwr=2)


def muon(rate, updates):
    return Muon(falling(rate, updates), exclude=["out.w"], otherwise=AdamW(falling(0.01, updates)))


RULES = {  # an optimizer, and its learning rates
    "SGD": (lambda rate, updates: SGD(falling(rate, updates), momentum=0.9), (0.1, 0.2, 0.4)),
    "AdamW": (lambda rate, updates: AdamW(falling(rate, updates)), (0.003, 0.01, 0.03)),
    "Muon": (muon, (0.05, 0.1, 0.2)),
}


def batches(labels, size, seed):
    """Endless batches of indices, in a new order at every pass."""
    rng = np.random.default_rng([seed, 1])
    while True:
        yield from rng.permutation(len(labels))[: len(labels) // size * size].reshape(-1, size)


def train(given, world, make, updates, seed):
    """Test accuracy after so many updates."""
    (images, labels), test = digits(world.xp)
    layers = MODELS[given.network](np.random.default_rng(seed), world.xp)
    opt = distopt.DistOpt(make(updates), world)
    for _, batch in zip(range(updates), batches(labels, given.batch_size, seed), strict=False):
        mine = world.xp.asarray(batch[world.rank :: world.size])
        _, slope = loss_and_slope(forward(layers, images[mine]), labels[mine])
        opt(backward(layers, slope))
    return accuracy(layers, *test)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=MODELS, default="wide")
    parser.add_argument("--batch-size", type=int, default=64, help="samples of all ranks")
    parser.add_argument("--updates", type=int, nargs="+", default=[30, 60, 120])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    given = parser.parse_args()
    world = distopt.world(given.device)
    if world.rank == 0:
        print(f"{'':14}" + "".join(f"{f'{n} updates':>16}" for n in given.updates))
    for name, (make, rates) in RULES.items():
        for rate in rates:
            runs = [
                [train(given, world, lambda n, m=make, r=rate: m(r, n), updates, seed) for seed in given.seeds]
                for updates in given.updates
            ]
            if world.rank == 0:
                cells = (f"{np.mean(found):.4f} ({np.std(found):.3f})" for found in runs)
                print(f"{name:6} {rate:6g} " + "".join(f"{cell:>16}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
