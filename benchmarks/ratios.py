"""How many times fewer bytes a step sends than a dense one: python -m benchmarks.ratios [--save]

By formula (``distopt.lab.forecast``): what the first rank sends of all gradients of ResNet-50, headers included, at
so many ranks, one to a host, with the exchange that ``step`` chooses.  A threshold's bytes depend on the gradients: it
has no formula, and is in benchmarks/accuracy.py.

The formula is compared with the ledger of virtual ranks, where they have room: for the tensors of ResNet-50's first two
stages and gradients of random numbers.  Codes are as long as the formula says, to the byte.  Entries are not spread as
evenly as it takes them to be, and the first rank's share of them differs.
"""

import argparse
import statistics

import numpy as np

import distopt
from benchmarks.measure import report, versions
from distopt.lab import buckets, forecast, mode
from distopt.lab.models import resnet50

RANKS, SIMULATED, STEPS = (2, 8, 32, 128, 1024), (2, 8, 32), 3
SPARSE, TO_128 = dict(zip(RANKS, (1100, 1100, 1100, 1050, 900), strict=True)), RANKS[:-1]
GOALS = {  # by mode and ranks
    "topk=0.001+packed": SPARSE,
    "topk=0.001+packed:2bit": {2: 2200},
    "2bit": dict.fromkeys(TO_128, 15.5),
    "1bit": dict.fromkeys(TO_128, 31) | {1024: 30},
    "int8": dict.fromkeys(TO_128, 3.9),
    "int4": dict.fromkeys(TO_128, 7.6),
}
MODES = (
    *("half", "int8", "int4", "2bit", "1bit", "topk=0.01", "topk=0.01+packed", "topk=0.01+packed:2bit"),
    *(f"topk=0.001{packed}" for packed in ("", "+packed", "+packed:bfloat16", "+packed:int8", "+packed:2bit")),
    *(f"dgc=0.001{packed}" for packed in ("", "+packed", "+packed+1d", "+packed:2bit+1d")),
)


def by_formula(layouts, name, ranks):
    """Bytes of a dense step over those of this mode."""
    return forecast(layouts, mode("dense"), ranks).sent / forecast(layouts, mode(name), ranks).sent


def by_ledger(shapes, name, ranks):
    """The same, as virtual ranks count some steps of random gradients."""
    params = [distopt.Parameter(n, np.zeros(shape, np.float32)) for n, shape in shapes]
    sim, compressor = distopt.simulate(ranks, distopt.optim.SGD(0.1)), mode(name).compressor

    def losses(rank):
        rng = np.random.default_rng((sim.step_counter, rank))
        return [(p, rng.standard_normal(p.data.shape, np.float32)) for p in params]

    for _ in range(STEPS):
        sim.step(losses, compressor)
    dense = forecast(buckets(shapes), mode("dense"), ranks).sent
    return STEPS * dense / sim.ledger.total_of_steps()["sent"]


def row(name, cells):
    return f"  {name:24}" + "".join(f" {cell:>14}" for cell in cells)


def of_resnet50():
    """A line per mode; a goal that a ratio misses is beside it."""
    layouts = buckets(resnet50()[::-1])
    yield "ResNet-50, 25,557,032 elements, dense bytes over those of a mode, by formula; goals are in brackets"
    yield row("", [f"{ranks} ranks" for ranks in RANKS])
    for name in MODES:
        cells = []
        for ranks in RANKS:
            ratio, goal = by_formula(layouts, name, ranks), GOALS.get(name, {}).get(ranks)
            missed = "" if goal is None or ratio >= goal else " MISSED"
            cells.append(f"{ratio:.4g}" + (f" [{goal}{missed}]" if goal else ""))
        yield row(name, cells)


def formula_and_ledger():
    """A line per mode, with how far the ledger is from the formula."""
    shapes = [pair for pair in resnet50() if pair[0].startswith(("conv1", "bn1", "layer1", "layer2"))][::-1]
    layouts, elements = buckets(shapes), sum(int(np.prod(shape)) for _, shape in shapes)
    yield f"its first two stages, {elements:,} elements: by formula, and the ledger's of {STEPS} steps"
    yield row("", [f"{ranks} ranks" for ranks in SIMULATED])
    differences = []
    for name in MODES:
        pairs = [(by_formula(layouts, name, ranks), by_ledger(shapes, name, ranks)) for ranks in SIMULATED]
        yield row(name, [f"{formula:.4g} {ledger:.4g}" for formula, ledger in pairs])
        differences += [abs(ledger / formula - 1) for formula, ledger in pairs]
    others = [100 * d for d in differences if d]
    differ = f"{statistics.median(others):.2f} % (median), {max(others):.2f} % at most"
    yield f"  {len(differences) - len(others)} of {len(differences)} are equal, the others differ by {differ}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="keep the tables in benchmarks/results")
    args = parser.parse_args()
    tables = ["\n".join(lines()) for lines in (of_resnet50, formula_and_ledger)]
    report("ratios", "\n\n".join([versions("numpy"), *tables]), args.save)


if __name__ == "__main__":
    main()
