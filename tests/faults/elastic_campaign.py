"""Jobs of ``distopt run --elastic`` to which everything happens that ends a rank: none may hang, all must end well.

``python tests/faults/elastic_campaign.py [--over torch|mpi] [--jobs N] [--seed S] [KIND ...]`` starts N jobs of each
kind, one after the other, with the MPI or the torch of its own environment.  Ranks are killed, crash, stop, raise, call
``sys.exit`` or ``os._exit(3)``, or have no memory left, while they train, start, save or let another one in.  A job has
failed if it has not ended long after the time limit, if its exit code is not that of its last member, or if survivors
have other bits than as many threads.  What failed is printed with all that its job has said, and kept in a folder.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import losses

from distopt.resilience import job as marks
from distopt.run.processes import descendants

LIMIT = 8.0  # DISTOPT_TIMEOUT of the jobs, which a rank that is stopped is given
HUNG = 90.0  # seconds after which a job is given up
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "SIGABRT": signal.SIGABRT, "SIGSTOP": signal.SIGSTOP}
FAULTS = [*SIGNALS, "exception", "sys.exit", "os._exit(3)", "no memory"]
MODES = ["dense", "top-K", "dgc", "overlap", "three batches", "top-K in two phases", "half", "views"]
LOCAL = ["local steps", "local steps of top-K", "local steps in flight"]
# kind: modes, and how many ranks
KINDS = {
    "loop": ([*MODES, *LOCAL], (3, 4)),
    "start": (["dense"], (3,)),
    "save": ([*MODES, *LOCAL], (3, 4)),
    "leave": ([*MODES, "local steps"], (3, 4)),
    "grow": (["dense", "top-K", "local steps", "local steps in flight"], (3,)),
    "first": (["dense", "top-K", "local steps in flight"], (4,)),
    "together": ([*MODES, "local steps in flight"], (4,)),
    "in flight": (["local steps in flight"], (3, 4)),
    "slow": (["dense", "top-K"], (3,)),
    "full disk": (["dense", "local steps in flight"], (3,)),
}


class Job:
    """A job under way: where its ranks read what they shall do, and what they have said."""

    def __init__(self, kind, mode, over, ranks, folder, restarts=0):
        self.ranks, self.folder = ranks, folder
        command = [sys.executable, "-m", "distopt", "run", "-n", str(ranks), "--elastic", "--over", over]
        command += ["--restarts", str(restarts)] * bool(restarts)
        command += [__file__, "--rank", kind, mode, str(folder)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DISTOPT_TIMEOUT": str(LIMIT), "DISTOPT_FLIGHT": str(folder)}
        with (folder / "output").open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=env)

    def ready(self, count):
        losses.wait_for(count, self.folder, self.process)

    def order(self, member, deed):
        (self.folder / "part").write_text(deed)
        (self.folder / "part").rename(self.folder / f"{member}.deed")

    def await_ends(self, members):
        """Wait until these ranks have ended or wait for the others' end, and others may have gone on."""
        deadline = time.monotonic() + 3 * LIMIT
        for member in members:
            pid = int((self.folder / f"{member}.ready").read_text())
            while marks.state(pid) not in "ZX" and not (self.folder / f"{member}.left").exists():
                if time.monotonic() > deadline:
                    return
                time.sleep(0.05)
        time.sleep(1)

    def end(self):
        """(exit code, output); a job that hangs is ended, and has no code."""
        (self.folder / "stop").touch()
        try:
            code = self.process.wait(HUNG)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        return code, (self.folder / "output").read_text()

    def kill(self):
        if self.process.poll() is None:
            for pid in (*descendants(self.process.pid), self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()


def one(kind, over, seed, folder):
    """Start a job of this kind and judge it; return a line about it."""
    rng = random.Random(f"{kind} {over} {seed}")
    modes, sizes = KINDS[kind]
    mode, ranks = rng.choice(modes), rng.choice(sizes)
    job = Job(kind, mode, over, ranks, folder, restarts=9 * (kind == "grow"))
    victims, deeds = [], []
    try:
        if kind == "start":
            victims, deeds = [rng.randrange(ranks)], ["SIGKILL"]
            killed_at_start(job, rng)
            time.sleep(rng.uniform(1, 2))
        else:
            job.ready(ranks)
            time.sleep(rng.uniform(*losses.GAP))
            victims, deeds = chosen(kind, ranks, rng)
            came = ranks
            for victim, deed in zip(victims, deeds, strict=True):
                job.order(victim, deed)
                if kind == "grow":
                    came = replaced(job, came, rng)
                elif kind != "together":
                    time.sleep(rng.uniform(0.05, 0.6))
            job.await_ends(victims)
        code, said = job.end()
    finally:
        job.kill()
    about = f"{kind}, {mode}, {over}, {ranks} ranks, " + ", ".join(
        f"{d} of {v}" for v, d in zip(victims, deeds, strict=True)
    )
    assert code is not None, f"{about}: hangs\n{said}"
    if kind == "start" and over == "mpi" and code:  # MPI itself cannot do without a rank that it waits for
        assert "ended before" in said or "rank " in said, f"{about}: code {code}, nobody is named\n{said}"
        return f"{about}: {code}"
    assert code == 0, f"{about}: exit code {code}\n{said}"
    judge(kind, mode, ranks, victims, folder, about, said)
    return about


def chosen(kind, ranks, rng):
    """Whom something happens to, in this order, and what."""
    count = {"slow": 0, "full disk": 0, "together": rng.choice([2, ranks - 1]), "first": 2}.get(
        kind, rng.randint(1, ranks - 1)
    )
    victims = [0, 1][:count] if kind == "first" else rng.sample(range(ranks), count)
    faults = {"leave": ["sys.exit"], "grow": ["SIGKILL", "exception", "SIGSEGV"]}.get(kind, FAULTS)
    return victims, [rng.choice(faults) for _ in victims]


def killed_at_start(job, rng):
    """Kill a process of a rank up to 3 s after the launch."""
    time.sleep(rng.uniform(0.2, 3))
    kill_one_of(processes_of_ranks(job), rng)


def replaced(job, came, rng):
    """Wait until another rank than these has come; in 4 of 10 jobs it is killed on its way, and nobody comes for it."""
    if rng.random() < 0.4:
        before = processes_of_ranks(job)
        time.sleep(rng.uniform(0.3, 3))
        kill_one_of(processes_of_ranks(job) - before, rng)
        return came
    job.ready(came + 1)
    return came + 1


def processes_of_ranks(job):
    """Those that run the script, without the launchers that were given it."""
    found = set()
    for pid in descendants(job.process.pid):
        with contextlib.suppress(OSError):
            program, first, *_ = [*Path(f"/proc/{pid}/cmdline").read_text().split("\0"), ""]  # a zombie has none
            found |= {pid} if "python" in program and first.endswith("rank.py") else set()
    return found


def kill_one_of(pids, rng):
    if pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(sorted(pids)), signal.SIGKILL)


def judge(kind, mode, ranks, victims, folder, about, said):
    """Compare what the last ranks have with each other and with threads, and read what was saved."""
    logs = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json") if path.stem.isdigit()}
    assert logs, f"{about}: nobody is left\n{said}"
    if kind == "grow":
        losses.check_alike(folder, logs)
    elif kind != "start":
        assert set(logs) == set(range(ranks)) - set(victims), f"{about}: {sorted(logs)} are left\n{said}"
        errors = []
        for order in itertools.permutations(victims):  # two that end at once are lost in any order
            try:
                losses.check(mode, ranks, order, logs, folder)
                break
            except AssertionError as error:
                errors.append(error)
        else:
            raise AssertionError(f"{about}: other bits\n{errors[0]}\n{said}")
    if kind == "full disk":
        saves = [json.loads(path.read_text()) for path in folder.glob("*.failed")]
        assert saves[0], f"{about}: no save has failed"
        assert all(each == saves[0] for each in saves), f"{about}: saves failed {saves}"
    for saved in (folder / "saved").glob("step*"):
        if (saved / "all").exists():
            found = subprocess.run(
                [sys.executable, "-m", "distopt", "inspect", str(saved)],
                capture_output=True,
                text=True,
                check=False,
            )
            assert found.returncode == 0, f"{about}: {saved.name}\n{found.stdout}{found.stderr}"


def between(kind, folder):
    """What a rank does after each window: what it was told to, and a save."""
    failed = []

    def do(opt, params, member):
        deed, save = folder / f"{member}.deed", lambda: opt.save(folder / "saved", params, keep=3)
        if kind == "slow" and member == 1:
            time.sleep(0.05)
        if deed.exists():
            fault = deed.read_text()
            deed.unlink()
            fail(fault, folder / f"{member}.left", at_once=kind not in ("save", "loop", "in flight"))
        if kind == "save":
            save()
        if kind == "full disk" and opt.step_counter % 10 == 0:
            usual = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, usual[1]))
            try:
                save()
            except (OSError, RuntimeError):
                failed.append(opt.step_counter)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, usual)
            (folder / f"{member}.failed").write_text(json.dumps(failed))

    return do


def fail(fault, left, at_once):
    """End as told: a signal up to 20 ms later, anything else now."""
    if fault in SIGNALS:
        delay = 0 if at_once else random.uniform(0, 0.02)
        threading.Timer(delay, os.kill, (os.getpid(), SIGNALS[fault])).start()
    elif fault == "exception":
        raise ZeroDivisionError("a rank has failed")
    elif fault == "sys.exit":
        left.touch()
        sys.exit(0)
    elif fault == "os._exit(3)":
        os._exit(3)
    else:
        resource.setrlimit(
            resource.RLIMIT_AS, (int(Path("/proc/self/statm").read_text().split()[0]) * 4096 + 2**25,) * 2
        )
        bytearray(2**30)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=[*KINDS], metavar="KIND")
    parser.add_argument("--over", choices=("torch", "mpi"), default="torch")
    parser.add_argument("--jobs", type=int, default=3, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    failed, began = [], time.monotonic()
    for number, kind in itertools.product(range(given.jobs), given.kinds):
        folder = Path(tempfile.mkdtemp(prefix="elastic-"))
        try:
            print(one(kind, given.over, given.seed + number, folder), flush=True)
        except Exception as error:
            failed.append(kind)
            print(f"FAILED in {folder}: {type(error).__name__}: {error}", flush=True)
        else:
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            folder.rmdir()
    jobs = given.jobs * len(given.kinds)
    print(f"\n{given.over}: {jobs} jobs in {time.monotonic() - began:.0f} s, {len(failed)} failed: {failed}")
    return bool(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        kind, mode, folder = sys.argv[2], sys.argv[3], Path(sys.argv[4])
        losses.train(mode, folder, between(kind, folder))
    else:
        sys.exit(main())
