"""Accuracy and bytes of local steps beside dense: python -m benchmarks.local_steps [--ranks 4 8] [--seeds 8] [--save]

The digits, the wide network, the batch of 128 and the inner SGD of examples/volume.py, for 660 updates, on virtual
ranks that share out the batch, so that all modes see the same samples as often.  H is the steps of a window.  *Mean*
averages parameters (an outer SGD with rate 1 and no momentum); the others have DiLoCo's outer SGD, with rate 0.7 and
Nesterov's momentum 0.9.  SparseLoCo sends 64 of each 4,096 entries in two bits, with a residual that decays by 0.95.
SPARTA averages a share of all parameters after each step; its ranks are threads.  Muon has three seeds, on the fewest
ranks alone, since its matrix products are slow on a CPU.

Accuracies are of 360 test images, of which one is 0.28 points, and of the parameters that all ranks have alike in the
end.  What a mode is from dense is the mean over seeds of the differences, with its standard error.  Bytes are what
rank 0 has sent by the ledger of the whole training, by step.
"""

import argparse
import functools
import statistics
import sys
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

import distopt
from benchmarks import measure
from benchmarks.accuracy import below, shown
from distopt.comm import Metered
from distopt.compress import DCT, Chunks, Dense, ErrorFeedback, Packed
from distopt.formatting import nbytes
from distopt.optim import SGD, Cosine, Muon, Signum

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import volume

EPOCHS = 60  # of 11 steps
UPDATES = EPOCHS * volume.STEPS
MEAN = {"outer": SGD(1.0)}


def sgd():
    return SGD(Cosine(volume.RATE, UPDATES, warmup_steps=UPDATES // 10), momentum=volume.MOMENTUM, weight_decay=1e-4)


def muon():
    return Muon(Cosine(0.01, UPDATES), exclude=("b",), otherwise=SGD(Cosine(volume.RATE, UPDATES), momentum=0.9))


def signum():
    return Signum(Cosine(0.001, UPDATES))


def sparse():
    return ErrorFeedback(Packed(Chunks(64, 4096), value="2bit"), decay=0.95)


def demo():
    return DCT(ErrorFeedback(Packed(Chunks(32, 4096)), decay=0.999))


def local(every, make=sgd, **options):
    """Ranks that make local steps."""

    def begin(ranks):
        sim = distopt.simulate_local(ranks, make(), every=every, **options)
        return sim, sim.ledger, lambda: sim.global_parameters

    return begin


def each_step(compressor, make=sgd):
    """Ranks that exchange gradients."""

    def begin(ranks):
        sim = distopt.simulate(ranks, make())
        return functools.partial(sim.step, compressor=compressor()), sim.ledger, dict

    return begin


MODES = {
    "dense": each_step(Dense),
    "H = 10": local(10),
    "H = 10, mean": local(10, **MEAN),
    "H = 50": local(50),
    "H = 50, mean": local(50, **MEAN),
    "H = 50, mean, 5 fragments, delay 5, alpha 0.5": local(50, fragments=5, delay=5, alpha=0.5, **MEAN),
    "SparseLoCo, H = 10": local(10, compressor=sparse(), **MEAN),
    "SparseLoCo, H = 10, over senders": local(10, compressor=sparse(), over="senders", **MEAN),
    "SparseLoCo, H = 50": local(50, compressor=sparse(), **MEAN),
    "SparseLoCo, H = 50, over senders": local(50, compressor=sparse(), over="senders", **MEAN),
    "DeMo": each_step(demo, signum),
    "Muon, dense": each_step(Dense, muon),
    "Muon, H = 10, mean": local(10, muon, **MEAN),
    "Muon, H = 50, mean": local(50, muon, **MEAN),
}
SPARTA = {"SPARTA, 1/20": 0.05, "SPARTA, 1/200": 0.005}
FEW = 3  # seeds of Muon, whose products take 10 to 30 times as long on a CPU as the rest; on the fewest ranks alone


def trained(mode, ranks, seed):
    """(test accuracy in percent, bytes of a step) in the end."""
    step, ledger, parameters = MODES[mode](ranks)
    run = volume.Run("dense", ranks, seed, EPOCHS)
    layers = volume.network(run)
    *_, last = volume.train(run, layers, step, ledger, parameters)
    return 100 * last.accuracy, last.wire / last.step


def with_sparta(mode, ranks, seed):
    """The same of ranks that average a share of all parameters at each step, and all of them in the end."""

    def main(comm):
        world, run = Metered(comm), volume.Run("dense", ranks, seed, EPOCHS)
        layers, opt = volume.network(run), distopt.DistOpt(sgd(), world)

        def step(losses):
            opt.backward_and_partial_update(losses(comm.rank), share=SPARTA[mode])

        *_, last = volume.train(run, layers, step, world.ledger)
        for layer in layers:
            for p in layer.params:
                comm.all_reduce(p.data)
                p.data /= comm.size
        return 100 * volume.accuracy(layers, *volume.digits(np)[1]), last.wire / last.step

    return distopt.run_ranks(ranks, main)[0]


def lines(ranks, seeds, with_muon):
    """A line per mode."""
    width = max(map(len, MODES))
    yield f"{ranks} ranks, {seeds} seeds, {UPDATES} updates"
    head = f"{'mean':>6} {'sd':>5}  {'[min - max]':15}  {'from dense':>16}  {'bytes per step':>15}  {'fewer':>7}"
    yield f"  {'':{width}} {head}"
    dense, sent = [], 0.0
    for mode in (*MODES, *SPARTA):
        of_muon = mode.startswith("Muon")
        if of_muon and not with_muon:
            continue
        train = with_sparta if mode in SPARTA else trained
        found = [train(mode, ranks, seed) for seed in range(1, (min(seeds, FEW) if of_muon else seeds) + 1)]
        accuracies, wire = [accuracy for accuracy, _ in found], statistics.fmean(wire for _, wire in found)
        dense, sent = dense or accuracies, sent or wire
        spread = f"{min(accuracies):.2f} - {max(accuracies):.2f}"
        mean = f"{statistics.fmean(accuracies):6.2f} {statistics.stdev(accuracies):5.2f}  [{spread}]"
        against = below(accuracies, dense[: len(found)])
        yield f"  {mode:{width}} {mean}  {against:>16}  {nbytes(wire):>15}  {sent / wire:7.4g}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], metavar="P")
    parser.add_argument("--seeds", type=int, default=8, metavar="N", help="trainings of each")
    parser.add_argument("--save", action="store_true", help="keep the tables in benchmarks/results")
    args = parser.parse_args()
    with threadpool_limits(1):
        tables = ["\n".join(shown(lines(ranks, args.seeds, ranks == min(args.ranks)))) for ranks in args.ranks]
    measure.report("local_steps", "\n\n".join([measure.versions("numpy"), *tables]), args.save)


if __name__ == "__main__":
    main()
