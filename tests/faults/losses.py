"""Real ranks are killed, and the others go on: how soon, and to which bits.

``python tests/faults/losses.py [--over torch|mpi] [--ranks 8] [--kills 5] [--jobs 1] [--grow] [MODE ...]`` starts jobs
of ``distopt run --elastic`` with the MPI or the torch of its own environment, kills ranks one after the other at random
instants, and prints the seconds from SIGKILL to the end of the last survivor's next step, by the number of ranks before
it.  What the survivors have at the end is compared with a run of threads that were as many at every step.

With ``--grow`` another process takes the place of each lost rank before the next one is killed; what is printed is the
time until it has made its first step, and at the end all ranks have the same parameters, of local steps the global
ones.

With ``--hosts`` half of the ranks are on another host, a network namespace, and the cable to it is cut.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import launch

launch.extend_path()  # the project comes last, or its sources would hide an installed distopt

import forks  # noqa: E402

from benchmarks.namespaces import ADDRESSES, cut, joined_hosts  # noqa: E402
from distopt.comm.keepalive import SECONDS  # noqa: E402
from distopt.compress.state import pending  # noqa: E402  the tests are no package
from laws import inputs  # noqa: E402
from laws.lost import EVERY, made, noted, reference  # noqa: E402

READY = 10  # steps before the first kill
GAP = (0.3, 0.9)  # seconds between kills
HUNG = 120.0  # seconds after which a job is given up
EVERYONES = "everyone's "  # before the names of parameters that all ranks have alike


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modes", nargs="*", default=["dense"], metavar="MODE")
    parser.add_argument("--over", choices=("torch", "mpi"), default="torch")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--kills", type=int, default=5, help="in each job")
    parser.add_argument("--jobs", type=int, default=1, help="of each mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grow", action="store_true", help="replace lost ranks")
    parser.add_argument("--hosts", action="store_true", help="cut the cable between two hosts")
    given = parser.parse_args()
    seconds = {}
    for mode in given.modes:
        for number in range(given.jobs):
            with tempfile.TemporaryDirectory() as folder:
                number_of = given.over, given.ranks, given.kills, given.seed + number
                if given.hosts:
                    kills = [vanish(mode, given.ranks, given.seed + number, Path(folder))]
                else:
                    kills = one(mode, *number_of, Path(folder), given.grow)
            for size, took in kills:
                seconds.setdefault(size, []).append(took)
            print(f"{mode}: {', '.join(f'{took:.2f} s at {size}' for size, took in kills)}", flush=True)
    until = "the first step of a rank in its place" if given.grow else "the end of the last survivor's next step"
    since = "the cut" if given.hosts else "SIGKILL"
    print(f"\n{given.over}: seconds from {since} to {until}")
    print(f"{'ranks before':>12}{'kills':>7}{'least':>8}{'median':>8}{'95 %':>8}{'most':>8}")
    for size, took in sorted(seconds.items(), reverse=True):
        worst = sorted(took)[min(len(took) - 1, int(0.95 * len(took)))]
        print(f"{size:12}{len(took):7}{min(took):8.2f}{statistics.median(took):8.2f}{worst:8.2f}{max(took):8.2f}")


def one(mode, over, ranks, kills, seed, folder, grow=False):
    """Start a job, kill ranks of it, and check what is left; return (ranks before, seconds) of each kill."""
    options = ["-n", str(ranks), "--elastic", "--over", over, *(["--restarts", str(kills)] * grow)]
    options += [__file__, "--rank", mode, str(folder)]
    rng, env = random.Random(f"{mode} {seed}"), {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("w") as output:
        if over == "torch":
            job = forks.launcher(options, env, output)
        else:
            command = [sys.executable, "-m", "distopt", "run", *options]
            job = subprocess.Popen(command, stdout=output, stderr=output, env=env)
        try:
            times = kill(rng, ranks, kills, folder, job, grow)
            (folder / "stop").touch()
            code = job.wait(HUNG)
        finally:
            if job.poll() is None:
                job.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(10)
                job.kill()
    said = (folder / "output").read_text()
    assert code == 0, f"exit code {code}\n{said}"
    ended = tuple(member for member, _ in times)
    members = range(ranks + kills * grow)
    logs = {m: json.loads((folder / f"{m}.json").read_text()) for m in members if m not in ended}
    if grow:
        check_alike(folder, logs)
        return [(ranks, float((folder / f"{ranks + k}.first").read_text()) - when) for k, (_, when) in enumerate(times)]
    check(mode, ranks, ended, logs, folder)
    return [
        (ranks - k, max(resumed(log, ranks - k - 1, when) for log in logs.values()))
        for k, (_, when) in enumerate(times)
    ]


def vanish(mode, ranks, seed, folder):
    """Start a job on two hosts, cut the cable, and check what is left on the first one; (ranks before, seconds)."""
    rng, jobs = random.Random(f"{mode} {seed}"), []
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DISTOPT_SECRET": f"{rng.random()}"}
    with joined_hosts() as hosts, (folder / "output").open("w") as output:
        for node in (0, 1):
            command = [sys.executable, "-m", "distopt", "run", "-n", str(ranks // 2), "--elastic", "--nodes", "2"]
            command += ["--node", str(node), "--at", f"{ADDRESSES[0]}:29400", __file__, "--rank", mode, str(folder)]
            jobs.append(subprocess.Popen(hosts.on(node, command), stdout=output, stderr=output, env=env))
        wait_for(ranks, folder, jobs[0])
        time.sleep(rng.uniform(*GAP))
        when = time.monotonic()
        cut(hosts)
        while "ended the ranks of this node" not in (folder / "output").read_text():
            assert time.monotonic() < when + HUNG, (folder / "output").read_text()
            time.sleep(0.05)
        time.sleep(2 * SECONDS)
        (folder / "stop").touch()
        codes = [job.wait(HUNG) for job in jobs]
    said = (folder / "output").read_text()
    assert codes == [0, 1], f"exit codes {codes}\n{said}"
    stay = range(ranks // 2)
    logs = {member: json.loads((folder / f"{member}.json").read_text()) for member in stay}
    check(mode, ranks, tuple(range(ranks // 2, ranks)), logs, folder)
    return ranks, max(resumed(log, len(stay), when) for log in logs.values())


def wait_for(count, folder, job):
    """Wait until so many ranks are ready."""
    deadline = time.monotonic() + HUNG
    while len(list(folder.glob("*.ready"))) < count:
        assert job.poll() is None, (folder / "output").read_text()
        assert time.monotonic() < deadline, (folder / "output").read_text()
        time.sleep(0.05)


def kill(rng, ranks, kills, folder, job, grow):
    """Kill so many ranks at random instants; return (rank, time) of each."""
    alive, times = list(range(ranks)), []
    wait_for(ranks, folder, job)
    for k in range(kills):
        time.sleep(rng.uniform(*GAP))
        victim = alive.pop(rng.randrange(len(alive)))
        pid = int((folder / f"{victim}.ready").read_text())
        times.append((victim, time.monotonic()))
        os.kill(pid, signal.SIGKILL)
        if grow:
            wait_for(ranks + k + 1, folder, job)
            alive.append(ranks + k)
    time.sleep(GAP[1])
    return times


def resumed(log, size, when):
    """Seconds from a kill to the end of this survivor's next step that was made without the killed rank."""
    return next(at for at, n in log["steps"] if at > when and n <= size) - when


def check_alike(folder, logs):
    """Compare what all ranks have alike, bit by bit: the parameters, of local steps the global ones."""
    first, *others = (np.load(folder / f"{member}.npz") for member in logs)
    for other in others:
        for name in (n for n in first.files if n.startswith(EVERYONES)):
            np.testing.assert_array_equal(other[name], first[name])


def check(mode, ranks, ended, logs, folder):
    """Compare what survivors have with threads that are as many at each batch."""
    sizes = {int(epoch): size for log in logs.values() for epoch, size in log["sizes"].items()}
    (exchanged,) = {tuple(sizes[epoch] for epoch in log["epochs"]) for log in logs.values()}
    (calls,) = {len(log["steps"]) for log in logs.values()}
    whole = len(exchanged) * (calls // len(exchanged))
    assert whole == calls, "the last window of local steps is complete"
    expected = reference(mode, tuple(n for n in exchanged for _ in range(calls // len(exchanged))), ended, ranks)
    for member in logs:
        found = np.load(folder / f"{member}.npz")
        values, state = expected[member]
        for name, value in values.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{mode}: {name} of rank {member}")
        for kind in pending(state.get("states", {})):
            for name, value in state["states"][kind].items():
                np.testing.assert_array_equal(found[f"{kind} {name}"], value, err_msg=f"{mode}: {kind} of {name}")


def train(mode, folder, between=lambda opt, params, member: None):
    """Be a rank: train until the folder says stop, ``between`` after each window, and leave what there is then."""
    import distopt
    from distopt import LocalSteps
    from distopt.comm import Elastic

    comm = distopt.world()
    assert isinstance(comm, Elastic)
    member = int(os.environ.get("DISTOPT_MEMBER") or os.environ.get("DISTOPT_SPAWNED") or comm.rank)
    sizes, steps, epochs = {0: comm.size}, [], []
    take = Elastic._take_next

    def take_next(self):
        take(self)
        sizes[self.epoch] = self.size

    Elastic._take_next = take_next
    params = inputs.parameters(rank=member)
    opt = made(mode, comm, params, deterministic=True)  # an MPI adds in any order
    local = isinstance(opt, LocalSteps)
    for engine in [f.engine for f in opt._training.outer.fragments] if local else [opt.engine]:
        noted(engine, epochs)
    calls = EVERY[mode][2].get("num_batches", 1) * EVERY[mode][2].get("every", 1)
    opt.rejoin(params)
    while True:
        for _ in range(opt.step_counter % calls if local else 0, calls):
            grads = inputs.gradients(params, len(steps), member)
            EVERY[mode][0](opt, ((p, g) for p, g in zip(params, grads, strict=True)))
            steps.append((time.monotonic(), opt.world_size))
            if len(steps) == 1:
                (folder / f"{member}.first").write_text(str(steps[0][0]))
        if len(steps) >= READY * calls and not (folder / f"{member}.ready").exists():
            (folder / f"{member}.part").write_text(str(os.getpid()))
            (folder / f"{member}.part").rename(folder / f"{member}.ready")
        between(opt, params, member)
        x = np.array([(folder / "stop").exists()], np.int64)
        comm.all_reduce(x)
        if x[0]:
            break
    state = opt.state_dict()
    waiting = {f"{kind} {n}": a for kind in pending(state.get("states", {})) for n, a in state["states"][kind].items()}
    everyones = opt.global_parameters if local else {p.name: p.data for p in params}
    everyones = {f"{EVERYONES}{name}": value for name, value in everyones.items()}
    np.savez(folder / f"{member}.npz", **{p.name: p.data for p in params}, **waiting, **everyones)
    (folder / f"{member}.json").write_text(json.dumps({"sizes": sizes, "steps": steps, "epochs": epochs}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        train(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
