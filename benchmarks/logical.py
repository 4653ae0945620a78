"""What logical ranks cost: distopt run -n 2 -m benchmarks.logical [--save]

Steps of as many logical ranks as processes, twice and four times as many, in turns with ``deterministic=True`` on the
same processes, whose sums are in rank order too.  Gradients are already there, so that a step is its packing, exchange
and update; with V ranks on P processes each packs, sends and adds V / P times as much.
"""

import functools
import sys

import numpy as np

import distopt
from benchmarks import measure
from benchmarks.models import MODELS
from distopt.comm import Logical
from distopt.compress import Dense, ErrorFeedback, Half, Int8, Packed, TopK

ROUNDS = 11
BUDGET, EXACT = 1.02, 1.6  # as many ranks as processes


def step_of(shapes, compressor, comm, **options):
    """One step of a model whose gradients are already there."""
    params = [distopt.Parameter(name, np.zeros(shape, np.float32)) for name, shape in reversed(shapes)]
    opt = distopt.DistOpt(distopt.optim.SGD(0.1), comm, **options)
    rng = np.random.default_rng(comm.rank)
    pairs = [(p, rng.standard_normal(p.data.shape, np.float32)) for p in params]
    loss = (lambda rank: pairs) if comm.ranks.logical else pairs
    return functools.partial(opt.step, loss, compressor)


def main():
    world = distopt.world()
    tables = [f"{measure.versions('numpy')}\n{world.size} processes, {world.reason}; ResNet-50, a step"]
    for name, compressor in (
        ("dense", Dense()),
        ("half", Half()),
        ("int8", ErrorFeedback(Int8())),
        ("packed top-K 0.1 %", ErrorFeedback(Packed(TopK(0.001)))),
    ):
        shapes, anchor = MODELS["resnet50"](), "deterministic=True"
        cases = {anchor: step_of(shapes, compressor, world, deterministic=True)}
        budgets = {}
        for times in (1, 2, 4):
            label = f"{times * world.size} logical ranks"
            cases[label] = step_of(shapes, compressor, Logical(world, times * world.size))
            budgets |= {label: BUDGET} if times == 1 else {}
            if name == "dense":
                label, comm = f"{label}, 'exact'", Logical(world, times * world.size)
                cases[label] = step_of(shapes, compressor, comm, deterministic="exact")
                budgets |= {label: EXACT} if times == 1 else {}
        found = measure.interleaved(
            cases,
            ROUNDS,
            1,
            world.barrier,
            lambda seconds: max(float(x[0]) for x in world.all_gather(np.array([seconds]))),
        )
        tables.append(measure.table(name, found, anchor, budgets))
    if world.rank == 0:
        measure.report("logical", "\n".join(tables), "--save" in sys.argv)


if __name__ == "__main__":
    main()
