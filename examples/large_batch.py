"""Train handwritten digits with a batch so large that plain SGD loses accuracy, and with what keeps it.

    distopt run -n 2 examples/large_batch.py [--macrobatch-size 512] [--warmup-strategy sqrt] [--plot large_batch.png]

Each rank takes batches of --batch-size; as many calls as the macrobatch takes make one update: LBSGD and MoXing's
BatchGradients add up in the optimizer, the others in DistOpt, which exchanges once per update.  --lr-step-epochs is
'pow2', for a polynomial of that power, or the epochs at which the rate falls, as '20,25'.
"""

import argparse
import math

import numpy as np
from digits import MODELS, accuracy, backward, digits, forward, loss_and_slope

import distopt
from distopt.optim import LANS, LARS, LBSGD, SGD, AdamW, BatchGradients, LarsWrapper, MultiFactor, Muon, Poly
from distopt.optim.schedules import resnet50_32k


def schedule(given, base_lr, updates_per_epoch, warmup_epochs):
    """--lr-step-epochs, after a warm-up."""
    warmup = {"warmup_steps": int(warmup_epochs * updates_per_epoch)}
    if given.lr_step_epochs.startswith("pow"):
        power = float(given.lr_step_epochs.removeprefix("pow"))
        return Poly(base_lr, given.num_epochs * updates_per_epoch, power, **warmup)
    epochs = [int(e) for e in given.lr_step_epochs.split(",")]
    return MultiFactor(base_lr, [e * updates_per_epoch for e in epochs], given.lr_factor, **warmup)


def small(given, updates_per_epoch, scale):
    return SGD(schedule(given, given.lr, updates_per_epoch, 0), momentum=given.mom, weight_decay=given.wd)


def scaled(given, updates_per_epoch, scale):
    return SGD(schedule(given, given.lr * scale, updates_per_epoch, 0), momentum=given.mom, weight_decay=given.wd)


def lbsgd(given, updates_per_epoch, scale):
    return LBSGD(
        schedule(given, given.lr, updates_per_epoch, 0),
        momentum=given.mom,
        weight_decay=given.wd,
        warmup_strategy=given.warmup_strategy,
        warmup_epochs=given.warmup_epochs,
        batch_scale=scale,
        updates_per_epoch=updates_per_epoch * scale,
        num_epochs=given.num_epochs,
    )


def lars(given, updates_per_epoch, scale):
    rate = schedule(given, given.lars_lr, updates_per_epoch, given.warmup_epochs)
    return LARS(rate, momentum=given.mom, eta=given.lars_eta, weight_decay=given.wd, exclude=[".b"])


def lans(given, updates_per_epoch, scale):
    rate = schedule(given, given.lans_lr, updates_per_epoch, given.warmup_epochs)
    return LANS(rate, weight_decay=given.wd, exclude=[".b"])


def muon(given, updates_per_epoch, scale):
    """Steps of one size in every direction; the last layer and all vectors are AdamW's."""
    rates = [schedule(given, lr, updates_per_epoch, 0) for lr in (given.muon_lr, given.adamw_lr)]
    return Muon(rates[0], weight_decay=given.wd, exclude=["out.w"], otherwise=AdamW(rates[1], weight_decay=given.wd))


def recipe(given, updates_per_epoch, scale):
    """MoXing's for ResNet-50 at 32k samples: batches are added up, LARS, momentum; and its curve, to our scale."""
    curve = 3600 / (given.num_epochs * updates_per_epoch)

    def rate(k):
        return given.lars_lr * resnet50_32k(int(k * curve)) / 29

    names = ("hidden.b", "out.b")
    lars = LarsWrapper(SGD(rate, momentum=given.mom), given.lars_eta, given.wd, exclude=names)
    return BatchGradients(lars, scale)


RUNS = {  # what is shown: the optimizer, and whether its batch is the macrobatch
    "SGD, small batch": (small, False),
    "SGD": (small, True),
    "SGD, lr x batch": (scaled, True),
    "LBSGD, warm-up": (lbsgd, True),
    "LARS, warm-up": (lars, True),
    "LANS, warm-up": (lans, True),
    "Muon": (muon, True),
    "MoXing's recipe": (recipe, True),
}


def train(given, world, make, large, seed):
    """One run: test accuracy after every epoch, updates, and calls that brought gradients."""
    (images, labels), test = digits(world.xp)
    rng = np.random.default_rng(seed)
    layers = MODELS[given.network](rng, world.xp)
    share = min(given.batch_size, len(labels) // world.size)
    calls = len(labels) // (share * world.size)  # in an epoch
    scale = min(calls, math.ceil(given.macrobatch_size / (share * world.size))) if large else 1
    updates = calls // scale
    opt = make(given, updates, scale)
    window = 1 if isinstance(opt, LBSGD | BatchGradients) else scale
    dist = distopt.DistOpt(opt, world, num_batches=window)
    curve = []
    for _ in range(given.num_epochs):
        order = rng.permutation(len(labels))[: updates * scale * share * world.size]
        for mine in map(world.xp.asarray, order.reshape(updates * scale, world.size, share)[:, world.rank]):
            _, slope = loss_and_slope(forward(layers, images[mine]), labels[mine])
            dist(backward(layers, slope))
        curve.append(accuracy(layers, *test))
    return curve, opt.step_counter, scale * share * world.size


def plot(path, curves):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for name, curve in curves.items():
        axes.plot(range(1, len(curve) + 1), curve, label=name)
    axes.set(xlabel="epoch", ylabel="test accuracy", ylim=(0.5, 1.0))
    axes.legend()
    figure.savefig(path)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=MODELS, default="mlp")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and call")
    parser.add_argument("--macrobatch-size", type=int, default=512, help="samples per update, of all ranks")
    parser.add_argument("--num-epochs", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.05, help="of SGD with the small batch")
    parser.add_argument("--lars-lr", type=float, default=0.5)
    parser.add_argument("--lars-eta", type=float, default=0.2)
    parser.add_argument("--lans-lr", type=float, default=0.1)
    parser.add_argument("--muon-lr", type=float, default=0.2)
    parser.add_argument("--adamw-lr", type=float, default=0.03, help="of what Muon leaves to AdamW")
    parser.add_argument("--mom", type=float, default=0.9)
    parser.add_argument("--wd", type=float, default=1e-4)
    parser.add_argument("--lr-step-epochs", default="pow2", help="'pow2', or epochs: '20,25'")
    parser.add_argument("--lr-factor", type=float, default=0.1)
    parser.add_argument("--warmup-strategy", choices=["linear", "power2", "sqrt", "lars"], default="linear")
    parser.add_argument("--warmup-epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--plot", metavar="FILE", help="draw accuracy by epoch (needs distopt[plot])")
    return parser.parse_args()


def main():
    given = arguments()
    world = distopt.world(given.device)
    curves = {}
    if world.rank == 0:
        print(f"{'':18} {'batch':>5} {'updates':>7}  test accuracy, {len(given.seeds)} seeds")
    for name, (make, large) in RUNS.items():
        runs = [train(given, world, make, large, seed) for seed in given.seeds]
        curves[name] = np.mean([curve for curve, _, _ in runs], axis=0)
        if world.rank == 0:
            _, updates, batch = runs[0]
            found = " ".join(f"{curve[-1]:.3f}" for curve, _, _ in runs)
            print(f"{name:18} {batch:5} {updates:7}  {found}", flush=True)
    if given.plot and world.rank == 0:
        plot(given.plot, curves)


if __name__ == "__main__":
    main()
