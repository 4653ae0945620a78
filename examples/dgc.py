"""Train handwritten digits by Deep Gradient Compression, with the options that MoXing has for it.

    distopt run -n 2 examples/dgc.py [--use_fp16=True] [--plot dgc.png]
    distopt run -n 2 examples/dgc.py --variable_update=distributed_replicated --momentum=0.9

The second one is what it is compared with: momentum SGD at the same rates, with all gradients.  Options have MoXing's
names, and the values of its published run for ResNet-50, but for the model and the learning rates.  Each rank takes
batches of --batch_size.
"""

import argparse
import math
from typing import NamedTuple

import numpy as np
from digits import MODELS, TRAINING, accuracy, backward, digits, forward, loss_and_slope

import distopt
from distopt.compress import DeepGradientCompression, Dense, Half, Packed, TopK
from distopt.optim import SGD, from_strategy

RATES = "5:0.0005->0.05,30:0.05,60:0.005,80:0.0005,90:0.00005"  # at an eighth of ResNet-50's, which is normalized
SPARSITIES = "0.75,0.9375,0.984375,0.996,0.999"


class Epoch(NamedTuple):
    """What is known after an epoch; bytes are those that one rank has sent in it."""

    accuracy: float
    payload: int
    wire: int


def steps_of(samples, batch, ranks):
    """Steps of an epoch, whose last batch is filled up."""
    return math.ceil(samples / (batch * ranks))


def train(opt, compressor, layers, rng, batch, epochs):
    """Yield every epoch; ``batch`` is a rank's."""
    world = opt.communicator
    (images, labels), test = digits(world.xp)
    steps = steps_of(len(labels), batch, world.size)
    for _ in range(epochs):
        world.reset()
        order = np.resize(rng.permutation(len(labels)), (steps, world.size, batch))
        for mine in map(world.xp.asarray, order[:, world.rank]):
            _, slope = loss_and_slope(forward(layers, images[mine]), labels[mine])
            opt.step(backward(layers, slope), compressor)
        traffic = world.ledger.total_of_steps()
        yield Epoch(accuracy(layers, *test), traffic["payload"], traffic["sent"])


def deep_gradient_compression(given, ranks):
    """The compressor has momentum and weight decay: an optimizer's would act on what is late."""
    selector = TopK(1 - given.dgc_sparsity_strategy[-1])
    return DeepGradientCompression(
        Packed(selector, value="float16") if given.use_fp16 else selector,
        momentum=given.dgc_momentum,
        nesterov=given.dgc_momentum_type == "nesterov",
        factor_masking=given.dgc_momentum_factor_masking,
        weight_decay=given.weight_decay,
        warmup=given.dgc_sparsity_strategy,
        steps_per_epoch=steps_of(given.dgc_total_samples, given.batch_size, ranks),
    )


def describe(arrays, compressor):
    """The model, and what of it is sent after the warm-up."""
    total, weights = sum(a.size for a in arrays), np.array([a.size for a in arrays if a.ndim > 1])
    text = f"{total:,} parameters"
    if isinstance(compressor, DeepGradientCompression):
        sent = compressor.selector.counts(weights).sum()
        text += f", of which are sent in the end {sent:,} of {weights.sum():,} weights, and the others, biases, all"
    return text


def line(number, sparsity, epoch, dense, ranks):
    """Bytes, and how many times as many dense ones would be."""
    columns = [f"{number:5}  {f'{100 * sparsity:g} %':>9}  {epoch.accuracy:13.4f}"]
    for sent, all_of_it in ((epoch.payload, dense), (epoch.wire, distopt.cost.all_reduce(dense, ranks))):
        columns.append(f"{sent:12,} {f'1/{all_of_it / sent:.1f}' if sent else '-':>8}")
    return "  ".join(columns)


def plot(path, epochs):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    numbers = range(1, len(epochs) + 1)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.plot(numbers, [e.accuracy for e in epochs])
    left.set(xlabel="epoch", ylabel="test accuracy", ylim=(0.5, 1.0))
    right.semilogy(numbers, [e.payload for e in epochs], label="payload")
    right.semilogy(numbers, [max(e.wire, 1) for e in epochs], "--", label="wire")
    right.set(xlabel="epoch", ylabel="bytes per rank and epoch")
    right.legend()
    figure.savefig(path)


def boolean(text):
    """MoXing's flags are written --name=True."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be True or False, got {text!r}")
    return text.lower() == "true"


def synchronous(text):
    if not boolean(text):
        raise argparse.ArgumentTypeError("must be True, got False: distopt is synchronous, every step is all ranks'")
    return True


def sparsities(text):
    try:
        found = [float(number) for number in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(0 <= sparsity < 1 for sparsity in found):
        raise argparse.ArgumentTypeError(f"must be numbers in [0, 1), as in {SPARSITIES}, got {text!r}")
    return found


def positive(text):
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, got {text!r}")
    return int(text)


def arguments():
    description = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(usage="dgc.py [--OPTION=VALUE ...]", description=description, allow_abbrev=False)
    parser.add_argument("--model_name", choices=MODELS, default="wide")
    parser.add_argument("--batch_size", type=positive, default=64, help="samples per rank and step")
    parser.add_argument("--max_epochs", type=positive, default=90)
    parser.add_argument("--learning_rate_strategy", default=RATES, help="EPOCH:RATE,...; the first may be a warm-up")
    parser.add_argument("--lr_warmup_strategy", choices=["linear", "exponential"], default="exponential")
    parser.add_argument("--weight_decay", type=float, default=1e-4)
    parser.add_argument("--momentum", type=float, default=0.0, help="the optimizer's: 0 with DGC, which has its own")
    parser.add_argument(
        "--variable_update",
        choices=["distributed_replicated_dgc", "distributed_replicated"],
        default="distributed_replicated_dgc",
    )
    parser.add_argument("--sync_replicas", type=synchronous, default=True, metavar="True")
    parser.add_argument("--use_fp16", type=boolean, default=False, metavar="BOOL", help="16 bits a value on the wire")
    parser.add_argument("--dgc_sparsity_strategy", type=sparsities, default=SPARSITIES, help="one per epoch")
    parser.add_argument("--dgc_momentum_type", choices=["vanilla", "nesterov"], default="vanilla")
    parser.add_argument("--dgc_momentum", type=float, default=0.9)
    parser.add_argument("--dgc_momentum_factor_masking", type=boolean, default=True, metavar="BOOL")
    parser.add_argument("--dgc_total_samples", type=positive, default=TRAINING, help="samples of an epoch of sparsity")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--plot", metavar="FILE", help="draw accuracy and bytes by epoch (needs distopt[plot])")
    return parser.parse_args()


def main():
    given = arguments()
    world = distopt.comm.Metered(distopt.world(given.device))
    rng = np.random.default_rng(given.seed)
    layers = MODELS[given.model_name](rng, world.xp)
    steps = steps_of(TRAINING, given.batch_size, world.size)
    rate = from_strategy(given.learning_rate_strategy, steps, given.lr_warmup_strategy)
    if given.variable_update == "distributed_replicated_dgc":
        compressor = deep_gradient_compression(given, world.size)
        sparsity, sgd = compressor.sparsity, SGD(rate, given.momentum)
    else:
        compressor = Half() if given.use_fp16 else Dense()
        sparsity, sgd = (lambda k: 0.0), SGD(rate, given.momentum, weight_decay=given.weight_decay)
    opt = distopt.DistOpt(sgd, world)

    arrays = [p.data for layer in layers for p in layer.params]
    dense = steps * sum(a.nbytes for a in arrays)
    if world.rank == 0:
        print(describe(arrays, compressor))
        print("epoch   sparsity  test accuracy  payload, of dense      on the wire, of dense")
    epochs, said = [], None
    for epoch in train(opt, compressor, layers, rng, given.batch_size, given.max_epochs):
        epochs.append(epoch)
        last = sparsity(opt.step_counter - 1)
        if world.rank == 0 and (last != said or len(epochs) in (given.max_epochs, *range(0, given.max_epochs, 10))):
            print(line(len(epochs), last, epoch, dense, world.size), flush=True)
            said = last
    if world.rank == 0:
        print(f"test accuracy {epochs[-1].accuracy:.4f}")
        if given.plot:
            plot(given.plot, epochs)


if __name__ == "__main__":
    main()
