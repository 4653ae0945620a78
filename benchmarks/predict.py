"""What a fit predicts, and what is measured: python -m benchmarks.predict [--rates 1gbit,100mbit] [--save]

Two hosts in network namespaces (benchmarks/namespaces.py: needs root), joined by a link of each rate in turn.  On each
first ``distopt.fit.fit`` measures for 20 seconds; then each verb is timed, as the fit does it, at sizes that it has not
seen.  What the link lets through at once after a pause is kept small, and nothing is dropped, as with a real card.
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
from benchmarks.link import bits_per_second
from benchmarks.measure import report, versions
from benchmarks.namespaces import INTERFACE, missing, two_hosts
from distopt.cli.launcher import find_launcher
from distopt.comm.mpi_control import brand, launched
from distopt.fit import case_of, fit, take_turns, timed
from distopt.fit.measure import VERBS

SIZES = (100, 3_000, 12_000, 48_000, 100_000, 400_000, 1_500_000, 6_000_000)  # bytes
TARGET = 0.15
SECONDS = 20.0
LIMIT = 300  # seconds


def shape(rate):
    """From now on this host sends no faster; its token bucket has room for 0.26 ms, and for two packets at least."""
    burst = max(4096, int(bits_per_second(rate) / 8 * 262e-6))
    command = f"tc qdisc replace dev {INTERFACE} root tbf rate {rate} burst {burst} limit 20mb"
    subprocess.run(command.split(), check=True)


def held_out(world, found):
    """(verb, bytes, predicted, measured): the median over rounds in which verbs and sizes take turns."""
    x, room = (world.alloc(2 * max(SIZES), np.uint8).view(np.float32) for _ in range(2))
    cases = [case_of(world, verb, nbytes, x, room) for verb in VERBS for nbytes in SIZES]
    for case in cases:
        case.taken += timed(world, case.call, 1)
    take_turns(world, cases, SECONDS)
    points = [case.point() for case in cases]
    return [(p.verb, p.nbytes, found.seconds(p.verb, p.nbytes, world.size), p.seconds) for p in points]


def measure(rates, file):
    """On each of the ranks: rank 0 writes what was found per rate."""
    world, results = distopt.world(), {}
    for rate in rates:
        shape(rate)
        begin = time.perf_counter()
        found = fit(world, SECONDS)
        took = time.perf_counter() - begin
        lines = {verb: (line.algorithm, line.residual, len(line.pieces)) for verb, line in found.lines.items()}
        results[rate] = (took, found.link, lines, held_out(world, found))
    if world.rank == 0:
        Path(file).write_text(json.dumps([brand(), results]))


def show(results):
    """Per rate, what was fitted, and a line per verb and size."""
    for rate, (took, (_, latency, bandwidth, _), lines, rows) in results.items():
        yield f"{rate}: fitted in {took:.1f} s; as one link {latency * 1e6:.0f} us, {bandwidth / 1e6:.1f} MB/s"
        for verb, (algorithm, residual, pieces) in lines.items():
            yield f"  {verb:14}  {algorithm}, {pieces} pieces, {100 * residual:.1f} % off where it was measured"
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="1gbit,100mbit")
    parser.add_argument("--save", action="store_true", help="keep the tables as results/predict.txt")
    parser.add_argument("--file", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if launched():
        measure(given.rates.split(","), given.file)
        return 0
    reason = missing()
    if reason:
        print(f"benchmarks.predict: {reason}", file=sys.stderr)
        return 2
    launcher = find_launcher()
    with two_hosts() as hosts:
        file = hosts.folder / "found"
        script = [sys.executable, "-m", "benchmarks.predict", "--rates", given.rates, "--file", str(file)]
        env = launcher.environment(2) | hosts.environment(launcher.brand) | {"OMP_NUM_THREADS": "1"}
        subprocess.run(hosts.on(0, [*launcher.command(2), *script]), env=env, timeout=LIMIT, check=True)
        library, results = json.loads(file.read_text())
    report("predict", "\n".join([versions("numpy", "mpi4py"), library, *show(results)]), given.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
