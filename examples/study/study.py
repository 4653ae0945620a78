"""Accuracy against bytes and seconds, and local steps against bandwidth, measured beside what ``distopt advise`` says.

    python examples/study/study.py [--out runs/study]

Trains digits in ten modes with three seeds, on two virtual ranks.  With root on Linux it then times steps of two real
ranks on two network namespaces with a shaped link, and a grid of local steps and bandwidths; without, seconds are those
that ``distopt advise`` predicts.  Each part is a record in FOLDER/records as soon as it is done, and what is recorded
is not measured again.  From the records come FOLDER/tables.md, accuracy.png and grid.png (which need distopt[plot]).
docs/experiments/study.md says more; its records are in docs/experiments/study.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path += map(str, Path(__file__).parents[1:3])  # of the examples, and of the benchmarks

import cells
import pictures
import results
import tables
import trainings
from dgc import positive
from threadpoolctl import threadpool_limits

from benchmarks.namespaces import missing
from distopt.lab.commands import plotting

LINKS = ["1gbit", "100mbit"]
GRID_RATES = ["1gbit", "300mbit", "100mbit", "30mbit", "10mbit"]
GRID = ["dense", *(f"local={every}" for every in (2, 5, 10, 20, 50, 100))]
WINDOWS = {"steps": 5, "grid": 2}  # of each mode, in a round


def plan(seeds, epochs, modes, rounds):
    """All cells.  What is to be compared takes turns, so that what else the machine does meets all alike."""
    yield from (cells.training(name, seed, epochs) for seed in range(1, seeds + 1) for name in modes)
    yield cells.advice(GRID_RATES, [*modes, *(name for name in GRID if name not in modes)])
    for number in range(1, rounds + 1):
        yield from (cells.steps("steps", rate, modes, WINDOWS["steps"], number) for rate in LINKS)
        yield from (cells.steps("grid", rate, GRID, WINDOWS["grid"], number) for rate in GRID_RATES)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/study"), metavar="FOLDER", help="default: runs/study")
    names, short = list(trainings.MODES), ", ".join(trainings.MODES)
    parser.add_argument("--modes", nargs="+", choices=names, default=names, metavar="MODE", help=short)
    parser.add_argument(
        "--seeds", type=positive, default=3, help="trainings of each mode, with seeds 1, 2, ...; default: 3"
    )
    parser.add_argument("--epochs", type=positive, default=trainings.EPOCHS, help="default: %(default)s")
    parser.add_argument("--rounds", type=positive, default=3, help="of steps between hosts; default: 3")
    parser.add_argument("--no-hosts", action="store_true", help="do not measure between hosts what is not recorded yet")
    args = parser.parse_args()
    try:
        (args.out / "records").mkdir(parents=True, exist_ok=True)
        for picture in ("accuracy.png", "grid.png"):
            plotting.check_picture(args.out / picture)
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(str(error))
    return args


def main():
    args = arguments()
    folder, planned = args.out / "records", list(plan(args.seeds, args.epochs, args.modes, args.rounds))
    no_hosts = "--no-hosts is given" if args.no_hosts else missing()
    try:
        records = [cell.record(folder) for cell in planned]
    except (OSError, ValueError) as error:
        print(f"study.py: {error}", file=sys.stderr)
        return 2
    wanted = [k for k, cell in enumerate(planned) if records[k] or not (cell.hosts and no_hosts)]
    for number, k in enumerate(wanted, 1):
        if records[k] is None:
            cell = planned[k]
            begin = time.perf_counter()
            cell.run(folder)
            records[k] = cell.record(folder)
            took = time.perf_counter() - begin
            print(f"{number}/{len(wanted)}  {cell.name}: {took:.1f} s", file=sys.stderr, flush=True)
    if None in records:
        print(f"no steps between hosts ({no_hosts}): where none are recorded, seconds are predicted", file=sys.stderr)
    show(results.Study(list(filter(None, records))), args.out)
    print(f"tables and pictures are in {args.out}", file=sys.stderr)
    return 0


def show(study, folder):
    """Print the tables, and write them and the pictures."""
    text = "\n".join(tables.lines(study, LINKS)).rstrip() + "\n"
    print(text, end="", flush=True)
    (folder / "tables.md").write_text(text)
    pictures.accuracy(study, LINKS, folder / "accuracy.png")
    if study.grid.rates:
        pictures.grid(study, folder / "grid.png")


if __name__ == "__main__":
    with threadpool_limits(1):  # a core for each rank, and sums that do not depend on the machine's cores
        sys.exit(main())
