"""What each way of compressing sends, loses and costs: python -m benchmarks.compression [--save]

Ranks are threads: bytes, as ``Metered`` counts them, and accuracies are those of any ranks, but times would not be.
Bytes are a rank's, and the tables say how many times as many dense ones would be: of the *payload*, what is handed to
the collectives, and on the *wire*, by the first rank, at so many ranks.

* The digits are the network, rates and training of examples/dgc.py; DGC warms up, but not where bytes are counted: in
  6 steps, in which the ranks share out the images.  Accuracies, and the steps to 0.95, are at 2 ranks with one thread
  of BLAS, on which they depend.  An image is 0.28 points: how far DGC is from dense takes more seeds to tell.
* ResNet-50's gradients are random numbers, in 2 steps.  At 8 and 32 ranks every first dimension and the buckets are a
  sixteenth, so that all ranks have room: there a bucket's header weighs 16 times as much.  Payloads are exchanged in
  two phases as those of the whole model are; a sixteenth of them would be gathered with 8 ranks.
* A pass is ``compress`` of 25 million elements, momentum and decay of DGC included, over one read of as many.
"""

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

import distopt
from benchmarks import measure
from benchmarks.floor import read_pass
from benchmarks.select import Steps, filled
from distopt import compress
from distopt.comm import Metered, run_ranks
from distopt.compress import Chunks, DeepGradientCompression, ErrorFeedback, Packed, TopK
from distopt.device import DeviceMirror, zeros
from distopt.kernels.layout import BucketLayout
from distopt.lab import cost
from distopt.lab.models import resnet50
from distopt.optim import SGD, from_strategy

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from dgc import RATES, SPARSITIES, sparsities, steps_of, train
from digits import MODELS, TRAINING

DENSITY, MOMENTUM, DECAY = 0.001, 0.9, 1e-4
EPOCHS, BATCH, SEEDS, MANY = 90, 64, (1, 2, 3), range(1, 13)
SIZES = (2, 8, 32)
SIXTEENTH = 16
BELOW, SMALLER = 0.003, 1000  # budgets: of accuracy, and of the payload of compressed tensors alone


def always(compressor):
    """The same in every step."""
    return lambda steps_per_epoch=None: compressor


def dgc(selector, **options):
    """As examples/dgc.py has it; without steps per epoch it does not warm up."""

    def make(steps_per_epoch=None):
        warmup = sparsities(SPARSITIES) if steps_per_epoch else None
        settings = {"momentum": MOMENTUM, "weight_decay": DECAY, "warmup": warmup, "steps_per_epoch": steps_per_epoch}
        return DeepGradientCompression(selector, **settings, **options)

    return make


PACKED, ALL = "DGC 0.1 %, packed float16", "DGC 0.1 %, packed, 1-D too"
MODES = {
    "dense": always(compress.Dense()),
    "half": always(compress.Half()),
    "int8": always(ErrorFeedback(compress.Int8())),
    "int4": always(ErrorFeedback(compress.Int4())),
    "2 bits, threshold 0.05": always(ErrorFeedback(compress.TwoBit(0.05))),
    "1 bit, rates x 0.3": always(ErrorFeedback(compress.OneBit())),
    "threshold 0.05": always(ErrorFeedback(compress.Threshold(0.05))),
    "top-K 1 %": always(ErrorFeedback(TopK(0.01))),
    "top-K 0.1 %": always(ErrorFeedback(TopK(DENSITY))),
    "top-K 0.1 %, packed": always(ErrorFeedback(Packed(TopK(DENSITY)))),
    "top-K 0.1 %, packed 2 bits": always(ErrorFeedback(Packed(TopK(DENSITY), value="2bit"))),
    "top-K 1 / 64, packed 2 bits": always(ErrorFeedback(Packed(TopK(1 / 64), value="2bit"))),
    "64 of 4,096, packed 2 bits": always(ErrorFeedback(Packed(Chunks(), value="2bit"))),
    "DGC 0.1 %": dgc(TopK(DENSITY)),
    PACKED: dgc(Packed(TopK(DENSITY))),
    "DGC 0.1 %, packed bfloat16": dgc(Packed(TopK(DENSITY), value="bfloat16")),
    "DGC 0.1 %, packed int8": dgc(Packed(TopK(DENSITY), value="int8")),
    ALL: dgc(Packed(TopK(DENSITY)), exclude_1d=False),
}
SLOWER = {"1 bit, rates x 0.3": 0.3}  # signs are larger than most gradients


def wrapped(name, compressor, rate, comm, **options):
    """A metered DistOpt; with DGC momentum and decay are the compressor's."""
    settings = {} if name.startswith("DGC") else {"momentum": MOMENTUM, "weight_decay": DECAY}
    return distopt.DistOpt(SGD(rate, **settings), Metered(comm), **options)


def digits_epochs(name, comm, batch, epochs, seed, warm):
    """(epoch, steps so far) of a training on the digits."""
    rng = np.random.default_rng(seed)
    layers, steps = MODELS["wide"](rng), steps_of(TRAINING, batch, comm.size)
    compressor, rate = MODES[name](steps if warm else None), from_strategy(RATES, steps, "exponential")
    opt = wrapped(name, compressor, lambda k: SLOWER.get(name, 1.0) * rate(k), comm)
    for epoch in train(opt, compressor, layers, rng, batch, epochs):
        yield epoch, opt.step_counter


def digits_run(name, seed):
    """(accuracy in the end, steps to 0.95 or None)."""

    def main(comm):
        epochs = list(digits_epochs(name, comm, BATCH, EPOCHS, seed, warm=True))
        return epochs[-1][0].accuracy, next((steps for epoch, steps in epochs if epoch.accuracy >= 0.95), None)

    return run_ranks(2, main)[0]


def digits_bytes(name, size):
    """(payload, wire): how many times as many dense ones would be."""
    dense = sum(p.data.nbytes for layer in MODELS["wide"](np.random.default_rng(0)) for p in layer.params)

    def main(comm):
        return next(digits_epochs(name, comm, -(-TRAINING // (6 * size)), 1, 1, warm=False))

    epoch, steps = run_ranks(size, main)[0]
    return steps * dense / epoch.payload, steps * cost.all_reduce(dense, size) / epoch.wire


def resnet_bytes(name, size):
    """The same of ResNet-50's shapes."""
    part = 1 if size == 2 else SIXTEENTH
    shapes = {n: (shape[0] // part, *shape[1:]) for n, shape in reversed(resnet50())}

    def main(comm):
        rng, compressor = np.random.default_rng(comm.rank), MODES[name]()
        params = [distopt.Parameter(n, np.zeros(shape, np.float32)) for n, shape in shapes.items()]
        opt = wrapped(name, compressor, 0.1, comm, threshold=2097152 // part, broadcast=False)
        for _ in range(2):
            pairs = [(p, rng.standard_normal(p.data.shape, np.float32)) for p in params]
            opt.step(pairs, compressor, exchange="auto" if part == 1 else "two_phase")  # as the whole model does
        world = opt.communicator
        return world.ledger.total()["payload"], world.ledger.total()["sent"]

    payload, wire = run_ranks(size, main)[0]
    dense = 2 * 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    return dense / payload, cost.all_reduce(dense, size) / wire


def passes(n=5000):
    """What ``compress`` takes for a matrix of n x n, by mode and round."""
    steps = Steps(n * n)
    cases = {name: compression(steps, make(), n) for name, make in MODES.items()}
    times = measure.interleaved({"read pass": lambda: read_pass(steps.drift)} | cases, rounds=5, calls=1)
    return {name: measure.ratios(times, name, "read pass") for name in cases}


def compression(steps, compressor, n):
    """A step's call, with states as many steps bring them about; the first calls settle it (``Steps``)."""
    memory, numbers = {}, {}

    def scratch(name, nbytes):
        if name not in memory or memory[name].size < nbytes:
            memory[name] = zeros(nbytes, np.uint8)
        return memory[name][:nbytes]

    def constant(name, make):
        if name not in numbers:
            numbers[name] = DeviceMirror(make())
        return numbers[name]

    def matrix():
        return BucketLayout(["x"], [(n, n)], [0], np.float32)

    value = zeros(n * n, np.float32).reshape(n, n)
    bucket = compress.BucketContext(matrix(), matrix().point_to([value]), scratch, constant)
    context = compress.ExchangeContext(bucket=bucket)
    growth = 1 - MOMENTUM if isinstance(compressor, DeepGradientCompression) else 1.0
    state = {"residual": steps.residual(DENSITY * growth), "velocity": filled(steps.drift / np.float32(growth))}

    def step():
        return compressor.compress(next(steps.turns), state, context)

    for _ in range(6):
        step()
    return step


def times(numbers):
    return " ".join(f"{number:7.1f}" for number in numbers)


def digits_lines():
    """All modes, and how far DGC is from dense."""
    yield f"digits, {EPOCHS} epochs of {TRAINING} images, {BATCH} to a batch, learning rate {RATES}"
    yield f"  {'':27} {'payload':>7} {'2 ranks':>7} {'8':>7} {'32':>7}  test accuracy         steps to 0.95   passes"
    costs = passes()
    for name in MODES:
        sizes = [digits_bytes(name, size) for size in SIZES]
        runs = [digits_run(name, seed) for seed in SEEDS]
        ratios = times([sizes[0][0], *(wire for _, wire in sizes)])
        reached = " ".join(f"{accuracy:.4f}" for accuracy, _ in runs)
        steps = " ".join(f"{steps or '-':>4}" for _, steps in runs)
        yield f"  {name:27} {ratios}  {reached}  {steps}  {statistics.median(costs[name]):6.2f}"
    dense = mean_accuracy("dense")
    for name in MODES:
        if name.startswith("DGC"):
            below = dense - mean_accuracy(name)
            points = f"{-100 * below:+.2f} points from dense ({100 * dense:.2f}) over {len(MANY)} seeds"
            yield f"  {name}: {points}, budget -{100 * BELOW:g}: {verdict(below <= BELOW)}"


def mean_accuracy(name):
    return statistics.mean(digits_run(name, seed)[0] for seed in MANY)


def resnet_lines():
    """What is sparse."""
    yield "ResNet-50, 25,557,032 parameters"
    yield f"  {'':27} {'payload':>7} {'2 ranks':>7} {'8':>7} {'32':>7}"
    for name in MODES:
        if "0.1 %" in name:
            sizes = [resnet_bytes(name, size) for size in SIZES]
            ratios = times([sizes[0][0], *(wire for _, wire in sizes)])
            budget = f"  budget {SMALLER}: {verdict(sizes[0][0] >= SMALLER)}" if name == ALL else ""
            yield f"  {name:27} {ratios}{budget}"


def verdict(met):
    return "met" if met else "MISSED"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="keep the tables in benchmarks/results")
    args = parser.parse_args()
    with threadpool_limits(1):
        tables = ["\n".join(lines()) for lines in (digits_lines, resnet_lines)]
    measure.report("compression", "\n\n".join([measure.versions("numpy"), *tables]), args.save)


if __name__ == "__main__":
    main()
