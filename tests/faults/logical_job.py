"""A job of logical ranks, whose processes are killed at random instants of a step: a script, and what starts it.

``python tests/faults/logical_job.py [--histories] [--jobs N] [--seed S] [MODE ...]`` starts N jobs of each mode and
prints, for each, what its processes were doing when they were killed, and whether it has learned what one process alone
does.  With ``--histories`` others come too, are more or fewer as the script or a signal to the launcher asks, and are
killed while the ranks of a lost one move to those that are left.
"""

import argparse
import collections
import functools
import hashlib
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import ClassVar

import numpy as np

import distopt
from distopt import DistOpt, LocalSteps, Parameter, kernels, run_ranks
from distopt.comm import Logical
from distopt.comm.elastic import EpochGroup
from distopt.compress import DeepGradientCompression, ErrorFeedback, Half, Int8, Packed, TopK
from distopt.data import GlobalBatches
from distopt.engine.local_ranks import to_bytes
from distopt.optim import SGD, Adam

V, STEPS, SHAPES = 12, 12, [(600, 700), (7,), (400_000,)]
ADOPTION, JOIN = ", in an adoption", ", as others came"
SIGNALS = {"SIGUSR1": signal.SIGUSR1, "SIGUSR2": signal.SIGUSR2}
MODES = {
    "dense": (None, "auto", 1),
    "half": (Half(), "auto", 1),
    "int8": (ErrorFeedback(Int8()), "two_phase", 1),
    "top-K gathered": (ErrorFeedback(TopK(0.01)), "gather", 1),
    "packed top-K in two phases": (ErrorFeedback(Packed(TopK(0.01))), "two_phase", 1),
    "dgc": (DeepGradientCompression(TopK(0.01), weight_decay=1e-3), "two_phase", 1),
    "three batches": (ErrorFeedback(TopK(0.01)), "gather", 3),
}


class Training:
    """A model, and steps of it with a mode."""

    def __init__(self, comm, mode):
        rng = np.random.default_rng(0)
        self.params = [Parameter(f"p{k}", rng.standard_normal(s).astype(np.float32)) for k, s in enumerate(SHAPES)]
        self.compressor, self.exchange, batches = MODES[mode]
        rule = SGD(0.1) if mode == "dgc" else Adam(0.01)
        self.opt = DistOpt(rule, comm, threshold=900_000, num_batches=batches)
        # Most of a step is its exchange: a loss shifts what was drawn once.
        self.drawn = [rng.standard_normal(p.data.shape).astype(np.float32) for p in self.params]

    def loss(self, rank):
        shift = 13 * rank + self.opt.step_counter
        return [(p, np.roll(x, shift) * np.float32(rank + 1)) for p, x in zip(self.params, self.drawn, strict=True)]

    def step(self):
        self.opt.step(self.loss, self.compressor, exchange=self.exchange)

    def rejoin(self):
        self.opt.rejoin(self.params)

    def learned(self):
        return [p.data for p in self.params]

    def digests(self):
        """Of the parameters, and of what each rank here keeps."""
        states = self.opt.engine.store.states()
        kept = {
            str(rank): _digest(
                f"{name} {p}".encode() + of[name][p].tobytes() for name in sorted(of) for p in sorted(of[name])
            )
            for rank, of in states.items()
        }
        return _digest(x.tobytes() for x in self.learned()), kept


class TorchTraining(Training):
    """A model of PyTorch with dropout and batch normalization."""

    def __init__(self, comm, mode):
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        nn = torch.nn
        layers = nn.Linear(64, 600), nn.BatchNorm1d(600), nn.ReLU(), nn.Dropout(0.2), nn.Linear(600, 700)
        self.model, self.entropy = nn.Sequential(*layers), nn.functional.cross_entropy
        self.x = torch.from_numpy(np.random.default_rng(0).standard_normal((480, 64)).astype(np.float32))
        self.y, self.data = torch.arange(480) % 700, GlobalBatches(480, batch=96, seed=0, ranks=V)
        self.rule = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.compressor, self.exchange, _ = MODES["packed top-K in two phases"]

    def loss(self, rank):
        ids = self.data.ids(rank)
        return self.entropy(self.model(self.x[ids]), self.y[ids])

    def rejoin(self):
        self.opt.rejoin()

    def learned(self):
        return [x.numpy() for x in self.model.state_dict().values()]


class Synchronized(TorchTraining):
    """Steps of the script's optimizer."""

    def __init__(self, comm, mode):
        from distopt.torch import synchronize

        super().__init__(comm, mode)
        given = {"optimizer": self.rule, "group": comm, "exchange": self.exchange}
        self.opt = synchronize(self.model, self.compressor, **given)

    def step(self):
        for rank in self.opt.logical:
            with self.opt.of(rank):
                self.loss(rank).backward()
        self.rule.step()


class Wrapped(TorchTraining):
    """Steps of a DistOpt."""

    def __init__(self, comm, mode):
        super().__init__(comm, mode)
        self.opt = DistOpt(self.rule, comm, params=self.model)


class Local(Training):
    """Local steps, exchanged after every third one."""

    options: ClassVar = {"every": 3, "compressor": ErrorFeedback(Packed(TopK(0.01))), "exchange": "two_phase"}
    options |= {"fragments": 2, "delay": 1, "alpha": 0.25}

    def __init__(self, comm, mode):
        super().__init__(comm, "dense")
        self.opt = LocalSteps(Adam(0.01), comm, threshold=900_000, **self.options)

    def step(self):
        self.opt(self.loss)

    def learned(self):
        return list(self.opt.global_parameters.values())

    def digests(self):
        state = self.opt.state_dict()
        outer = [fragment["outer"]["states"] for fragment in state["fragments"]]
        return _digest(x.tobytes() for x in self.learned()), {
            rank: _digest([to_bytes({"own": own, "outer": [of[rank] for of in outer]})])
            for rank, own in state["inner"].items()
        }


class TorchLocal(Local, TorchTraining):
    """Local steps of a model of PyTorch, whose optimizer the script calls."""

    def __init__(self, comm, mode):
        from distopt.torch import local_steps

        TorchTraining.__init__(self, comm, mode)
        self.opt = local_steps(self.model, self.rule, group=comm, **self.options)

    def step(self):
        for rank in self.opt.logical:
            with self.opt.of(rank):
                self.rule.zero_grad()
                self.loss(rank).backward()
                self.rule.step()

    def rejoin(self):
        pass

    def digests(self):
        return _digest(x.numpy().tobytes() for x in self.learned()), {
            rank: _digest([to_bytes(own)]) for rank, own in self.opt._ranks.trees().items()
        }


TORCH = {"torch, synchronized": Synchronized, "torch, DistOpt": Wrapped, "torch, local steps": TorchLocal}
OTHERS = {"local steps": Local, **TORCH}


def made(comm, mode):
    """A training in a mode."""
    return OTHERS.get(mode, Training)(comm, mode)


def _digest(parts):
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def alone(mode):
    """What one process learns."""

    def main(comm):
        training = made(Logical(comm, V), mode)
        while training.opt.step_counter < STEPS:
            training.step()
        return training.digests()

    return run_ranks(1, main)[0]


class Kernels:
    """Notes which kernel runs, how long all of a step but those that pack have run, and whether ranks move."""

    def __init__(self, membership):
        self.inside, self.seconds, self.begun = "no kernel", 0.0, threading.Event()
        self.membership, self.epochs = membership, threading.Semaphore(0)
        # Why ranks move, and until how many transactions have ended.
        self.moves, self.until = "", 0.0
        self.killer, self.late = None, False
        for name, kernel in list(vars(kernels).items()):
            if type(kernel).__name__.endswith("Kernel") and name != "pack":
                setattr(kernels, name, functools.partial(self._call, name, kernel))
        reconfigure = EpochGroup.reconfigure

        def noted(group, epoch, admit):
            comes, before, self.moves = membership.outside, membership.size, JOIN if admit else ADOPTION
            self.until = math.inf
            comes or self.epochs.release()
            reconfigure(group, epoch, admit)
            comes and self.epochs.release()
            self.until, after = membership.most + 1, (membership._next or membership).size - group.came
            self.moves = JOIN if comes or after == before else ADOPTION

        EpochGroup.reconfigure = noted

    def _call(self, name, kernel, *arguments, **options):
        self.inside = name
        self.begun.set()
        began = time.perf_counter()
        try:
            return kernel(*arguments, **options)
        finally:
            self.inside = "no kernel"
            self.seconds += time.perf_counter() - began

    def kill_within(self, seconds, later, place):
        """Kill this process in a kernel, so many seconds after one has begun, or between two; note where it was."""

        def kill():
            self.begun.wait()
            time.sleep(seconds)
            while self.inside == "no kernel" and not self.late:
                time.sleep(1e-5)
            time.sleep(later)
            self._kill(place)

        self.begun.clear()
        self.killer = threading.Thread(target=kill, daemon=True)
        self.killer.start()

    def end(self):
        """Wait for the end, if this process is to be killed in or between kernels: somebody must go on."""
        self.late = True
        if self.killer:
            self.killer.join()

    def kill_as_ranks_move(self, epochs, later, place):
        """Kill this process so many seconds after so many times have begun in which ranks move."""

        def kill():
            for _ in range(epochs):
                self.epochs.acquire()
            time.sleep(later)
            self._kill(place)

        threading.Thread(target=kill, daemon=True).start()

    def _kill(self, place):
        place.write_text(self.inside + self.moves * (self.membership.ended < self.until))
        os.kill(os.getpid(), signal.SIGKILL)


def train(mode, folder, plan):
    """Train.

    ``plan``: by member, the step in which it is killed, and after what part of its kernels, or more; those that are
    killed as ranks move, as the how many-th time, and how much later; by step, what becomes of the number of processes.
    """
    training = made(distopt.world("cpu", logical=V), mode)
    opt, member = training.opt, os.environ.get("DISTOPT_MEMBER", "0")
    world, place = opt.communicator, folder / f"{member}.killed"
    running, (at, part, later) = Kernels(world.membership), plan["kills"].get(member, (-1, 0.0, 0.0))
    if member in plan["moves"]:
        running.kill_as_ranks_move(*plan["moves"][member], place)
    came = world.outside
    training.rejoin()
    seen = opt.step_counter if came else -1  # the others have come to this step before
    while opt.step_counter < STEPS:
        if (step := opt.step_counter) != seen:
            change_size(opt, plan["sizes"].get(str(step)), member, folder / f"{step}.size")
        if step == at:
            running.kill_within(part * running.seconds, later, place)
            at = -1
        if step == STEPS - 1:
            running.end()
        running.seconds = 0.0
        training.step()
    (folder / f"{member}.end").write_text(json.dumps(training.digests()))


def change_size(opt, size, member, place):
    """Ask for so many processes, or for one more or less by a signal, or give one that may come some time for it."""
    if isinstance(size, int):
        place.touch()
        opt.resize(size)
    elif size in SIGNALS and member == "0":
        place.touch()
        os.kill(os.getppid(), SIGNALS[size])
    if size:
        until = time.monotonic() + 2
        while not opt.communicator.joiner_waits() and time.monotonic() < until:
            time.sleep(0.01)


def job(mode, seed, folder, ranks=5):
    """Start a job in which all processes but one are killed; return what was killed in what, and what went wrong."""
    rng = random.Random(f"{mode} {seed}")
    victims = rng.sample(range(ranks), ranks - 1)
    # Two of them in one step, so that the second may fall into the adoption; none so late that nobody goes on.
    steps = [rng.randrange(1, STEPS - 2) for _ in victims[1:]]
    steps = [steps[0], *steps]
    kills = {v: (k, rng.uniform(0, 2), rng.uniform(0, 2e-3)) for v, k in zip(victims, steps, strict=True)}
    killed, wrong, _ = run(mode, seed, folder, ranks, [], {"kills": kills, "moves": {}, "sizes": {}})
    return killed, wrong


def history(mode, seed, folder):
    """Start a job to which much happens; return what was killed in what, what went wrong, and what has happened."""
    rng = random.Random(f"history {mode} {seed}")
    ranks, signals = rng.randrange(3, 6), rng.random() < 0.5
    # One process lives, so that somebody goes on: the first one where a signal ends the last.
    lives = 0 if signals else rng.randrange(ranks)
    members = [member for member in range(ranks + 6) if member != lives]
    victims = rng.sample(members[: ranks - 1], rng.randrange(2, ranks)) + rng.sample(members[ranks - 1 :], 2)
    moves = rng.sample(victims, 2)
    kills = {v: (rng.randrange(1, STEPS - 2), rng.uniform(0, 2), rng.uniform(0, 2e-3)) for v in victims}
    plan = {
        "kills": {v: kills[v] for v in victims if v not in moves},
        "moves": {v: (rng.randrange(1, 3), rng.uniform(0, 0.1)) for v in moves},
        "sizes": {
            step: rng.choice(
                [*SIGNALS, "SIGUSR1", "wait"] if signals else ["wait", rng.randrange(max(lives + 1, 3), 8)]
            )
            for step in rng.sample(range(2, STEPS), 4)
        },
    }
    options = ["--restarts", rng.randrange(1, 5), "--spares", rng.randrange(2)]
    killed, wrong, output = run(mode, seed, folder, ranks, options, plan)
    came = sum(map(int, re.findall(r"(\d+) ranks? came at", output)))
    happened = {
        "kills": len(killed),
        "kills inside kernels": sum(not where.startswith("no kernel") for where in killed),
        "kills in adoptions": sum(where.endswith(ADOPTION) for where in killed),
        "kills as others came": sum(where.endswith(JOIN) for where in killed),
        "ended by SIGUSR2": output.count("as SIGUSR2 asks"),
        "joins": came,
        "resizes": len(list(folder.glob("*.size"))),
    }
    told = f"{mode}, seed {seed}: {ranks} processes, {options}, {json.dumps(plan)}"
    return killed, wrong and f"{told}\n{wrong}", happened


def run(mode, seed, folder, ranks, options, plan):
    """Start a job; return where its processes were killed, what went wrong, and what it has printed."""
    import forks

    arguments = ["--elastic", "--over", "torch", *options, __file__, "--rank", mode, str(folder), json.dumps(plan)]
    code, output = forks.distopt_run(ranks, *arguments, timeout=100)
    killed = [path.read_text() for path in folder.glob("*.killed")]
    ends = [json.loads(path.read_text()) for path in folder.glob("*.end")]
    learned, kept = alone(mode)
    found = {rank: digest for _, of in ends for rank, digest in of.items()}
    if re.search(rf"killed by SIGKILL after step {STEPS}\b", output):  # no step follows in which others adopt its ranks
        kept = {rank: kept[rank] for rank in found}
    if code or not ends or any(end[0] != learned for end in ends) or found != kept:
        wrong = f"{mode}, seed {seed}: code {code}, learned {ends}, expected {learned, kept}\n{output}"
        return killed, wrong, output
    return killed, "", output


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", nargs=3)
    parser.add_argument("--histories", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("modes", nargs="*")
    args = parser.parse_args()
    if args.rank:
        mode, folder, plan = args.rank
        return train(mode, Path(folder), json.loads(plan))
    from launch import extend_path

    extend_path()
    inside, totals = collections.Counter(), collections.Counter(failures=0)
    for seed in range(args.seed, args.seed + args.jobs):
        for mode in args.modes or [*MODES, *OTHERS]:
            with tempfile.TemporaryDirectory() as folder:
                killed, wrong, *happened = (history if args.histories else job)(mode, seed, Path(folder))
            inside.update(killed)
            totals.update({"jobs": 1, "failures": bool(wrong)}, **collections.Counter(*happened))
            words = "".join(f"{n} {what}, " for of in happened for what, n in of.items())
            print(wrong or f"{mode}, seed {seed}: as one process; {words}killed in {', '.join(killed)}", flush=True)
    print(f"{sum(inside.values())} killed: {dict(inside.most_common())}; {dict(totals)}")
    return totals["failures"] > 0


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent)]
    sys.exit(main())
