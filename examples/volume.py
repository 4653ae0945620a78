"""What would it cost?  Accuracy against bytes sent, in eleven modes at 2, 8 and 32 ranks, all of them in one process.

    python examples/volume.py [--modes dense topk-0.001] [--ranks 2 8 32] [--seeds 3] [--out runs] [--plot volume.png]

Ranks are virtual: one after the other computes and compresses its share of the batch, and a ledger counts what rank 0
would send to the others, byte for byte.  The network is the wide one of digits.py.  A record of each run goes to --out,
where ``distopt compare`` finds it.  All of it takes a quarter of an hour on two cores, most of it 32 ranks;
``--ranks 2`` takes less than a minute.
"""

import argparse
import contextlib
import functools
import os
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from dgc import SPARSITIES, positive, sparsities
from digits import MODELS, TRAINING, accuracy, backward, digits, forward, loss_and_slope
from threadpoolctl import threadpool_limits

import distopt
from distopt import compress, formatting
from distopt.compress import DeepGradientCompression, ErrorFeedback, Packed, TopK
from distopt.lab.commands import plotting
from distopt.lab.experiment import Experiment
from distopt.optim import SGD, Cosine

BATCH = 128  # samples of a step, shared out over the ranks, so that every number of ranks trains alike
STEPS = TRAINING // BATCH  # of an epoch
RATE, MOMENTUM, DECAY = 0.05, 0.9, 1e-4  # as in dgc.py; the rate rises for a tenth of the steps, and falls as a cosine
SLOWER = {"1bit": 0.3}  # times the rate: signs are larger than most gradients
GOOD = 0.95


def dgc(selector, steps, **options):
    """Momentum and decay are the compressor's; MoXing warms up for 5 of 90 epochs, so this for an 18th of all steps."""
    warmup, each = sparsities(SPARSITIES), max(1, steps // 90)
    settings = {"momentum": MOMENTUM, "weight_decay": DECAY, "warmup": warmup, "steps_per_epoch": each}
    return DeepGradientCompression(selector, **settings, **options)


MODES = {  # by the steps of the training
    "dense": lambda steps: compress.Dense(),
    "half": lambda steps: compress.Half(),
    "int8": lambda steps: ErrorFeedback(compress.Int8()),
    "2bit": lambda steps: ErrorFeedback(compress.TwoBit(0.05)),
    "1bit": lambda steps: ErrorFeedback(compress.OneBit()),
    "threshold": lambda steps: ErrorFeedback(compress.Threshold(0.05)),
    "topk-0.01": lambda steps: ErrorFeedback(TopK(0.01)),
    "topk-0.001": lambda steps: ErrorFeedback(TopK(0.001)),
    "dgc-0.001": lambda steps: dgc(TopK(0.001), steps),
    "topk-0.01-2bit": lambda steps: ErrorFeedback(Packed(TopK(0.01), value="2bit")),
    "dgc-packed": lambda steps: dgc(Packed(TopK(0.001)), steps, exclude_1d=False),
}


class Run(NamedTuple):
    """What is trained."""

    mode: str
    ranks: int
    seed: int
    epochs: int

    @property
    def steps(self):
        return self.epochs * STEPS


class Epoch(NamedTuple):
    """What is known after it; bytes are those of rank 0's steps so far."""

    step: int
    accuracy: float
    loss: float
    payload: int
    wire: int


def network(run):
    return MODELS["wide"](np.random.default_rng(run.seed))


def optimizer(run):
    settings = {} if run.mode.startswith("dgc") else {"momentum": MOMENTUM, "weight_decay": DECAY}
    return SGD(Cosine(RATE * SLOWER.get(run.mode, 1), run.steps, warmup_steps=run.steps // 10), **settings)


def gradients(layers, images, labels, losses):
    """The pairs of one rank; its loss is added to the list."""
    loss, slope = loss_and_slope(forward(layers, images), labels)
    losses.append(loss)
    return backward(layers, slope)


def train(run, layers, step, ledger, common=dict):
    """Yield every epoch; ``step(losses)`` is that of all ranks at once, or of one among others.

    ``common()`` are the parameters that all ranks have alike, by name, where those of the layers are one rank's own.
    """
    (images, labels), test = digits(np)
    rng, losses = np.random.default_rng([run.seed, 1]), []
    for epoch in range(1, run.epochs + 1):
        losses.clear()
        order = rng.permutation(TRAINING)[: STEPS * BATCH]
        for mine in order.reshape(STEPS, run.ranks, BATCH // run.ranks):
            step(lambda rank, mine=mine: gradients(layers, images[mine[rank]], labels[mine[rank]], losses))
        sent = ledger.total_of_steps()
        with holding(layers, common()):
            tested = accuracy(layers, *test)
        yield Epoch(epoch * STEPS, tested, statistics.fmean(losses), sent["payload"], sent["sent"])


@contextlib.contextmanager
def holding(layers, values):
    """Layers with other values of the parameters that are named."""
    own = {p: p.data for layer in layers for p in layer.params if p.name in values}
    for p in own:
        p.data = values[p.name]
    try:
        yield
    finally:
        for p, data in own.items():
            p.data = data


def record(run, folder):
    """All epochs of a training, and a record of it."""
    layers, sim = network(run), distopt.simulate(run.ranks, optimizer(run))
    step = functools.partial(sim.step, compressor=MODES[run.mode](run.steps))
    path, points = folder / f"{run.mode}-{run.ranks}-ranks-seed-{run.seed}.json", []
    with Experiment(path, run.mode, run.seed, ranks=run.ranks, batch=BATCH, epochs=run.epochs) as experiment:
        for epoch in train(run, layers, step, sim.ledger):
            points.append(epoch)
            numbers = epoch._asdict()
            experiment(numbers.pop("step"), numbers)
        experiment.finish(sim.report(), accuracy=epoch.accuracy)
    return points


def reached(epochs):
    """The first epoch of good accuracy, None without one."""
    return next((epoch for epoch in epochs if epoch.accuracy >= GOOD), None)


def table(ranks, runs):
    """Lines; ``runs`` are by mode those of all seeds, and bytes are means over them."""
    elements = sum(p.data.size for layer in MODELS["wide"](np.random.default_rng(0)) for p in layer.params)
    dense = distopt.cost.all_reduce(4 * elements, ranks)
    aim = [f"steps to {GOOD}", f"wire to {GOOD}"]
    rows = [(f"{ranks} ranks", "test accuracy", "payload/step", "wire/step", "dense sends", *aim)]
    for mode, seeds in runs.items():
        payload, wire = (statistics.fmean(getattr(e[-1], n) / e[-1].step for e in seeds) for n in ("payload", "wire"))
        good = [reached(epochs) for epochs in seeds]
        accuracies = " ".join(f"{epochs[-1].accuracy:.3f}" for epochs in seeds)
        steps = " ".join(str(epoch.step) if epoch else formatting.NONE for epoch in good)
        until = formatting.nbytes(statistics.fmean(epoch.wire for epoch in good)) if all(good) else formatting.NONE
        rows.append(
            (
                mode,
                accuracies,
                formatting.nbytes(payload),
                formatting.nbytes(wire),
                f"{dense / wire:.3g} x",
                steps,
                until,
            )
        )
    return formatting.table(rows)


@plotting.styled()
def plot(path, found):
    """Means over seeds, epoch by epoch, with a panel for each number of ranks."""
    from matplotlib.figure import Figure

    figure = Figure((10, 4.2))
    panels = figure.subplots(1, len(found), sharex=True, sharey=True, squeeze=False)[0]
    shown = [epoch.wire for runs in found.values() for seeds in runs.values() for epochs in seeds for epoch in epochs]
    for axes, (ranks, runs) in zip(panels, found.items(), strict=True):
        plotting.log_axis(axes, "x", shown, formatting.nbytes)
        axes.set(title=f"{ranks} ranks", xlabel="bytes sent by a rank (log)", ylim=(0.8, 1.0))
        for k, (mode, seeds) in enumerate(runs.items()):
            line = [(mean(epochs, "wire"), mean(epochs, "accuracy")) for epochs in zip(*seeds, strict=True)]
            axes.plot(*zip(*line, strict=True), label=mode, **plotting.look(k))
    panels[0].set_ylabel("test accuracy")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path)


def mean(epochs, name):
    return statistics.fmean(getattr(epoch, name) for epoch in epochs)


def show_progress(done, total, run):
    """A bar on a terminal, for each number of ranks."""
    if sys.stderr.isatty() or os.environ.get("DISTOPT_TTY"):
        bar = "#" * (30 * done // total)
        line = f"\r[{bar:30}] {done}/{total}  {run.mode}, {run.ranks} ranks, seed {run.seed}"
        print(f"{line:79}", end="\n" * (done == total), file=sys.stderr, flush=True)


def some_ranks(argument):
    ranks = positive(argument)
    if ranks < 2 or BATCH % ranks:
        raise argparse.ArgumentTypeError(f"must share out {BATCH} samples, so be 2, 4, 8 ... {BATCH}, got {ranks}")
    return ranks


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--ranks", nargs="+", type=some_ranks, default=[2, 8, 32], metavar="P", help="default: 2 8 32")
    parser.add_argument("--seeds", type=positive, default=3, help="trainings of each, with seeds 1, 2, ...")
    parser.add_argument("--epochs", type=positive, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="FOLDER", help="of the records")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw accuracy by bytes (needs distopt[plot])")
    args = parser.parse_args()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        if args.plot:
            plotting.check_picture(args.plot)
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(str(error))
    return args


def main():
    args = arguments()
    curves = {}
    for ranks in args.ranks:
        runs = [Run(mode, ranks, seed, args.epochs) for mode in args.modes for seed in range(1, args.seeds + 1)]
        curves[ranks] = {mode: [] for mode in args.modes}
        for done, run in enumerate(runs, 1):
            curves[ranks][run.mode].append(record(run, args.out))
            show_progress(done, len(runs), run)
        print("\n".join(table(ranks, curves[ranks])), flush=True)
    if args.plot:
        plot(args.plot, curves)


if __name__ == "__main__":
    with threadpool_limits(1):  # the matrices are small, and sums do not depend on the machine's cores
        main()
