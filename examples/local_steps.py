"""Train on handwritten digits with local steps: accuracy against bytes at H = 1, 10 and 50.

    python examples/local_steps.py [--every 1 10 50] [--plot local_steps.png]
    distopt run -n 4 examples/local_steps.py

Each rank makes H steps with its own batches; then the ranks average how far they have come (DiLoCo).  H = 1 is one
exchange a step, as in data-parallel training.  One process alone runs ``--ranks`` of them as threads.  The network and
the data are those of digits.py.
"""

import argparse

import numpy as np
from digits import MODELS, TRAINING, accuracy, backward, digits, forward, loss_and_slope

import distopt
from distopt.comm import Metered
from distopt.optim import SGD, Cosine

BATCH = 128  # samples of all ranks in a step
STEPS = TRAINING // BATCH  # of an epoch
RATE, MOMENTUM, DECAY = 0.05, 0.9, 1e-4


def train(world, every, epochs, seed):
    """[(bytes that a rank has sent, test accuracy)] after each epoch."""
    (images, labels), test = digits(np)
    layers = MODELS["wide"](np.random.default_rng(seed))
    rng, world = np.random.default_rng([seed, 1]), Metered(world)
    inner = SGD(Cosine(RATE, epochs * STEPS), momentum=MOMENTUM, weight_decay=DECAY)
    opt = distopt.LocalSteps(inner, world, every=every, outer=SGD(1.0))  # with few windows, the mean of parameters

    points = []
    for _ in range(epochs):
        order = rng.permutation(TRAINING)[: STEPS * BATCH].reshape(STEPS, world.size, -1)
        for mine in order[:, world.rank]:
            _, slope = loss_and_slope(forward(layers, images[mine]), labels[mine])
            opt(backward(layers, slope))
        points.append((world.ledger.total_of_steps()["sent"], accuracy(layers, *test)))
    opt.join()  # the last window may be open: all ranks have the same parameters after this
    points[-1] = world.ledger.total_of_steps()["sent"], accuracy(layers, *test)
    return points


def plot(path, found):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.5), layout="constrained")
    for every, points in found.items():
        axes.plot(*zip(*points, strict=True), marker=".", label=f"H = {every}")
    axes.set(xscale="log", xlabel="bytes sent by a rank", ylabel="test accuracy", ylim=(0.8, 1.0))
    axes.legend()
    figure.savefig(path)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, nargs="+", default=[1, 10, 50], metavar="H", help="steps of a window")
    parser.add_argument("--ranks", type=int, default=4, help="threads, without a launcher")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", metavar="FILE", help="draw it (needs distopt[plot])")
    return parser.parse_args()


def main():
    given, world, found = arguments(), distopt.world(), {}

    def run(every):
        def of_rank(comm):
            return train(comm, every, given.epochs, given.seed)

        return of_rank(world) if world.size > 1 else distopt.run_ranks(given.ranks, of_rank)[0]

    if world.rank == 0:
        print(f"{'H':>4} {'test accuracy':>14} {'sent by a rank':>15} {'bytes per step':>15}", flush=True)
    for every in given.every:
        found[every] = points = run(every)
        sent, good = points[-1]
        if world.rank == 0:
            per_step = sent / (given.epochs * STEPS)
            print(f"{every:>4} {good:>14.4f} {sent / 1e6:>12.1f} MB {per_step / 1e3:>12.1f} kB", flush=True)
    if given.plot and world.rank == 0:
        plot(given.plot, found)


if __name__ == "__main__":
    main()
