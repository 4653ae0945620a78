"""What it costs that others can go on without a lost rank: distopt run -n 2 --elastic -m benchmarks.elastic

Steps that could be made again, in turns with the same steps on the same ranks that could not: the difference is a vote,
and a copy of what a compressor keeps.  No backward pass is made, so that real steps lose a smaller share.
"""

import statistics
import sys
import time

import numpy as np

import distopt
from benchmarks import measure
from benchmarks.models import MODELS
from distopt.compress import DeepGradientCompression, Dense, ErrorFeedback, TopK

ROUNDS = 41
SMALL = [("w1", (64, 128)), ("b1", (128,)), ("w2", (128, 15)), ("b2", (15,))]


def step_of(shapes, compressor, comm):
    """One step of a model whose gradients are already there."""
    params = [distopt.Parameter(name, np.zeros(shape, np.float32)) for name, shape in reversed(shapes)]
    opt = distopt.DistOpt(distopt.optim.SGD(0.1), comm)
    rng = np.random.default_rng(comm.rank)
    pairs = [(p, rng.standard_normal(p.data.shape, np.float32)) for p in params]
    opt.step(pairs, compressor)
    return lambda: opt.step(pairs, compressor)


def timed(step, calls, comm):
    """Seconds per call of the slowest rank."""
    comm.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return max(float(x[0]) for x in comm.all_gather(np.array([(time.perf_counter() - start) / calls])))


def main():
    world = distopt.world()
    plain = world.comm  # the same ranks and messages, which end together
    lines = [measure.versions("numpy"), f"{world.size} ranks, {plain.reason}; medians of {ROUNDS} rounds [quartiles]"]
    for name, shapes, compressor, calls in (
        ("resnet50, dense", MODELS["resnet50"](), Dense(), 2),
        ("resnet50, top-K 0.1 %", MODELS["resnet50"](), ErrorFeedback(TopK(0.001)), 1),
        ("resnet50, DGC 0.1 %", MODELS["resnet50"](), DeepGradientCompression(TopK(0.001)), 1),
        ("tiny, 2000 tensors", MODELS["tiny"](), Dense(), 10),
        ("small, 10,255 elements", SMALL, Dense(), 150),
    ):
        steps = {"elastic": step_of(shapes, compressor, world), "plain": step_of(shapes, compressor, plain)}
        seconds = {case: [] for case in steps}
        for k in range(ROUNDS):
            for case in sorted(steps, reverse=bool(k % 2)):
                seconds[case].append(timed(steps[case], calls, plain))
        low, middle, high = np.quantile(np.divide(seconds["elastic"], seconds["plain"]), (0.25, 0.5, 0.75))
        more = 1e6 * (statistics.median(seconds["elastic"]) - statistics.median(seconds["plain"]))
        lines.append(
            f"  {name:24} {statistics.median(seconds['plain']) * 1e6:9.1f} us a step; elastic x {middle:.3f} "
            f"[{low:.3f} - {high:.3f}], {more:+.0f} us"
        )
    if world.rank == 0:
        measure.report("elastic", "\n".join(lines), "--save" in sys.argv)


if __name__ == "__main__":
    main()
