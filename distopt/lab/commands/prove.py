"""``distopt prove``: claims of this library, tried on this machine with new random numbers each time.

A claim is a function that makes the experiment, and returns what it has found; one that does not hold raises
AssertionError, as the laws do (``distopt.lab.laws``), with what differs.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import argparse
import hashlib
import importlib.util
import itertools
import os
import secrets
import signal
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distopt import DistOpt, Parameter, checkpoint
from distopt.checkpoint import CheckpointError
from distopt.comm import Communicator, LocalCommunicator, Metered
from distopt.comm.logical import with_ranks
from distopt.lab.commands import prove_jobs
from distopt.lab.commands.prove_jobs import Start
from distopt.lab.commands.prove_socket import FRAME, SocketRanks
from distopt.lab.laws import arrays, ranks, references
from distopt.lab.laws.inputs import KINDS, gradients, pairs, parameters
from distopt.lab.laws.modes import EXACT, MODES, OPTIMIZERS, ROUNDED
from distopt.lab.laws.runs import assert_equal_states, digest, require, train
from distopt.run.doctor_gpu import gpu_count
from distopt.run.launcher import check_brands, find_launcher
from distopt.run.processes import TIMED_OUT

OVER_RANKS = ("resume", "processes", "NaN", "laws")  # the claims of which ranks meet over MPI where there is one
REALS = (np.float32, np.float64)
SIZES = (1, 2, 63, 4097, 100_000, 1_000_000)  # of arrays that top-K selects from
ROUNDS = 20  # arrays of each kind that a compressor is given
TOLERANCES = {np.float64: 1e-12, np.float32: 1e-4}  # of an optimizer's result, relative to its largest entry
FLIPS = 200  # bits of a checkpoint
LOGICAL, STEPS = 6, 12  # ranks, and their steps
TRIED = ("dense", "half", "packed", "int8")  # modes
LARGE: dict[str, Any] = {"shapes": ((300, 40), (50,), (7,), (4001,)), "threshold": 5000}


class Trial(NamedTuple):
    """What a claim makes its experiment with: random numbers, and what starts two ranks, over MPI if there is one."""

    rng: np.random.Generator
    ranks: Start
    sockets: Start

    def seed(self) -> int:
        """Return a seed for the ranks."""
        return int(self.rng.integers(2**31))


def add_to(commands: Any) -> None:
    """Declare the command."""
    text = (__doc__ or "").partition("\n")[0]
    parser = commands.add_parser("prove", help="try what this library claims, on this machine", description=text)
    parser.add_argument("--seed", type=int, metavar="N", help="of all random numbers (default: another one each time)")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Print a line for each claim, as soon as it was tried, and what none of them looked at; return 1 if one failed."""
    seed = secrets.randbits(32) if args.seed is None else args.seed
    if seed < 0:
        print(f"distopt prove: --seed must be at least 0, got {seed}", file=sys.stderr)
        return 2
    missing = mpi_missing()
    start = prove_jobs.over_sockets if missing else prove_jobs.over_mpi
    print(f"seed {seed}; the same once more: distopt prove --seed {seed}", flush=True)
    failed = 0
    for number, (name, claim) in enumerate(CLAIMS.items()):
        trial = Trial(np.random.default_rng([seed, number]), start, prove_jobs.over_sockets)
        try:
            word, text = "PASS", claim(trial)
        except AssertionError as error:
            word, text = "FAIL", textwrap.shorten(str(error), 400, placeholder=" ...")
        except Exception as error:  # one of any kind is no claim that holds
            word, text = "FAIL", " ".join(f"{type(error).__name__}: {error}".split())
        failed += word == "FAIL"
        print(f"{word}  {name:12}  {text}", flush=True)
    for text in unseen(missing):
        print(f"not looked at: {text}")
    return int(failed > 0)


def mpi_missing() -> str:
    """Return why ranks cannot meet over MPI, "" if they can."""
    try:
        check_brands(find_launcher())
    except RuntimeError as error:
        return str(error)
    return ""


def unseen(missing: str) -> Iterator[str]:
    """Yield what no line looked at on this machine; ``missing``: why ranks could not meet over MPI."""
    if missing:
        lines = ", ".join(OVER_RANKS)
        yield f"MPI ({missing}); ranks of the lines {lines} met over TCP and local sockets instead"
    gpus = gpu_count()
    yield f"GPUs ({gpus} here; `distopt doctor` tries each)" if gpus else "GPUs (none here)"
    torch = "installed; its tests are those of the repository" if importlib.util.find_spec("torch") else "not installed"
    yield f"PyTorch ({torch})"
    yield "a network between hosts (all ranks ran on this one)"


def bytes_are_counted(trial: Trial) -> str:
    """The ledger's payload and wire are the bytes that are written to a socket, less a frame for each message."""
    found = trial.sockets(exchange, trial.seed(), 4).results()
    written, messages = (sum(rank[what] for rank in found) for what in ("written", "messages"))
    each = ", ".join(f"{mode} {payload:,}" for mode, payload in found[0]["payloads"].items())
    return (
        f"{written:,} bytes went over a TCP connection: the ledger's to the byte, and {messages} frames of "
        f"{FRAME.size} (4 steps, a rank: {each})"
    )


def exchange(pair: SocketRanks, seed: int, steps: int) -> dict[str, Any]:
    """Train in each mode, and compare the ledger with what was written to the socket."""
    payloads = {}
    for mode in TRIED:
        comm, written, messages = Metered(pair), pair.written, pair.messages
        train(comm, steps, mode=mode, seed=seed, **LARGE)
        data = pair.written - written - FRAME.size * (pair.messages - messages)
        lines = comm.report()
        start = lines.pop("start broadcast")["wire"]
        text = f"rank {pair.rank}, {mode}: {data:,} bytes of data were written to the socket, the ledger has"
        for amount, where in (("wire", "on the wire"), ("payload", "of payload")):
            payloads[mode] = sum(line[amount] for line in lines.values())
            require(payloads[mode] + start == data, f"{text} {payloads[mode] + start:,} {where}")
    other = int(pair.control.gather(str(pair.written))[1 - pair.rank])  # all that it has written is here
    came = pair.received_by_kernel(1 - pair.rank)
    pair.control.gather("")  # nobody has closed the connection yet, which counts as a byte
    text = f"rank {1 - pair.rank} wrote {other:,} bytes, the kernel of the other end counts {came}"
    require(came in (None, other), text)
    return {"payloads": payloads, "written": pair.written, "messages": pair.messages}


def runs_resume(trial: Trial) -> str:
    """A run of which a rank is killed by SIGKILL, and that is started again, ends with the bits of one that was not."""
    seed, steps, rank = trial.seed(), 20, int(trial.rng.integers(2))
    fatal = int(trial.rng.integers(5, steps))
    with tempfile.TemporaryDirectory() as unbroken, tempfile.TemporaryDirectory() as broken:
        expected = trial.ranks(go_on, unbroken, seed, steps, []).results()
        killed = trial.ranks(go_on, broken, seed, steps, [rank, fatal])
        text = f"rank {rank} was killed in step {fatal}, and the job ended with {killed.code}"
        require(killed.code not in (0, TIMED_OUT), text)
        resumed = trial.ranks(go_on, broken, seed, steps, []).results()
    saved = fatal // 5 * 5
    for number, ((start, found), (_, wanted)) in enumerate(zip(resumed, expected, strict=True)):
        text = f"rank {number} went on from step {start}, the last checkpoint was of step {saved}"
        require(start == saved, text)
        text = (
            f"rank {number} ended with sha256 {found:.16} of parameters and states, without a stop it is {wanted:.16}"
        )
        require(found == wanted, text)
    digests = " and ".join(f"{found:.12}" for _, found in resumed)
    return (
        f"rank {rank} was killed by SIGKILL in step {fatal} of {steps}; resumed from step {saved}, parameters and "
        f"states have the sha256 of a run without a stop: {digests} on the two ranks"
    )


def go_on(comm: Communicator, folder: str, seed: int, steps: int, fatal: list[int]) -> tuple[int, str]:
    """Go on from the newest checkpoint of a folder, saving every 5 steps; ``fatal``: who is killed, and in which step.

    Returns:
        The step it went on from, and a sha256 of this rank's parameters and states at the end.
    """
    params, opt = train(comm, 0, make=OPTIMIZERS["adam"], seed=seed, **LARGE)
    opt.load(folder, params)
    start = opt.step_counter
    for step in range(start, steps):
        loss = pairs(comm, params, step, seed)
        MODES["topk"](opt, killed(loss) if fatal == [comm.rank, step] else loss)
        if (step + 1) % 5 == 0:
            opt.save(folder, params)
    with tempfile.NamedTemporaryFile() as file:
        checkpoint.write(file.name, [{p.name: p.data for p in params}, opt.state_dict()], {})
        return start, hashlib.sha256(Path(file.name).read_bytes()).hexdigest()


def killed(loss: Iterator[Any]) -> Iterator[Any]:
    """Yield one gradient, and end this process before the next one."""
    yield next(loss)
    kill()
    yield from loss


def kill() -> None:
    """End this process as the kernel does when memory is short: at once, and without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def top_k_is_a_stable_sort(trial: Trial) -> str:
    """Top-K sends exactly the first k entries of numpy's stable sort by magnitude: ties go to the lowest index."""
    cases = list(itertools.product(SIZES, REALS, ("normal", "constant", "subnormal", "tied")))
    for n, dtype, kind in cases:
        x = KINDS[kind](trial.rng, n, dtype)
        arrays.top_k_is_a_stable_sort(x, int(trial.rng.integers(1, n + 1)), kind)
    return (
        f"exactly k entries, ties by index: {len(cases)} arrays of up to {max(SIZES):,} entries, as numpy's stable sort"
    )


def optimizers_are_their_equations(trial: Trial) -> str:
    """Every optimizer is within rounding of its paper's equations in float64, after 20 updates."""
    texts = []
    for dtype, tolerance in TOLERANCES.items():
        errors = {
            name: arrays.updates_are_the_equations(case, trial.rng, dtype, tolerance)
            for name, case in references.CASES.items()
        }
        error, name = max((error, name) for name, error in errors.items())
        texts.append(f"{error:.1e} in {np.dtype(dtype)} ({name})")
    return f"{len(references.CASES)} optimizers, 20 updates; largest relative error {', '.join(texts)}"


def ranks_agree_after_nan(trial: Trial) -> str:
    """A NaN of one rank is refused by all ranks, which end with the bits that they have without that step."""
    rank, at = int(trial.rng.integers(2)), int(trial.rng.integers(6))
    trial.ranks(ranks.nan_is_refused_by_all, TRIED, rank, at, trial.seed()).results()
    return (
        f"a NaN on rank {rank} in step {at}, {', '.join(TRIED)}, nonfinite='skip' and 'raise': both "
        "ranks refuse it, and have the bits of a run without that step"
    )


def laws_hold(trial: Trial) -> str:
    """Laws 2, 3, 5, 6 and 7, each in the modes that differ most; two ranks are one that has the whole batch."""
    error = max(trial.ranks(ranks.each_once, trial.seed()).results())
    return (
        f"dense training has the bits of one rank with the mean of both halves, {error:.1e} from SGD in float64; "
        "nothing is lost; both ranks have the same bits, for any buckets, overlap and sharding; "
        "resuming is never having stopped"
    )


def compressors_conserve(trial: Trial) -> str:
    """Law 1: kept and sent parts are the array as it was, to the bit, or within one unit in the last place."""
    compressors = [*((c, 0) for c in EXACT), *((c, 1) for c in ROUNDED)]
    kinds = list(itertools.product(range(ROUNDS), ("normal", "constant", "subnormal", "wide"), REALS))
    for (compressor, ulps), (_, kind, dtype) in itertools.product(compressors, kinds):
        x = KINDS[kind](trial.rng, int(trial.rng.integers(200, 3000)), dtype)
        arrays.conservation(compressor, x, ulps=ulps, residual=trial.rng.permutation(x))
    return (
        f"kept + sent is what was there: {len(compressors) * len(kinds):,} arrays, {len(EXACT)} compressors to the "
        f"bit, {len(ROUNDED)} that round within one unit in the last place"
    )


def damage_is_refused(trial: Trial) -> str:
    """A checkpoint with one flipped bit is refused, with the name of the file, and nothing of it is loaded."""
    run: dict[str, Any] = {"mode": "topk", "make": OPTIMIZERS["adam"], "seed": trial.seed()}
    with tempfile.TemporaryDirectory() as folder:
        params, opt = train(LocalCommunicator(), 3, **run, **LARGE)
        place = opt.save(folder, params)
        train(LocalCommunicator(), 1, 3, params, opt, **run)  # so that a load changes something
        before, state, files = digest(params), opt.state_dict(), sorted(place.iterdir())
        for _ in range(FLIPS):
            file = files[trial.rng.integers(len(files))]
            data, bit = file.read_bytes(), int(trial.rng.integers(8 * file.stat().st_size))
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
            text = f"bit {bit % 8} of byte {bit // 8} of {file.name} was flipped"
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                try:
                    opt.load(place, params)
                    raise AssertionError(f"{text}, and the checkpoint was loaded")
                except CheckpointError as error:
                    refused = f"{error}; {'; '.join(str(warning.message) for warning in warned)}"
            require(str(file) in refused, f"{text}, and another file was named: {refused}")
            file.write_bytes(data)
        require(digest(params) == before, "a refused checkpoint changed the parameters")
        assert_equal_states(opt.state_dict(), state)
        opt.load(place, params)  # it is whole again
        nbytes = sum(file.stat().st_size for file in files)
    return (
        f"{FLIPS} flipped bits in {len(files)} files of {nbytes:,} bytes: all refused by the file's name, none loaded"
    )


def processes_do_not_matter(trial: Trial) -> str:
    """Logical ranks learn the same on one process, on two, and on three of which one is killed and another comes."""
    seed, rng = trial.seed(), trial.rng
    expected = learned(LocalCommunicator(), seed)
    found = {"two processes": trial.ranks(learned, seed).results()}
    over, victim, fatal = elastic_over(), int(rng.integers(3)), int(rng.integers(2, STEPS - 4))
    if over:
        told = f"three, of which one was killed by SIGKILL in step {fatal} and another came"
        found[told] = prove_jobs.elastic(over, 3, learned, seed, victim, fatal).results()
    for which, processes in found.items():
        kept = {rank: of_rank for _, of in processes for rank, of_rank in of.items()}
        for number, (ended, _) in enumerate(processes):
            text = f"process {number} of {which} ended with sha256 {ended:.16}, one alone with {expected[0]:.16}"
            require(ended == expected[0], text)
        differ = sorted(rank for rank in expected[1] if kept.get(rank) != expected[1][rank])
        require(not differ, f"{which}: the residuals of logical ranks {', '.join(differ)} differ from those of one")
    others = ", ".join(found) if over else f"{', '.join(found)} (no process was killed: torch and Open MPI are missing)"
    return (
        f"{LOGICAL} logical ranks, {STEPS} steps of {', '.join(TRIED)} in turn, on one process, on {others}: one "
        f"sha256 of parameters, {expected[0]:.12}, and the same residuals"
    )


def elastic_over() -> str:
    """Return over what ranks can meet that go on without a lost one; '' if there is nothing."""
    if importlib.util.find_spec("torch"):
        return "torch"
    return "" if mpi_missing() or find_launcher().brand != "Open MPI" else "mpi"


def learned(comm: Communicator, seed: int, victim: int = -1, fatal: int = -1) -> tuple[str, dict[str, str]]:
    """Train logical ranks; ``victim``: of these processes the one that is killed in step ``fatal``.

    Returns:
        A sha256 of the parameters, and of each logical rank here one of what it keeps.
    """
    begins = not comm.outside
    params, dies = parameters(LARGE["shapes"], "float32", 0, seed), begins and comm.rank == victim
    opt = DistOpt(OPTIMIZERS["adam"](), with_ranks(comm, LOGICAL), threshold=LARGE["threshold"])
    opt.rejoin(params)

    def loss(rank: int) -> list[tuple[Parameter, np.ndarray]]:
        if dies and opt.step_counter == fatal:
            kill()
        return list(zip(params, gradients(params, opt.step_counter, rank, seed), strict=True))

    while (step := opt.step_counter) < STEPS:
        while victim >= 0 and step == fatal + 2 and comm.size < 3 and not comm.joiner_waits():
            time.sleep(0.01)  # a process starts in that time
        MODES[TRIED[step % len(TRIED)]](opt, loss)
    kept = {
        rank: hashlib.sha256(b"".join(of[s][p].tobytes() for s in sorted(of) for p in sorted(of[s]))).hexdigest()
        for rank, of in opt.state_dict()["states"].items()
    }
    return digest(params), kept


CLAIMS: dict[str, Callable[[Trial], str]] = {
    "bytes": bytes_are_counted,
    "resume": runs_resume,
    "processes": processes_do_not_matter,
    "top-K": top_k_is_a_stable_sort,
    "optimizers": optimizers_are_their_equations,
    "NaN": ranks_agree_after_nan,
    "laws": laws_hold,
    "conservation": compressors_conserve,
    "damage": damage_is_refused,
}
