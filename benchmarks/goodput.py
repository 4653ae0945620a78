"""What jobs make of their time while processes are killed: python -m benchmarks.goodput [--save] [ROW ...]

Eight ranks on this machine train for so many seconds, and every 5 s one of their processes is killed by SIGKILL.  A
step *waits* 0.1 s for each rank that lives in a process, as for a GPU; where processes are fewer than cores it would
compute.  Each row is compared with the same job to which nothing happens: steps, and samples, of which a step of
logical ranks always has as many, and one of a shrinking mean as many as there are processes.

The fleet is simulated: what a kill costs comes from a job in which kills are rarer, and the share of the row above it
is predicted with that before it is believed for others.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.measure import report, versions

RANKS, WAIT, EVERY = 8, 0.1, 5.0
# What distopt run is told, and whether ranks are logical; a budget of steps or samples.
ROWS = {
    "shrinking mean, newcomers": (["--elastic", "--restarts", "999"], False, {"steps": 0.97, "samples": 0.95}),
    "logical, newcomers": (["--elastic", "--restarts", "999"], True, {"samples": 0.85}),
    "logical, one spare": (["--elastic", "--restarts", "999", "--spares", "1"], True, {"samples": 0.95}),
    "restarts from checkpoints": (["--restarts", "999"], False, {}),
}


def train(folder, logical, elastic, seconds):
    """Train, and note each step: when it ended, its number, and how many samples it had."""
    import distopt

    world = distopt.world("cpu", logical=RANKS if logical else None)
    p = distopt.Parameter("w", np.zeros(5000, np.float32))
    opt, gradient = distopt.DistOpt(distopt.optim.SGD(0.1), world), np.ones(5000, np.float32)
    if elastic:
        opt.rejoin([p])
    else:
        opt.load(folder / "checkpoints", [p])
    (folder / f"{os.getpid()}.pid").touch()

    def loss(rank=0):
        time.sleep(WAIT)
        return [(p, (rank + 1) * gradient)]

    with (folder / f"{os.getpid()}.steps").open("w", buffering=1) as log:
        # Who ends first leaves the others, whose last steps do not count.
        while time.time() < float((folder / "until").read_text()) + 1:
            opt.step(loss) if logical else opt.step(loss())
            if not elastic and opt.step_counter % 10 == 0:
                opt.save(folder / "checkpoints", [p])
            log.write(json.dumps([time.time(), opt.step_counter, opt.world_size]) + "\n")


def rates(options, logical, seconds, every=None):
    """Steps and samples a second, with a kill every so many; a step that was made again after a restart counts once."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "until").write_text(str(time.time() + 1e6))
        elastic = "--elastic" in options
        command = [sys.executable, "-m", "distopt", "run", "-n", str(RANKS), *options, *["--over", "torch"] * elastic]
        rank = ["-m", "benchmarks.goodput", "--rank", place, str(int(logical)), str(int(elastic))]
        with (folder / "output").open("w") as output:
            job = subprocess.Popen([*command, *rank], stdout=output, stderr=output)
        while len(list(folder.glob("*.steps"))) < RANKS:
            if job.poll() is not None:
                raise RuntimeError((folder / "output").read_text())
            time.sleep(0.05)
        began = time.time()
        (folder / "until").write_text(str(began + seconds))
        rng = random.Random(5)
        kills = 0
        while every and time.time() < began + seconds - every:
            time.sleep(rng.uniform(0.8, 1.2) * every)
            recent = [f for f in folder.glob("*.steps") if time.time() - f.stat().st_mtime < 1]
            if recent:
                os.kill(int(rng.choice(sorted(recent)).stem), signal.SIGKILL)
                kills += 1
        job.wait()
        lines = [json.loads(line) for f in folder.glob("*.steps") for line in f.read_text().splitlines()]
        made = {step: samples for ended, step, samples in lines if began < ended < began + seconds}
    return {"steps": len(made) / seconds, "samples": sum(made.values()) / seconds, "kills": kills}


def useful(cost, between, days=30.0, seed=0):
    """The share of its time that a job makes use of, if a kill takes ``cost()`` seconds, and such is between two."""
    rng, done, lost, end = random.Random(seed), 0.0, 0.0, days * 86400
    while done + lost < end:
        done += rng.expovariate(1 / between)
        paid = cost(rng)
        while (again := rng.expovariate(1 / between)) < paid:  # killed in its recovery
            lost += again
            paid = cost(rng)
        lost += paid
    return done / (done + lost)


def fleet(seconds):
    """Lines on what a kill costs, on the row that it predicts, and on larger jobs."""
    options, logical, _ = ROWS["logical, newcomers"]
    usual, rare, often = (rates(options, logical, seconds, every) for every in (None, 12.0, EVERY))
    cost = seconds * (1 - rare["steps"] / usual["steps"]) / rare["kills"]
    predicted, found = 1 - cost * often["kills"] / seconds, often["steps"] / usual["steps"]
    lines = [
        f"  a kill costs {cost:.2f} s where one comes every 12 s; every {EVERY:g} s: {predicted:.1%} of the steps "
        f"predicted, {found:.1%} found",
        "  simulated: a step takes 10 s, and is made again; the rest of a kill's cost grows with the number of ranks;",
        "  a restart from checkpoints takes 948 s and what was learned since the last one, of one every 10 min",
    ]
    for ranks, between in ((1024, 7.9 * 3600), (1024, 14 * 60), (131072, 14 * 60)):
        adopted = useful(lambda _, ranks=ranks: 10 + (cost - WAIT) * ranks / RANKS, between)
        restarted = useful(lambda rng: 948 + rng.uniform(0, 600), between)
        lines.append(
            f"  {ranks:,} ranks, a kill every {between / 3600:.2g} h: adopted {adopted:.1%}, restarts {restarted:.1%}"
        )
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", nargs=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--save", action="store_true", help="keep the table in benchmarks/results")
    parser.add_argument("rows", nargs="*", help=f"of: {', '.join(ROWS)}")
    args = parser.parse_args()
    if args.rank:
        folder, logical, elastic = args.rank
        return train(Path(folder), bool(int(logical)), bool(int(elastic)), args.seconds)
    lines = [
        versions("numpy", "torch"),
        f"{RANKS} ranks, {WAIT} s a rank, a SIGKILL every {EVERY:g} s, {args.seconds:g} s",
    ]
    for name in args.rows or ROWS:
        options, logical, budgets = ROWS[name]
        usual, found = (rates(options, logical, args.seconds, every) for every in (None, EVERY))
        cells = []
        for what in ("steps", "samples"):
            part = found[what] / usual[what]
            verdict = (
                f" (budget {budgets[what]:.0%}: {'met' if part >= budgets[what] else 'MISSED'})"
                if what in budgets
                else ""
            )
            cells.append(f"{part:.1%} of {usual[what]:.2f} {what} a second{verdict}")
        lines.append(f"  {name:28} {', '.join(cells)}")
    lines += [] if args.rows else fleet(args.seconds)
    report("goodput", "\n".join(lines), args.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
