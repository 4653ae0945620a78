"""Accuracy of a gather beside that of two phases: python -m benchmarks.accuracy [--ranks 8 32] [--seeds 12 12] [--save]

The digits of examples/volume.py: its network, rates, modes and 20 epochs, at 8 and 32 virtual ranks, which share out
the same batch, so that every number of ranks trains alike.  A gather adds up all that the ranks have sent; in two
phases the owner of a shard compresses the sum again, and keeps what it does not send.

Accuracies are of 360 test images, of which one is 0.28 points.  *sd* is the standard deviation over seeds.  What a mode
is below dense, and two phases below a gather, is the mean over seeds of the differences, with its standard error.
*Fewer bytes*: what rank 0 has sent by the ledger of the whole training, DGC's warm-up included; 1 where a gather would
be more than dense and a step sums up instead.
"""

import argparse
import functools
import statistics
import sys
from pathlib import Path

from threadpoolctl import threadpool_limits

import distopt
from benchmarks import measure
from distopt import cost
from distopt.compress import ErrorFeedback, Int4

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import volume

EPOCHS = 20
EXCHANGES = {"gather": "gather", "two_phase": "two phases"}
MODES = ("topk-0.001", "topk-0.01", "topk-0.01-2bit", "2bit", "1bit", "threshold", "dgc-0.001", "int8", "int4")
volume.MODES["int4"] = lambda steps: ErrorFeedback(Int4())  # the picture, which has int8, does without


def trained(mode, ranks, seed, exchange):
    """(test accuracy in percent, times fewer bytes than dense) in the end."""
    run = volume.Run(mode, ranks, seed, EPOCHS)
    layers, sim = volume.network(run), distopt.simulate(ranks, volume.optimizer(run))
    dense = cost.all_reduce(sum(p.data.nbytes for layer in layers for p in layer.params), ranks)

    compressor = volume.MODES[mode](run.steps)
    step = functools.partial(sim.step, compressor=compressor, exchange=exchange)
    *_, last = volume.train(run, layers, step, sim.ledger)
    return 100 * last.accuracy, dense * last.step / last.wire


def below(accuracies, others):
    """Their differences over the seeds as mean and standard error."""
    differences = [a - b for a, b in zip(accuracies, others, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return f"{statistics.fmean(differences):+6.2f} +- {error:.2f}"


def lines(ranks, seeds):
    """A line per mode and exchange."""

    def runs(mode, exchange="gather"):
        found = [trained(mode, ranks, seed, exchange) for seed in range(1, seeds + 1)]
        return [accuracy for accuracy, _ in found], statistics.fmean(ratio for _, ratio in found)

    def line(mode, exchange, accuracies, ratio, *differences):
        spread = f"{min(accuracies):.2f} - {max(accuracies):.2f}"
        mean = f"{statistics.fmean(accuracies):6.2f} {statistics.stdev(accuracies):5.2f}  [{spread}]"
        return f"  {mode:14} {exchange:10} {mean}  {ratio:12.4g}" + "".join(f"  {d:>16}" for d in differences)

    yield f"{ranks} ranks, {seeds} seeds"
    header = f"{'mean':>6} {'sd':>5}  {'[min - max]':15}  {'fewer bytes':>12}"
    yield f"  {'':14} {'':10} {header}  {'from dense':>16}  {'from a gather':>16}"
    dense, ratio = runs("dense")
    yield line("dense", "", dense, ratio)
    for mode in MODES:
        gathered = None
        for exchange, name in EXCHANGES.items():
            accuracies, ratio = runs(mode, exchange)
            against = [below(accuracies, dense)] + ([below(accuracies, gathered)] if gathered else [])
            yield line(mode, name, accuracies, ratio, *against)
            gathered = accuracies


def shown(lines):
    """The lines, each on the terminal as soon as it is known."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)
        yield line


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32], metavar="P")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[12, 12], metavar="N", help="trainings, for each of them"
    )
    parser.add_argument("--save", action="store_true", help="keep the tables in benchmarks/results")
    args = parser.parse_args()
    with threadpool_limits(1):
        sizes = zip(args.ranks, args.seeds, strict=True)
        tables = ["\n".join(shown(lines(ranks, seeds))) for ranks, seeds in sizes]
    measure.report("accuracy", "\n\n".join([measure.versions("numpy"), *tables]), args.save)


if __name__ == "__main__":
    main()
