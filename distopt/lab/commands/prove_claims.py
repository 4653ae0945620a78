"""The claims of ``distopt prove``: each is a function that makes the experiment, and returns what it has found.

A claim that does not hold raises ``Refuted`` with what differs.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import itertools
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from distopt import DistOpt, Parameter
from distopt.checkpoint import CheckpointError
from distopt.comm import LocalCommunicator
from distopt.compress import (
    DCT,
    Chunks,
    Compressor,
    DeepGradientCompression,
    Dense,
    ErrorFeedback,
    ExchangeContext,
    Half,
    Int4,
    Int8,
    OneBit,
    Packed,
    Threshold,
    TopK,
    TwoBit,
)
from distopt.compress.checking import differs
from distopt.compress.planes import unpack_entries
from distopt.lab.commands import prove_ranks, prove_references
from distopt.lab.commands.prove_jobs import Start
from distopt.lab.commands.prove_socket import FRAME
from distopt.optim import Adam
from distopt.run.processes import TIMED_OUT

REALS = (np.float32, np.float64)
SIZES = (1, 2, 63, 4097, 100_000, 1_000_000)  # of arrays that top-K selects from
ROUNDS = 20  # arrays of each kind that a compressor is given
UPDATES = 20  # of an optimizer
TOLERANCES = {np.float64: 1e-12, np.float32: 1e-4}  # of an optimizer's result, relative to its largest entry
ROUNDING = 1e-5  # of dense training, the same
FLIPS = 200  # bits of a checkpoint

EXACT: tuple[Compressor, ...] = (  # to the bit, by Law 1
    Dense(),
    Half(),
    Half("bfloat16"),
    TopK(0.01),
    TopK(0.5),
    Threshold(0.7),
    Chunks(8, 64),
    Packed(TopK(0.5)),
    Packed(TopK(0.5), value="float16"),
    Packed(Chunks(8, 64), value="bfloat16"),
    Int8(),
    Int4(),
    TwoBit(0.5),
    ErrorFeedback(TopK(0.01)),
    ErrorFeedback(Half()),
    ErrorFeedback(Int4()),
    DCT(ErrorFeedback(Packed(Chunks(8, 64)))),
    DeepGradientCompression(TopK(0.01), exclude_1d=False),
)
ROUNDED: tuple[Compressor, ...] = (  # within one unit in the last place
    TwoBit(0.3),
    OneBit(),
    OneBit(0.3),
    Int8(rounding="stochastic"),
    Packed(TopK(0.5), value="int8"),
    Packed(TopK(0.5), value="2bit"),
    ErrorFeedback(OneBit()),
)


class Refuted(Exception):
    """A claim does not hold; the text says what differs."""


class Trial(NamedTuple):
    """What a claim makes its experiment with.

    Attributes:
        rng: random numbers.
        ranks: starts two processes, over MPI if there is one.
        sockets: starts two processes with a TCP connection between them.
    """

    rng: np.random.Generator
    ranks: Start
    sockets: Start

    def seed(self) -> int:
        """Return a seed for the ranks."""
        return int(self.rng.integers(2**31))


def require(holds: bool, text: str) -> None:
    """Raise Refuted with a text unless something holds."""
    if not holds:
        raise Refuted(text)


def require_same(one: Sequence[float], other: Sequence[float], what: str) -> None:
    """Raise Refuted with the first two numbers that differ."""
    for at, (a, b) in enumerate(zip(one, other, strict=True)):
        require(a == b, f"{what} differ: number {at} is {a!r} and {b!r}")


def bytes_are_counted(trial: Trial) -> str:
    """The ledger's payload and wire are the bytes that are written to a socket, less a frame for each message."""
    ranks = trial.sockets("exchange", trial.seed(), 4).complete()
    payloads, messages = {}, 0
    for rank, found in enumerate(ranks):
        for mode, counted in found["modes"].items():
            data = counted["written"] - FRAME.size * counted["messages"]
            lines = counted["report"]
            steps = [line for verb, line in lines.items() if verb != "start broadcast"]
            payload, wire = (sum(line[amount] for line in steps) for amount in ("payload", "wire"))
            start = lines["start broadcast"]["wire"]
            text = f"rank {rank}, {mode}: {data:,} bytes of data were written to the socket"
            require(wire + start == data, f"{text}, the ledger has {wire + start:,} on the wire")
            require(payload + start == data, f"{text}, the ledger has {payload + start:,} of payload")
            payloads[mode], messages = payload, messages + counted["messages"]
        came = ranks[1 - rank]["received by the kernel"]
        text = f"rank {rank} wrote {found['written']:,} bytes, the kernel of the other end counts {came}"
        require(came in (None, found["written"]), text)
    written = sum(found["written"] for found in ranks)
    each = ", ".join(f"{mode} {payload:,}" for mode, payload in payloads.items())
    return (
        f"{written:,} bytes went over a TCP connection: the ledger's to the byte, and {messages} frames of "
        f"{FRAME.size} (4 steps, a rank: {each})"
    )


def runs_resume(trial: Trial) -> str:
    """A run of which a rank is killed by SIGKILL, and that is started again, ends with the bits of one that was not."""
    seed, steps, rank = trial.seed(), 20, int(trial.rng.integers(2))
    fatal = int(trial.rng.integers(5, steps))
    with tempfile.TemporaryDirectory() as unbroken, tempfile.TemporaryDirectory() as broken:
        expected = trial.ranks("train", unbroken, seed, steps, []).complete()
        killed = trial.ranks("train", broken, seed, steps, [rank, fatal])
        text = f"rank {rank} was killed in step {fatal}, and the job ended with {killed.code}"
        require(killed.code not in (0, TIMED_OUT), text)
        resumed = trial.ranks("train", broken, seed, steps, []).complete()
    saved = fatal // 5 * 5
    for number, (found, wanted) in enumerate(zip(resumed, expected, strict=True)):
        text = f"rank {number} went on from step {found['start']}, the last checkpoint was of step {saved}"
        require(found["start"] == saved, text)
        text = f"rank {number} ended with sha256 {found['digest']:.16} of parameters and states, without a stop"
        require(found["digest"] == wanted["digest"], f"{text} it is {wanted['digest']:.16}")
    digests = " and ".join(f"{found['digest']:.12}" for found in resumed)
    return (
        f"rank {rank} was killed by SIGKILL in step {fatal} of {steps}; resumed from step {saved}, parameters and "
        f"states have the sha256 of a run without a stop: {digests} on the two ranks"
    )


def top_k_is_a_stable_sort(trial: Trial) -> str:
    """Top-K sends exactly the first k entries of numpy's stable sort by magnitude: ties go to the lowest index."""
    count = 0
    for n, dtype, kind in itertools.product(SIZES, REALS, (_normal, _constant, _denormal, _tied)):
        x, k = kind(trial.rng, n, dtype), int(trial.rng.integers(1, n + 1))
        expected = np.sort(np.argsort(-np.abs(x), kind="stable")[:k])
        left = x.copy()
        index, values = unpack_entries(TopK(k / n).compress(left, {}, ExchangeContext()), dtype)
        case = f"the {k} largest of {n} {np.dtype(dtype)} ({kind.__name__[1:]})"
        require(index.size == k, f"{case}: {index.size} entries were sent")
        wrong = np.flatnonzero(index != expected)
        text = f"{case}: {wrong.size} entries are not those of the sort"
        require(not wrong.size, text + (f", first {index[wrong[0]]} for {expected[wrong[0]]}" if wrong.size else ""))
        rest = np.delete(x, expected)
        require(values.tobytes() == x[expected].tobytes(), f"{case}: a value that was sent is not that of the array")
        require(np.delete(left, expected).tobytes() == rest.tobytes(), f"{case}: an entry that was not sent changed")
        require(not left[expected].any(), f"{case}: an entry that was sent is still there")
        count += 1
    return f"exactly k entries, ties by index: {count} arrays of up to {max(SIZES):,} entries, as numpy's stable sort"


def optimizers_are_their_equations(trial: Trial) -> str:
    """Every optimizer is within rounding of its paper's equations in float64, after 20 updates."""
    largest = {}
    for dtype, tolerance in TOLERANCES.items():
        errors = {}
        for name, case in prove_references.CASES.items():
            opt, w = case.make(), trial.rng.standard_normal((24, 10)).astype(dtype)
            arrays = [w.astype(np.float64), *np.zeros((case.slots, *w.shape))]
            for update in range(UPDATES):
                g = (trial.rng.integers(-16, 17, w.shape) / 8).astype(dtype)  # of which Signum's sums are exact
                opt.apply("w", w, g)
                opt.step()
                arrays = list(case.rule(update + 1, *arrays, g.astype(np.float64)))
            errors[name] = float(abs(w - arrays[0]).max() / abs(arrays[0]).max())
            text = f"{name} in {np.dtype(dtype)} is {errors[name]:.1e} from its equations after {UPDATES} updates"
            require(errors[name] <= tolerance, f"{text}, {tolerance:.0e} is allowed")
        largest[np.dtype(dtype)] = max((error, name) for name, error in errors.items())
    texts = [f"{error:.1e} in {dtype} ({name})" for dtype, (error, name) in largest.items()]
    return f"{len(prove_references.CASES)} optimizers, {UPDATES} updates; largest relative error {', '.join(texts)}"


def ranks_agree_after_nan(trial: Trial) -> str:
    """A NaN of one rank is refused by all ranks, which end with the bits that they have without that step."""
    rank, step = int(trial.rng.integers(2)), int(trial.rng.integers(prove_ranks.STEPS))
    ranks = trial.ranks("meet_nan", trial.seed(), rank, step).complete()
    for case in ranks[0]:
        met = [found[case]["met"] for found in ranks]
        for number, found in enumerate(ranks):
            refused, errors = found[case]["met"]["refused"], found[case]["met"]["errors"]
            text = f"{case}, a NaN on rank {rank} in step {step}: rank {number}"
            skips = case.startswith("'skip'")
            require(refused == [step] * skips, f"{text} refused steps {refused}")
            wanted = not errors if skips else len(errors) == 1 and f"rank {rank}" in errors[0]
            require(wanted, f"{text} raised {errors}")
            same = found[case]["met"]["states"] == found[case]["expected"]["states"]
            require(same, f"{text} does not have the parameters and states of a run without that step")
        digests = [m["parameters"] for m in met]
        require(len(set(digests)) == 1, f"{case}, after a NaN on rank {rank}: parameters differ, {digests}")
        require(met[0]["errors"] == met[1]["errors"], f"{case}: ranks raised {met[0]['errors']}, {met[1]['errors']}")
    return (
        f"a NaN on rank {rank} in step {step}, {', '.join(prove_ranks.MODES)}, nonfinite='skip' and 'raise': both "
        "ranks refuse it, and have the bits of a run without that step"
    )


def dense_is_the_whole_batch(trial: Trial) -> str:
    """Dense training of two ranks is that of one rank on the whole batch, to the bit where it adds up the halves."""
    seed, alone = trial.seed(), LocalCommunicator()
    two, other = trial.ranks("fit", seed, 2).complete()
    require_same(two, other, "the weights of rank 0 and of rank 1")
    halves, whole = (prove_ranks.fit(alone, seed, parts) for parts in (2, 1))
    require_same(two, halves, "the weights of two ranks, and of one with the mean of both halves,")
    error = float(abs(np.subtract(two, whole)).max() / abs(np.array(whole)).max())
    require(error <= ROUNDING, f"two ranks are {error:.1e} from one on the whole batch, {ROUNDING:.0e} is allowed")
    return (
        f"30 steps of {len(two)} weights: the bits of one rank with the mean of both halves; {error:.1e} from one rank "
        f"on the whole batch at once ({ROUNDING:.0e} is allowed)"
    )


def compressors_conserve(trial: Trial) -> str:
    """Kept and sent parts add up to the array as it was: to the bit, or within one unit in the last place."""
    arrays = 0
    for compressor, ulps in (*((c, 0) for c in EXACT), *((c, 1) for c in ROUNDED)):
        for _, kind, dtype in itertools.product(range(ROUNDS), (_normal, _constant, _denormal, _wide), REALS):
            x = kind(trial.rng, int(trial.rng.integers(200, 3000)), dtype)
            before, kept, sent = moved(compressor, x, trial.rng)
            wrong = differs(kept, sent, before, ulps)
            if wrong.any():
                at = int(wrong.argmax())
                allowed = "to the bit" if not ulps else "within one ulp"
                text = f"entry {at} of {x.size} {x.dtype} ({kind.__name__[1:]}) was {before[at]!r}"
                raise Refuted(f"{compressor!r} {allowed}: {text}, {kept[at]!r} kept and {sent[at]!r} sent")
            arrays += 1
    return (
        f"kept + sent is what was there: {arrays:,} arrays, {len(EXACT)} compressors to the bit, {len(ROUNDED)} that "
        "round within one unit in the last place"
    )


def moved(compressor: Compressor, x: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compress an array, with a memory that is not empty where there is one.

    Returns:
        What there was to send, what is kept, and what receivers get.
    """
    context, state = ExchangeContext(), compressor.kept({})
    before = compressor.coefficients(x, context).copy() if isinstance(compressor, DCT) else x.copy()
    if compressor.stateful:
        state.update({"residual": rng.permutation(before), "velocity": np.zeros_like(x)})
        before += state["residual"]
    sent = np.empty_like(x)
    payload = compressor.compress(x, state, context)
    if payload is x:
        return before, np.zeros_like(x), x
    compressor.decompress_all([payload], sent, context)
    return before, state["residual"] if compressor.stateful else x, sent


def damage_is_refused(trial: Trial) -> str:
    """A checkpoint with one flipped bit is refused, with the name of the file, and nothing of it is loaded."""
    seed, alone = trial.seed(), LocalCommunicator()
    with tempfile.TemporaryDirectory() as folder:
        params = prove_ranks.parameters(seed)
        opt = DistOpt(Adam(0.01), alone, threshold=5000)
        for step in range(3):
            opt.step(prove_ranks.gradients(params, seed, step), ErrorFeedback(TopK(0.05)))
        place = opt.save(folder, params)
        opt.step(prove_ranks.gradients(params, seed, 3), ErrorFeedback(TopK(0.05)))  # so that a load changes something
        before, files = prove_ranks.digest(params, opt.state_dict()), sorted(place.iterdir())
        for _ in range(FLIPS):
            file = files[trial.rng.integers(len(files))]
            bit = int(trial.rng.integers(8 * file.stat().st_size))
            flip(file, bit)
            refused = refusal(opt, place, params)
            text = f"bit {bit % 8} of byte {bit // 8} of {file.name} was flipped"
            require(bool(refused), f"{text}, and the checkpoint was loaded")
            require(str(file) in refused, f"{text}, and another file was named: {refused}")
            flip(file, bit)
        require(prove_ranks.digest(params, opt.state_dict()) == before, "a refused checkpoint changed the training")
        opt.load(place, params)  # it is whole again
        nbytes = sum(file.stat().st_size for file in files)
    return (
        f"{FLIPS} flipped bits in {len(files)} files of {nbytes:,} bytes: all refused by the file's name, none loaded"
    )


def refusal(opt: DistOpt, place: Path, params: list[Parameter]) -> str:
    """Return what is said of a checkpoint that is not loaded, "" if it was."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            opt.load(place, params)
        except CheckpointError as error:
            return f"{error}; {'; '.join(str(warning.message) for warning in told)}"
    return ""


def flip(file: Path, bit: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def _normal(rng: np.random.Generator, n: int, dtype: type) -> np.ndarray:
    return rng.standard_normal(n).astype(dtype)


def _constant(rng: np.random.Generator, n: int, dtype: type) -> np.ndarray:
    return np.full(n, rng.standard_normal(), dtype)


def _denormal(rng: np.random.Generator, n: int, dtype: type) -> np.ndarray:
    least: np.ndarray = np.finfo(dtype).smallest_subnormal * rng.integers(-1000, 1000, n).astype(dtype)
    return least


def _tied(rng: np.random.Generator, n: int, dtype: type) -> np.ndarray:
    return rng.integers(-3, 4, n).astype(dtype)


def _wide(rng: np.random.Generator, n: int, dtype: type) -> np.ndarray:
    return (rng.standard_normal(n) * 2.0 ** rng.integers(-20, 20, n)).astype(dtype)


CLAIMS: dict[str, Callable[[Trial], str]] = {
    "bytes": bytes_are_counted,
    "resume": runs_resume,
    "top-K": top_k_is_a_stable_sort,
    "optimizers": optimizers_are_their_equations,
    "NaN": ranks_agree_after_nan,
    "whole batch": dense_is_the_whole_batch,
    "conservation": compressors_conserve,
    "damage": damage_is_refused,
}
