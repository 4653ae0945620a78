"""Language models in many methods, at equal text: the held-out loss, and the bytes that a rank sends for it.

    python examples/lm/study.py trials small [--out runs/lm] [--jobs 2]

``trials`` tries the rates of every method at 0.05 M parameters; all other parts take the best.  ``small``
trains each method once at 0.1 M, ``study`` at 0.1 and 0.2 M with three seeds, ``sizes`` dense and DiLoCo from 0.05 to
0.4 M, and ``large`` at 1 M.  A training is a record in FOLDER as soon as it is done, and what is recorded is not
trained again, so that a part goes on where it was.  docs/experiments/lm.md says more.
"""

import argparse
import concurrent.futures
import itertools
import math
import sys
from pathlib import Path

import text
from methods import METHODS, Run
from report import RECORDS, TRIED
from trainings import on_one_core, train_here

from distopt.experiment import Experiment, read

RANKS, SEEDS = 4, (1, 2, 3)
GUESSED = math.log(256)  # the loss of who has learned nothing
TRIAL_SEED = 0
LOCAL = "diloco-30"  # the method with other numbers of ranks
SIZES = {"sizes": ("0.05", "0.1", "0.2", "0.4"), "large": ("1",)}


def trials(method):
    """All trainings by which a method's rates are chosen."""
    of = METHODS[method]
    pairs = itertools.product(of.rates, of.outers)
    return [Run(method, TRIED, RANKS, TRIAL_SEED, rate, outer) for rate, outer in pairs]


def best(method, folder):
    """The rates of the trial with the lowest loss: of this folder if it has all of a method, else of the page."""
    where = folder if all(done(run, folder) for run in trials(method)) else RECORDS
    _, run = min((read(path(run, where))["results"]["loss"], run) for run in trials(method))
    return {"rate": run.rate, "outer": run.outer}


def planned(part, folder):
    """The trainings of a part, in the order in which they are made."""
    if part == "trials":
        return [run for method in METHODS for run in trials(method)]
    if part == "small":
        wanted = [(method, "0.1", RANKS, 1) for method in METHODS]
    elif part == "study":
        wanted = list(itertools.product(METHODS, ("0.1", "0.2"), [RANKS], SEEDS))
        wanted += [
            (LOCAL, size, ranks, seed) for size, ranks, seed in itertools.product(("0.1", "0.2"), (1, 2, 8), SEEDS)
        ]
    else:
        of = [("dense", RANKS), *((LOCAL, ranks) for ranks in (1, 2, 4))]
        wanted = [(method, size, ranks, seed) for size in SIZES[part] for (method, ranks) in of for seed in SEEDS]
    wanted.sort(key=lambda run: (float(run[1]), run[3]))  # so that all methods have as many seeds, whenever it ends
    return [Run(*run, **best(run[0], folder)) for run in wanted]


def path(run, folder):
    name = f"{run.method}-{run.size}M-{run.ranks}-ranks-rate-{run.rate:g}-{run.outer:g}-seed-{run.seed}"
    return folder / f"{name}.json"


def train(run, folder):
    """Make a training and its record; ranks are virtual."""
    settings = {"size": run.size, "rate": run.rate, "outer": run.outer, "text": text.read().sha256()}
    with Experiment(path(run, folder), run.method, run.seed, ranks=run.ranks, **settings) as experiment:
        try:
            totals, loss = train_here(run, lambda *told: note(experiment, *told))
        except FloatingPointError:  # it has diverged
            totals, loss = None, GUESSED
        experiment.finish(totals, loss=round(loss, 5))
    return run, loss


def note(experiment, step, loss, wire):
    experiment(step, {"loss": round(loss, 5), "wire": wire})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=["trials", "small", "study", *SIZES], metavar="PART")
    parser.add_argument("--out", type=Path, default=Path("runs/lm"), metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="trainings at once, a core each; default: 2")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if not text.known():
        print("this Python's text is not known: compare losses among your own trainings alone", file=sys.stderr)
    with concurrent.futures.ProcessPoolExecutor(given.jobs, initializer=on_one_core) as pool:
        for part in given.parts:
            runs = [run for run in planned(part, given.out) if not done(run, given.out)]
            for number, (run, loss) in enumerate(pool.map(train, runs, itertools.repeat(given.out)), 1):
                print(
                    f"{part} {number}/{len(runs)}: {path(run, given.out).stem}: {loss:.4f}", file=sys.stderr, flush=True
                )


def done(run, folder):
    """Tell if a training has a record, whole."""
    where = path(run, folder)
    return where.exists() and not read(where)["raised"]


if __name__ == "__main__":
    main()
