"""Train a small network on handwritten digits, on any number of ranks.

    distopt run -n 2 examples/digits.py [--model cnn] [--mode topk] [--plot digits.png]

The backward pass is written by hand; it yields (parameter, gradient) pairs from the last layer to the first, which is
all that distopt asks of a framework.  The batch is shared out over the ranks, so that every number of ranks trains
alike.

``digits.npz`` is the test set of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
Learning Repository, 1998 (https://doi.org/10.24432/C50P49, CC BY 4.0): 1797 images of 8 x 8 pixels from 0 to 16.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np

import distopt
from distopt.compress import ErrorFeedback, Int4, Int8, OneBit, TwoBit


class Dense:
    """y = x w + b for x (batch, inputs); ``xp`` is numpy, or cupy for parameters on a GPU."""

    def __init__(self, name, inputs, outputs, rng, xp):
        w = (np.sqrt(2 / inputs) * rng.standard_normal((inputs, outputs))).astype(np.float32)
        self.w = distopt.Parameter(f"{name}.w", xp.asarray(w))
        self.b = distopt.Parameter(f"{name}.b", xp.zeros(outputs, np.float32))
        self.params = [self.w, self.b]

    def forward(self, x):
        self.x, self.shape = x.reshape(len(x), -1), x.shape
        return self.x @ self.w.data + self.b.data

    def backward(self, dy):
        pairs = [(self.b, dy.sum(0)), (self.w, self.x.T @ dy)]
        return (dy @ self.w.data.T).reshape(self.shape), pairs


class Conv:
    """3 x 3 convolution with zero padding for x (batch, channels, height, width), as one matrix product."""

    def __init__(self, name, channels, filters, rng, xp):
        self.product, self.xp = Dense(name, 9 * channels, filters, rng, xp), xp
        self.params = self.product.params

    def forward(self, x):
        self.shape = batch, channels, height, width = x.shape
        padded = self.xp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = self.xp.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        columns = windows.transpose(0, 2, 3, 1, 4, 5).reshape(batch * height * width, 9 * channels)
        return self.product.forward(columns).reshape(batch, height, width, -1).transpose(0, 3, 1, 2)

    def backward(self, dy):
        batch, channels, height, width = self.shape
        dcolumns, pairs = self.product.backward(dy.transpose(0, 2, 3, 1).reshape(batch * height * width, -1))
        dwindows = dcolumns.reshape(batch, height, width, channels, 3, 3).transpose(4, 5, 0, 3, 1, 2)
        padded = self.xp.zeros((batch, channels, height + 2, width + 2), np.float32)
        for i in range(3):
            for j in range(3):
                padded[:, :, i : i + height, j : j + width] += dwindows[i, j]
        return padded[:, :, 1:-1, 1:-1], pairs


class Relu:
    params = ()

    def forward(self, x):
        self.on = x > 0
        return x * self.on

    def backward(self, dy):
        return dy * self.on, []


class MaxPool:
    """The largest of every 2 x 2 square."""

    params = ()

    def forward(self, x):
        batch, channels, height, width = x.shape
        self.squares = x.reshape(batch, channels, height // 2, 2, width // 2, 2)
        self.largest = self.squares.max((3, 5), keepdims=True)
        return self.largest.reshape(batch, channels, height // 2, width // 2)

    def backward(self, dy):
        taken = self.squares == self.largest
        dx = dy[:, :, :, None, :, None] * taken / taken.sum((3, 5), keepdims=True)
        batch, channels, height, _, width, _ = dx.shape
        return dx.reshape(batch, channels, 2 * height, 2 * width).astype(np.float32), []


TRAINING = 1437  # images; 360 are left to test
MODELS = {
    "mlp": lambda rng, xp=np: [Dense("hidden", 64, 128, rng, xp), Relu(), Dense("out", 128, 10, rng, xp)],
    "wide": lambda rng, xp=np: [
        *(Dense("hidden1", 64, 512, rng, xp), Relu()),
        *(Dense("hidden2", 512, 512, rng, xp), Relu()),
        Dense("out", 512, 10, rng, xp),
    ],
    "cnn": lambda rng, xp=np: [
        *(Conv("conv1", 1, 16, rng, xp), Relu(), MaxPool()),
        *(Conv("conv2", 16, 32, rng, xp), Relu(), MaxPool()),
        Dense("out", 128, 10, rng, xp),
    ],
}


MODES = {
    "dense": lambda opt, loss: opt.backward_and_update(loss),
    "half": lambda opt, loss: opt.backward_and_update_half(loss),
    "partial": lambda opt, loss: opt.backward_and_partial_update(loss, threshold=0),
    "topk": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=0.02, topK=True),
    "threshold": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=0.02),
    "int8": lambda opt, loss: opt.step(loss, ErrorFeedback(Int8())),
    "int4": lambda opt, loss: opt.step(loss, ErrorFeedback(Int4())),
    "2bit": lambda opt, loss: opt.step(loss, ErrorFeedback(TwoBit(0.1))),
    "1bit": lambda opt, loss: opt.step(loss, ErrorFeedback(OneBit())),
}


def forward(layers, x):
    for layer in layers:
        x = layer.forward(x)
    return x


def loss_and_slope(scores, labels):
    """Mean cross-entropy of a batch, and its derivative by the scores."""
    scores = scores - scores.max(1, keepdims=True)
    exponentials = np.exp(scores)
    p = exponentials / exponentials.sum(1, keepdims=True)
    rows = np.arange(len(labels), like=labels)
    loss = -np.log(p[rows, labels]).mean()
    p[rows, labels] -= 1
    return float(loss), p / np.float32(len(labels))


def backward(layers, slope):
    """(parameter, gradient) pairs, from the last layer to the first."""
    for layer in reversed(layers):
        slope, pairs = layer.backward(slope)
        yield from pairs


def digits(xp):
    """Images to train on and to test, (n, 1, 8, 8), and their labels."""
    with np.load(Path(__file__).with_name("digits.npz")) as data:
        images, labels = data["images"], data["labels"].astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = xp.asarray((images[order] / 16).astype(np.float32)[:, None]), xp.asarray(labels[order])
    return (images[:TRAINING], labels[:TRAINING]), (images[TRAINING:], labels[TRAINING:])


def accuracy(layers, images, labels):
    return float((forward(layers, images).argmax(1) == labels).mean())


def average(opt, params):
    """Replace parameters by their mean over ranks."""
    values = [p.data for p in params]
    opt.fused_all_reduce(values)
    for value in values:
        value /= opt.world_size


def show_progress(done, total, loss):
    """A bar on a terminal, a line now and then elsewhere."""
    if sys.stderr.isatty() or os.environ.get("DISTOPT_TTY"):
        bar = "#" * (30 * done // total)
        print(
            f"\r[{bar:30}] epoch {done}/{total}  loss {loss:.4f} ",
            end="\n" * (done == total),
            file=sys.stderr,
            flush=True,
        )
    elif done % 10 == 0 or done == total:
        print(f"epoch {done}/{total}  loss {loss:.4f}")


def plot(path, losses, bytes_sent):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.semilogy(losses)
    left.set(xlabel="epoch", ylabel="training loss")
    right.plot(np.array(bytes_sent) / 1e6)
    right.set(xlabel="epoch", ylabel="MB sent per rank, so far")
    figure.savefig(path)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--mode", choices=MODES, default="dense")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64, help="samples per step, shared out over the ranks")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--plot", metavar="FILE", help="draw loss and bytes (needs distopt[plot])")
    return parser.parse_args()


def main():
    given = arguments()
    world = distopt.comm.Metered(distopt.world(given.device))
    xp = world.xp
    (images, labels), (test_images, test_labels) = digits(xp)
    rng = np.random.default_rng(given.seed)
    layers = MODELS[given.model](rng, xp)
    opt = distopt.DistOpt(distopt.optim.SGD(given.lr, momentum=0.9, weight_decay=1e-4), world)

    share = max(1, given.batch // world.size)
    steps = len(labels) // (share * world.size)
    losses, bytes_sent, good_after = [], [], 0
    for epoch in range(given.epochs):
        order = rng.permutation(len(labels))[: steps * share * world.size].reshape(steps, world.size, share)
        total = xp.zeros(1)
        for mine in map(xp.asarray, order[:, world.rank]):
            loss, slope = loss_and_slope(forward(layers, images[mine]), labels[mine])
            MODES[given.mode](opt, backward(layers, slope))
            total += loss
        traffic = world.ledger.total_of_steps()
        wire, payload = traffic["sent"], traffic["payload"]
        opt.all_reduce(total)
        opt.wait()
        losses.append(float(total[0]) / steps / world.size)
        bytes_sent.append(wire)
        if accuracy(layers, test_images, test_labels) >= 0.95:
            good_after = good_after or opt.step_counter
        if world.rank == 0:
            show_progress(epoch + 1, given.epochs, losses[-1])

    if given.mode == "partial":  # between its turns a parameter differs on each rank
        average(opt, [p for layer in layers for p in layer.params])
    if world.rank == 0:
        print(f"test accuracy {accuracy(layers, test_images, test_labels):.4f}")
        print(f"steps to 0.95: {good_after or 'not reached'} (looked at once an epoch)")
        print(f"payload per rank and step: {payload / opt.step_counter:,.0f} bytes")
        print(f"sent per rank and step: {wire / opt.step_counter:,.0f} bytes ({world.size} ranks, {given.mode})")
        if given.plot:
            plot(given.plot, losses, bytes_sent)


if __name__ == "__main__":
    main()
