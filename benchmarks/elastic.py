"""What it costs that others can go on without a lost rank: distopt run -n 2 --elastic -m benchmarks.elastic

Steps that could be made again, in turns with the same steps on the same ranks that could not: the difference is a vote,
and a copy of what a compressor keeps.  First the exchange and the update alone; then, where torch is, whole steps with
a forward and a backward pass.
"""

import functools
import importlib.util
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


def whole_step_of(make_model, shape, compressor, comm):
    """One step of a model of torch's on random images of that shape."""
    from benchmarks.torch_models import loss_on_random_images

    model, loss = make_model(), loss_on_random_images(shape, comm.rank)
    opt = distopt.DistOpt(distopt.optim.SGD(0.1), comm, params=model)
    opt.step(loss(model), compressor)
    return lambda: opt.step(loss(model), compressor)


def cases():
    """What is measured: a name, a function that makes a step on a communicator, and calls a round."""
    for name, shapes, compressor, calls in (
        ("resnet50, dense", MODELS["resnet50"](), Dense(), 2),
        ("resnet50, top-K 0.1 %", MODELS["resnet50"](), ErrorFeedback(TopK(0.001)), 1),
        ("resnet50, DGC 0.1 %", MODELS["resnet50"](), DeepGradientCompression(TopK(0.001)), 1),
        ("tiny, 2000 tensors", MODELS["tiny"](), Dense(), 10),
        ("small, 10,255 elements", SMALL, Dense(), 150),
    ):
        yield name, functools.partial(step_of, shapes, compressor), calls
    if importlib.util.find_spec("torch") is None:
        return
    from benchmarks.torch_models import resnet18, small_cnn

    for name, make_model, shape, calls in (
        ("whole ResNet-18", resnet18, (32, 3, 32, 32), 1),
        ("whole small CNN", small_cnn, (64, 1, 8, 8), 50),
    ):
        for kind, compressor in (
            ("dense", Dense()),
            ("top-K 0.1 %", ErrorFeedback(TopK(0.001))),
            ("DGC 0.1 %", DeepGradientCompression(TopK(0.001))),
        ):
            yield f"{name}, {kind}", functools.partial(whole_step_of, make_model, shape, compressor), calls


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
    for name, make, calls in cases():
        steps = {"elastic": make(world), "plain": make(plain)}
        seconds = {case: [] for case in steps}
        for k in range(ROUNDS):
            for case in sorted(steps, reverse=bool(k % 2)):
                seconds[case].append(timed(steps[case], calls, plain))
        low, middle, high = np.quantile(np.divide(seconds["elastic"], seconds["plain"]), (0.25, 0.5, 0.75))
        more = 1e6 * (statistics.median(seconds["elastic"]) - statistics.median(seconds["plain"]))
        lines.append(
            f"  {name:28} {statistics.median(seconds['plain']) * 1e6:9.1f} us a step; elastic x {middle:.3f} "
            f"[{low:.3f} - {high:.3f}], {more:+.0f} us"
        )
    if world.rank == 0:
        measure.report("elastic", "\n".join(lines), "--save" in sys.argv)


if __name__ == "__main__":
    main()
