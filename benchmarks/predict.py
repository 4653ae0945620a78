"""What a fit predicts, and what is measured: python -m benchmarks.predict [--rates 1gbit,100mbit] [--save]

Two hosts in network namespaces (benchmarks/namespaces.py: needs root), joined by a link of each rate in turn.  On each
first ``distopt.fit.fit`` measures for 20 seconds; then each verb is timed, as the fit does it, at sizes that it has not
seen.  Predicted and measured is what a tenth of the calls stay below.  So are steps of ResNet-50 in some modes, the
medians of some: to the wire ``distopt.lab`` adds what compressing takes, measured here, and the rest is what a dense
step of one rank alone takes, to pack and to update.  What compresses is the fastest of one rank; the two ranks of this
machine share its memory, and where that is what a step waits for, it takes longer.

What the link lets through at once after a pause is kept small, and nothing is dropped, as with a real card.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import distopt
from benchmarks.measure import report, versions
from benchmarks.namespaces import joined_hosts, missing, shape_closely
from distopt import lab
from distopt.comm import LocalCommunicator
from distopt.comm.mpi_control import brand
from distopt.compress import Dense
from distopt.lab.fit import fit
from distopt.lab.fit.measure import VERBS, case_of, take_turns, timed
from distopt.lab.models import MODELS
from distopt.resilience.environment import launched
from distopt.run.launcher import find_launcher

SIZES = (100, 3_000, 12_000, 48_000, 100_000, 400_000, 1_500_000, 6_000_000)  # bytes
TARGET = 0.15
SECONDS = 20.0
MODES = "dense", "half", "2bit", "topk=0.01", "dgc=0.001+packed"
STEPS, TRAINED = 6, 3.0  # at least; seconds
LIMIT = 150  # seconds, for each rate


def held_out(world, found):
    """(verb, bytes, predicted, measured), of rounds in which verbs and sizes take turns."""
    x, room = (world.alloc(2 * max(SIZES), np.uint8).view(np.float32) for _ in range(2))
    cases = [case_of(world, verb, nbytes, x, room) for verb in VERBS for nbytes in SIZES]
    for case in cases:
        case.taken += timed(world, case.call, 1)
    take_turns(world, cases, SECONDS)
    points = [case.point() for case in cases]
    return [(p.verb, p.nbytes, found.seconds(p.verb, p.nbytes, world.size), p.seconds) for p in points]


def steps(world, found):
    """(mode, predicted wire, compute, rest, measured): seconds of a step, the median of some."""
    shapes = list(reversed(MODELS["resnet50"]()))
    rest = step_time(LocalCommunicator(), shapes, Dense())
    advice = lab.advise(lab.buckets(shapes), world.size, found, MODES)
    rows = sorted((c.mode.name, c.takes, c.mode.compressor) for c in advice.choices)
    return [(name, t.wire, t.compute, rest, step_time(world, shapes, own)) for name, t, own in rows]


def step_time(world, shapes, compressor):
    """What a step takes, all gradients being there: the median of the later half, when residuals have grown."""
    rng = np.random.default_rng(world.rank)
    params = [distopt.Parameter(name, np.zeros(shape, np.float32)) for name, shape in shapes]
    grads = [rng.standard_normal(p.data.shape, np.float32) for p in params]
    opt, taken = distopt.DistOpt(distopt.optim.SGD(0.01), world, broadcast=False), []
    while len(taken) < STEPS or _more(world, sum(taken) < TRAINED):
        world.barrier()
        begin = time.perf_counter()
        opt.step(list(zip(params, grads, strict=True)), compressor)
        taken.append(time.perf_counter() - begin)
    opt.close()
    return statistics.median(taken[len(taken) // 2 :])


def _more(world, wanted):
    """What rank 0 wants."""
    flag = np.array([wanted], np.uint8)
    world.broadcast(flag)
    return bool(flag[0])


def measure(rates, file):
    """On each of the ranks: rank 0 writes what was found per rate."""
    world, results = distopt.world(), {}
    for rate in rates:
        shape_closely(rate)
        begin = time.perf_counter()
        link = fit(world, SECONDS)
        took = time.perf_counter() - begin
        lines = {verb: (line.residual, len(line.pieces)) for verb, line in link.lines.items()}
        results[rate] = (took, link.link, lines, held_out(world, link), steps(world, link))
    if world.rank == 0:
        Path(file).write_text(json.dumps([brand(), results]))


def show(results):
    """Per rate, what was fitted, and a line per verb and size."""
    for rate, (took, (_, latency, bandwidth, _), lines, rows, trained) in results.items():
        yield f"{rate}: fitted in {took:.1f} s; as one link {latency * 1e6:.0f} us, {bandwidth / 1e6:.1f} MB/s"
        for verb, (residual, pieces) in lines.items():
            yield f"  {verb:14}  {pieces} pieces, {100 * residual:.1f} % off where it was measured"
        yield f"  {'held out':14}  {'bytes':>10}  {'predicted ms':>12}  {'measured ms':>12}  {'error':>7}"
        errors = []
        for verb, nbytes, predicted, measured in rows:
            errors.append(abs(predicted / measured - 1))
            yield (
                f"  {verb:14}  {nbytes:10,}  {predicted * 1e3:12.3f}  {measured * 1e3:12.3f}  "
                f"{100 * (predicted / measured - 1):+6.1f} %"
            )
        met = sum(e <= TARGET for e in errors)
        yield (
            f"  error: median {100 * statistics.median(errors):.1f} %, largest {100 * max(errors):.1f} %; "
            f"{met} of {len(errors)} within {100 * TARGET:.0f} %"
        )
        yield f"  {'step of ResNet-50, ms':20}  {'wire':>8}  {'compute':>8}  {'rest':>8}  {'sum':>8}  {'measured':>8}"
        for name, wire, compute, rest, measured in trained:
            predicted = wire + compute + rest
            shown = "  ".join(f"{1e3 * t:8.1f}" for t in (wire, compute, rest, predicted, measured))
            yield f"  {name:21}  {shown}  {100 * (predicted / measured - 1):+6.1f} %"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="1gbit,100mbit")
    parser.add_argument("--save", action="store_true", help="keep the tables as results/predict.txt")
    parser.add_argument("--file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if launched():
        measure(args.rates.split(","), args.file)
        return 0
    reason = missing()
    if reason:
        print(f"benchmarks.predict: {reason}", file=sys.stderr)
        return 2
    launcher = find_launcher()
    with joined_hosts() as hosts:
        file = hosts.folder / "found"
        script = [sys.executable, "-m", "benchmarks.predict", "--rates", args.rates, "--file", str(file)]
        env = launcher.environment(2) | hosts.environment(launcher.brand, [1, 1]) | {"OMP_NUM_THREADS": "1"}
        limit = LIMIT * len(args.rates.split(","))
        subprocess.run(hosts.on(0, [*launcher.command(2), *script]), env=env, timeout=limit, check=True)
        library, results = json.loads(file.read_text())
    report("predict", "\n".join([versions("numpy", "mpi4py"), library, *show(results)]), args.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
