"""observe: the quality of compression, against numpy in float64; observing changes no bit of the training."""

import json
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_virtual_ranks import MODES as OF_VIRTUAL_RANKS
from test_virtual_ranks import SHAPES as MANY

import laws
from distopt import DistOpt, Parameter, Trainer, run_ranks, simulate
from distopt.comm import LocalCommunicator, Metered
from distopt.comm.control import PeerLeft
from distopt.compress import (
    DCT,
    Compressor,
    DeepGradientCompression,
    ErrorFeedback,
    Half,
    OneBit,
    Packed,
    Threshold,
    TopK,
    Traits,
    TwoBit,
)
from distopt.exchange.sharding import ShardBounds
from distopt.kernels.layout import BucketLayout
from distopt.lab.experiment import CsvFile, Experiment, JsonLines, TensorBoard, read
from distopt.lab.observe.quality import BLOCK, Quality
from distopt.optim import SGD
from launch import distopt_run, needs_mpi, run_mpi

SHAPES = [(40, 50), (7,), (3, 5, 9), (0,), ()]
SIZES = [math.prod(shape) for shape in SHAPES]
RANKS, STEPS = 3, 4


def flat(arrays):
    return np.concatenate([np.asarray(a).reshape(-1) for a in arrays])


# ------------------------------------------------------------------------------------------- what the papers would send


def largest(v, density):
    sent = np.zeros_like(v)
    chosen = np.argsort(-np.abs(v), kind="stable")[: math.ceil(density * v.size)]
    sent[chosen] = v[chosen]
    return sent


def two_bits(v):
    return np.where(np.abs(v) >= 0.5, np.copysign(np.float32(0.5), v), np.float32(0))


def one_bit(v):
    scale = np.float32(np.abs(v).mean(dtype=np.float64))
    return np.where(v > 0, scale, -scale)


def rounded(v):
    return (v / 4).astype(np.float16).astype(np.float32) * 4  # 3 ranks


class Feedback:
    """What one rank sends and keeps, in float32; the memory may be left out."""

    def __init__(self, send, memory=True):
        self.send, self.memory, self.kept = send, memory, np.float32(0)

    def __call__(self, gradient):
        before = gradient + self.kept
        sent = self.send(before)
        kept = before - sent
        self.kept = kept if self.memory else np.float32(0)
        return sent, kept


class Momentum:
    """Deep Gradient Compression of one rank: 5 % of each matrix, and all of the rest."""

    def __init__(self):
        self.u = self.v = np.zeros(sum(SIZES), np.float32)

    def __call__(self, gradient):
        self.u = np.float32(0.9) * self.u + gradient
        before = self.v + self.u
        parts = np.split(before, np.cumsum(SIZES)[:-1])
        sent = flat([largest(p, 0.05) if len(s) > 1 else p for p, s in zip(parts, SHAPES, strict=True)])
        matrices = flat([np.full(n, len(s) > 1) for n, s in zip(SIZES, SHAPES, strict=True)])
        self.u = np.where((sent != 0) & matrices, np.float32(0), self.u)
        self.v = before - sent
        return sent, self.v


CASES = {
    "top-K": (ErrorFeedback(TopK(0.02)), lambda: Feedback(lambda v: largest(v, 0.02))),
    "top-K without memory": (TopK(0.1), lambda: Feedback(lambda v: largest(v, 0.1), memory=False)),
    "threshold": (ErrorFeedback(Threshold(1.5)), lambda: Feedback(lambda v: np.where(np.abs(v) >= 1.5, v, 0))),
    "half": (ErrorFeedback(Half()), lambda: Feedback(rounded)),
    "half without memory": (Half(), lambda: Feedback(rounded, memory=False)),
    "2 bits": (ErrorFeedback(TwoBit(0.5)), lambda: Feedback(two_bits)),
    "1 bit": (ErrorFeedback(OneBit()), lambda: Feedback(one_bit)),
    "packed": (
        ErrorFeedback(Packed(TopK(0.05), value="bfloat16")),
        lambda: Feedback(lambda v: largest(v, 0.05).astype(ml_dtypes.bfloat16).astype(np.float32)),
    ),
    "DGC": (DeepGradientCompression(TopK(0.05)), Momentum),
}


def expected(make):
    """The numbers of every step and rank."""
    ranks, found = [make() for _ in range(RANKS)], []
    for step in range(STEPS):
        gradients = [flat(laws.gradients(laws.parameters(SHAPES), step, rank)) for rank in range(RANKS)]
        shares = [rank(g) for rank, g in zip(ranks, gradients, strict=True)]
        total, dense = np.sum([s for s, _ in shares], 0, np.float64), np.sum(gradients, 0, np.float64)
        cosine = total @ dense / np.linalg.norm(total) / np.linalg.norm(dense)
        found.append([])
        for (sent, kept), g in zip(shares, gradients, strict=True):
            sent, kept, g = (x.astype(np.float64) for x in (sent, kept, g))
            found[-1].append(
                {
                    "energy": 1 - np.sum(kept**2) / np.sum((sent + kept) ** 2),
                    "residual": np.linalg.norm(kept),
                    "residual_ratio": np.linalg.norm(kept) / np.linalg.norm(g),
                    "age": np.abs(kept).sum() / np.abs(sent).sum(),
                    "density": np.mean(sent != 0),
                    "cosine": cosine,
                }
            )
    return found


def close(numbers, reference):
    assert list(numbers) == list(reference)
    for name, value in numbers.items():
        assert value == pytest.approx(reference[name], rel=2e-5, abs=2e-8), name


@pytest.mark.parametrize("case", CASES)
def test_observed_numbers_equal_a_float64_computation(case):
    compressor, make = CASES[case]

    def main(comm):
        seen, params = [], laws.parameters(SHAPES)
        opt = DistOpt(SGD(0.1), comm)
        opt.observe(lambda *call: seen.append(call), every=1)
        for step in range(STEPS):
            opt.step(laws.pairs(comm, params, step), compressor)
        return seen

    ranks, steps = run_ranks(RANKS, main), expected(make)
    for rank in range(RANKS):
        for k, (step, numbers) in enumerate(ranks[rank]):
            assert step == k + 1
            close(numbers, steps[k][rank])


@pytest.mark.parametrize("case", [case for case in CASES if "half" not in case])
def test_in_two_phases_what_each_rank_sends_is_observed(case, monkeypatch):
    """The sum, to which gradients are compared, is that of the owners; virtual ranks have the means of threads.

    Borders stay, as a rank also sends what it owed of a part that it gives away.
    """
    monkeypatch.setattr(ShardBounds, "see", lambda *_: None)
    compressor, make = CASES[case]

    def train(step_of, seen, params, opt):
        opt.observe(lambda *call: seen.append(call[1]), every=1)
        applied = []
        for step in range(STEPS):
            before = flat([p.data for p in params])
            opt.step(step_of(step), compressor, exchange="two_phase")
            applied.append(before - flat([p.data for p in params]))
        return seen, applied

    def main(comm):
        params = laws.parameters(SHAPES)
        return train(lambda step: laws.pairs(comm, params, step), [], params, DistOpt(SGD(1.0), comm))

    ranks, steps = run_ranks(RANKS, main), expected(make)
    for step in range(STEPS):
        gradients = [flat(laws.gradients(laws.parameters(SHAPES), step, rank)) for rank in range(RANKS)]
        total, dense = ranks[0][1][step].astype(np.float64), np.sum(gradients, 0, np.float64)
        cosine = total @ dense / np.linalg.norm(total) / np.linalg.norm(dense)
        for rank in range(RANKS):
            numbers = ranks[rank][0][step]
            assert numbers["cosine"] == pytest.approx(cosine, rel=1e-4)
            close(numbers, steps[step][rank] | {"cosine": numbers["cosine"]})
    params = laws.parameters(SHAPES)
    virtual, _ = train(
        lambda step: lambda rank: laws.pairs(laws.VirtualRank(rank, RANKS), params, step),
        [],
        params,
        simulate(RANKS, SGD(1.0)),
    )
    for step, numbers in enumerate(virtual):
        for name in ("energy", "density", "cosine"):
            mean = np.mean([ranks[rank][0][step][name] for rank in range(RANKS)])
            assert numbers[name] == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_virtual_ranks_have_their_mean(case):
    compressor, make = CASES[case]
    seen, params = [], laws.parameters(SHAPES)
    sim = simulate(RANKS, SGD(0.1))
    sim.observe(lambda step, numbers: seen.append(numbers), every=1)
    for step in range(STEPS):
        sim.step(lambda rank, step=step: laws.pairs(laws.VirtualRank(rank, RANKS), params, step), compressor)
    for numbers, ranks in zip(seen, expected(make), strict=True):
        volume = {name: numbers.pop(name) for name in ("payload", "wire")}
        close(numbers, {name: np.mean([rank[name] for rank in ranks]) for name in ranks[0]})
    rows = {row["phase"]: row for row in sim.ledger.by("phase")}
    assert rows["quality"]["calls"] == STEPS
    assert volume["wire"] == rows["gradients"]["sent"]


@given(
    seed=st.integers(0, 99),
    sizes=st.lists(st.integers(0, 3 * BLOCK // 2), min_size=1, max_size=4),
    dtype=st.sampled_from("fd"),
)
def test_sums_do_not_depend_on_buckets_and_blocks(seed, sizes, dtype):
    rng = np.random.default_rng(seed)
    gradient, sent, kept = ([rng.standard_normal(n).astype(dtype) for n in sizes] for _ in range(3))
    quality = Quality()
    for parts in zip(gradient, sent, kept, strict=True):
        parts[1][rng.random(parts[1].size) < 0.5] = 0
        members = BucketLayout(["x"], [parts[0].shape], [0], dtype)
        quality.of_rank(0).add_gradient(members, parts[0])
        quality.compare(members, parts[1], parts[0])
        quality.of_rank(0).add_sent(members, parts[1].copy(), parts[2])
    numbers, (g, s, k) = quality.numbers(), (flat(x).astype(np.float64) for x in (gradient, sent, kept))
    if not np.any(s):
        return
    assert numbers["energy"] == pytest.approx(1 - np.sum(k**2) / np.sum((s + k) ** 2), rel=1e-5, abs=1e-6)
    assert numbers["residual_ratio"] == pytest.approx(np.linalg.norm(k) / np.linalg.norm(g), rel=1e-9)
    assert numbers["age"] == pytest.approx(np.abs(k).sum() / np.abs(s).sum(), rel=1e-9)
    assert numbers["density"] == np.mean(s != 0)
    assert numbers["cosine"] == pytest.approx(s @ g / np.linalg.norm(s) / np.linalg.norm(g), rel=1e-9, abs=1e-15)


class Signs(Compressor):
    """A compressor of a user's, whose payload is the array itself; what it drops it does not tell."""

    traits = Traits(summable=True)

    def payload_bytes(self, n, itemsize=4, layout=None):
        return itemsize * n

    def compress(self, x, state, context):
        np.sign(x, out=x)
        return x

    def decompress(self, payload, out, context):
        pass

    def __repr__(self):
        return "Signs()"


def test_a_compressor_may_return_the_gradient_array_as_payload():
    def main(comm):
        seen, params = [], laws.parameters(SHAPES)
        before, signs = flat(p.data for p in params), flat(np.sign(g) for g in laws.gradients(params, 0, comm.rank))
        opt = DistOpt(SGD(1.0), comm)
        opt.observe(lambda step, numbers: seen.append(numbers), every=1)
        opt.step(laws.pairs(comm, params, 0), Signs())
        gradients = [flat(laws.gradients(params, 0, rank)) for rank in range(2)]
        total, dense = np.sum(np.sign(gradients), 0, np.float64), np.sum(gradients, 0, np.float64)
        np.testing.assert_allclose(before - flat(p.data for p in params), total / 2, atol=1e-6)
        assert seen[0]["energy"] == 1
        assert seen[0]["density"] == np.mean(signs != 0)
        assert seen[0]["cosine"] == pytest.approx(total @ dense / np.linalg.norm(total) / np.linalg.norm(dense))
        return True

    assert all(run_ranks(2, main))


# ------------------------------------------------------------------------------------------------------- Little's law


def ages(gradient, density, steps):
    """What each step tells of one constant stream, and what it sent of every entry."""
    w = Parameter("w", np.zeros(gradient.size))
    opt, told, sent = DistOpt(SGD(1.0), LocalCommunicator()), [], []
    opt.observe(lambda step, numbers: told.append(numbers), every=1)
    for _ in range(steps):
        before = w.data.copy()
        opt.step([(w, gradient.copy())], ErrorFeedback(TopK(density)), break_even=False)
        sent.append(before - w.data)
    return told, np.array(sent)


@pytest.mark.parametrize("density", [0.5, 0.1, 0.05])
def test_the_age_of_a_constant_gradient_is_half_the_turns_between_sends(density):
    """One in 1 / density turns: of what a turn sends, the gradients have waited 0, 1, ... 1 / density - 1 steps."""
    told, _ = ages(np.ones(100), density, 60)
    for numbers in told[20:]:
        assert numbers["age"] == pytest.approx((1 / density - 1) / 2)
        assert numbers["density"] == density


@pytest.mark.thorough
def test_the_age_is_how_long_gradients_have_waited():
    """Some 50 times as large as others; every gradient's wait is counted, from what moves the parameters."""
    gradient = np.random.default_rng(3).lognormal(0, 1, 200).clip(0.2, 10)
    steps, begin = 2500, 500
    told, sent = ages(gradient, 0.05, steps)
    waited = 0.0
    for magnitude, turns in zip(gradient, sent.T, strict=True):
        at = np.flatnonzero(turns > gradient.min() / 2)
        gaps = np.diff(at)[at[1:] > begin]
        waited += magnitude * (gaps * (gaps - 1) / 2).sum()
    mean = waited / (gradient.sum() * (steps - begin))
    assert 5 < mean < 20
    weights = sent[begin:].sum(1)
    assert np.average([numbers["age"] for numbers in told[begin:]], weights=weights) == pytest.approx(mean, rel=0.01)


# ----------------------------------------------------------------------------------------------------- the same bits


FREQUENCIES = [mode for mode, tried in laws.TRIES.items() if isinstance(tried.compressor, DCT)]  # are not observed
MODES = {mode: step for mode, step in OF_VIRTUAL_RANKS.items() if mode not in FREQUENCIES}


def trained(comm, mode, every, overlap=False, **options):
    """Parameters and residuals, as texts, after some steps that are looked at or not; which of them were."""
    params, seen = laws.parameters(MANY), []
    opt = DistOpt(SGD(0.05), comm, threshold=200, overlap=overlap, **options)
    opt.observe(lambda step, numbers: seen.append(step), every)
    for step in range(STEPS):
        MODES[mode](opt, laws.pairs(comm, params, step))
    states = opt.state_dict()["states"]
    kept = [states[state][name] for state in sorted(states) for name in sorted(states[state])]
    return [x.tobytes().hex() for x in [*(p.data for p in params), *kept]], seen


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", MODES)
def test_observing_changes_no_bit_of_the_training(mode):
    def main(comm):
        alone, _ = trained(comm, mode, 0)
        for every in (1, 2, 3):
            watched, seen = trained(comm, mode, every)
            assert watched == alone
            assert seen == list(range(every, STEPS + 1, every))
        return True

    assert all(run_ranks(3, main))


@pytest.mark.parametrize("sync_on_apply", [True, False])
def test_an_accumulation_window_is_observed_as_one_step(sync_on_apply):
    def main(comm):
        options = {"num_batches": 2, "sync_on_apply": sync_on_apply}
        watched, seen = trained(comm, "topk", 2, **options)
        assert watched == trained(comm, "topk", 0, **options)[0]
        return seen

    assert run_ranks(2, main) == [[2], [2]]


def test_every_exchange_of_an_accumulation_window_is_observed():
    """Its norms are root mean squares, and its density and energy are those of both calls together."""

    def main(comm, num_batches):
        seen, params = [], laws.parameters(SHAPES)
        opt = DistOpt(SGD(0.1), comm, num_batches=num_batches, sync_on_apply=False)
        opt.observe(lambda *call: seen.append(call), every=1)
        for step in range(4):
            opt.step(laws.pairs(comm, params, step), ErrorFeedback(Threshold(1.5)))
        return seen

    alone, windows = (run_ranks(2, lambda comm, n=n: main(comm, n)) for n in (1, 2))
    for rank in range(2):
        steps = [numbers for _, numbers in alone[rank]]
        assert [step for step, _ in windows[rank]] == [1, 2]
        for (_, found), calls in zip(windows[rank], (steps[:2], steps[2:]), strict=True):
            kept = np.array([numbers["residual"] for numbers in calls])
            had = np.array([numbers["residual"] / numbers["residual_ratio"] for numbers in calls])
            before = [k**2 / (1 - numbers["energy"]) for k, numbers in zip(kept, calls, strict=True)]
            assert found["residual"] == pytest.approx(math.sqrt(np.mean(kept**2)))
            assert found["residual_ratio"] == pytest.approx(math.sqrt(np.sum(kept**2) / np.sum(had**2)))
            assert found["energy"] == pytest.approx(1 - np.sum(kept**2) / np.sum(before))
            assert found["density"] == pytest.approx(np.mean([numbers["density"] for numbers in calls]))


def test_a_rank_that_has_joined_reports_no_gradient_and_its_residual(tmp_path):
    """Its residual is still being sent; monitors write the ratio to no gradient as NaN."""

    def main(comm):
        params, seen = laws.parameters([(40,)]), []
        lines, table = JsonLines(tmp_path / f"{comm.rank}.json"), CsvFile(tmp_path / f"{comm.rank}.csv")
        opt = DistOpt(SGD(0.1), comm)
        opt.observe(lambda *call: [callback(*call) for callback in (lambda *c: seen.append(c), lines, table)], every=1)
        for step in range(1 + comm.rank):
            opt.step(laws.pairs(comm, params, step), ErrorFeedback(TopK(0.1)))
        opt.join()
        lines.close()
        table.close()
        return [(math.isnan(numbers["residual_ratio"]), numbers["residual"] > 0) for _, numbers in seen]

    assert run_ranks(2, main) == [[(False, True), (True, True)], [(False, True), (False, True)]]
    assert [json.loads(line)["residual_ratio"] == "NaN" for line in (tmp_path / "0.json").read_text().splitlines()] == [
        False,
        True,
    ]
    assert (tmp_path / "0.csv").read_text().splitlines()[-1].split(",")[3] == "nan"


class Elsewhere(ErrorFeedback):
    """A memory that has a name of its own."""

    def compress(self, x, state, context):
        state["residual"] = state.pop("mine", np.zeros_like(x))
        payload = super().compress(x, state, context)
        state["mine"] = state.pop("residual")
        return payload


def test_numbers_of_a_compressor_that_keeps_its_residual_elsewhere_are_nan():
    seen, params = [], laws.parameters(SHAPES)
    opt = DistOpt(SGD(0.1), LocalCommunicator())
    opt.observe(lambda step, numbers: seen.append(numbers), every=1)
    opt.step(laws.pairs(opt.communicator, params, 0), Elsewhere(TopK(0.1)))
    assert {name for name, value in seen[0].items() if math.isnan(value)} == {
        "energy",
        "residual",
        "residual_ratio",
        "age",
    }


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mode", MODES)
def test_observing_changes_no_bit_and_no_byte_of_virtual_ranks(mode):
    found = []
    for every in (0, 2):
        params, sim = laws.parameters(MANY), simulate(3, SGD(0.05), threshold=200)
        sim.observe(every=every)
        for step in range(STEPS):
            MODES[mode](sim, lambda rank, step=step: laws.pairs(laws.VirtualRank(rank, 3), params, step))  # noqa: B023
        rows = [e for e in sim.ledger.entries if e.phase != "quality"]
        found.append(([p.data.tobytes() for p in params], [tuple(map(str, row)) for row in rows]))
    assert found[0] == found[1]


OVERLAP = ("dense", "half", "half that may overflow", "topk without memory")  # as nothing outlives their steps


def on_mpi(comm):
    """All modes, and those that overlap."""
    for mode, overlap in [*((mode, False) for mode in MODES), *((mode, True) for mode in OVERLAP)]:
        watched, seen = trained(comm, mode, 2, overlap)
        assert watched == trained(comm, mode, 0, overlap)[0], (mode, overlap)
        assert seen == [2, 4]
    return {"done": np.ones(1)}


@needs_mpi
def test_observing_changes_nothing_on_mpi(tmp_path):
    assert len(run_mpi(2, on_mpi, tmp_path)) == 2


# --------------------------------------------------------------------------------------------- who may look, and when


def test_only_observed_steps_send_one_message_more():
    def main(comm):
        metered, params = Metered(comm), laws.parameters(SHAPES)
        opt = DistOpt(SGD(0.1), metered, threshold=100)
        opt.observe(every=3)
        for step in range(7):
            opt.step(laws.pairs(comm, params, step), ErrorFeedback(TopK(0.1)))
        opt.observe(every=0)
        for step in range(3):
            opt.step(laws.pairs(comm, params, step), ErrorFeedback(TopK(0.1)))
        extra = [entry for entry in metered.ledger.entries if entry.phase == "quality"]
        assert [entry.step for entry in extra] == [k for k in (3, 6) for _ in opt.plan.buckets]
        assert {entry.verb for entry in extra} == {"all_reduce"}
        return True

    assert all(run_ranks(2, main))


def test_ranks_that_observe_at_different_steps_are_refused():
    def main(comm):
        params = laws.parameters(SHAPES)
        opt = DistOpt(SGD(0.1), comm)
        opt(laws.pairs(comm, params, 0))
        opt.observe(every=10 if comm.rank == 1 else 20)
        with pytest.raises(ValueError, match=r"observe\(every=20\).* observe\(every=10\)") as caught:
            opt(laws.pairs(comm, params, 1))
        opt.observe(print if comm.rank == 1 else None, every=20)
        assert opt(laws.pairs(comm, params, 1))
        return str(caught.value)

    assert len(set(run_ranks(3, main))) == 1


def test_a_callback_that_raises_ends_its_rank_alone():
    def main(comm):
        params = laws.parameters(SHAPES)
        opt = DistOpt(SGD(0.1), comm)
        opt.observe((lambda step, numbers: 1 / 0) if comm.rank == 1 else None, every=2)
        opt(laws.pairs(comm, params, 0))
        if comm.rank == 1:
            with pytest.raises(ZeroDivisionError):
                opt(laws.pairs(comm, params, 1))
            assert opt.step_counter == 2
            return None
        opt(laws.pairs(comm, params, 1))
        with pytest.raises(PeerLeft, match="rank 1 left"):
            opt(laws.pairs(comm, params, 2))
        return None

    run_ranks(3, main)


SCRIPT = """
import numpy as np
import distopt

world = distopt.world()
w = distopt.Parameter("w", np.ones(10, np.float32))
opt = distopt.DistOpt(distopt.optim.SGD(0.1), world)
opt.observe((lambda step, numbers: 1 / 0) if world.rank == 1 else None, every=2)
for step in range(1000):
    opt([(w, np.ones(10, np.float32))])
"""


@needs_mpi
def test_nobody_waits_for_a_process_whose_callback_raises(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    code, output = distopt_run(3, script)
    assert code != 0
    assert "ZeroDivisionError" in output


class Board:
    """A summary writer."""

    def __init__(self):
        self.seen = []

    def add_scalar(self, name, number, step):
        self.seen.append((name, number, step))


def test_monitors_and_records_accept_the_observed_numbers(tmp_path):
    board = Board()
    names = ["energy", "residual", "residual_ratio", "age", "density", "cosine", "payload", "wire"]

    def main(comm):
        metered, params = Metered(comm), laws.parameters(SHAPES)
        opt = DistOpt(SGD(0.1), metered)
        if comm.rank:
            opt.observe(every=2)
            for step in range(6):
                opt.step(laws.pairs(comm, params, step), ErrorFeedback(TopK(0.1)))
            return
        table, lines, writer = CsvFile(tmp_path / "a.csv"), JsonLines(tmp_path / "a.json"), TensorBoard(board)
        with Experiment(tmp_path / "run.json", "top-K") as run:
            opt.observe(lambda *call: [callback(*call) for callback in (table, lines, writer, run)], every=2)
            for step in range(6):
                opt.step(laws.pairs(comm, params, step), ErrorFeedback(TopK(0.1)))
        table.close()
        lines.close()
        curves, rows = read(tmp_path / "run.json")["curves"], {r["phase"]: r for r in metered.ledger.by("phase")}
        assert set(rows) == {"start", "gradients", "quality"}
        assert curves["payload"]["values"][-1] == rows["gradients"]["payload"]
        assert curves["wire"]["values"][-1] == rows["gradients"]["sent"]

    run_ranks(2, main)
    written = [json.loads(line) for line in (tmp_path / "a.json").read_text().splitlines()]
    assert [row["step"] for row in written] == [2, 4, 6]
    assert (tmp_path / "a.csv").read_text().splitlines()[0] == ",".join(["step", *names])
    assert board.seen == [(name, row[name], row["step"]) for row in written for name in names]
    curves = read(tmp_path / "run.json")["curves"]
    assert {name: curve["values"] for name, curve in curves.items()} == {n: [row[n] for row in written] for n in names}


def test_a_trainer_can_be_observed():
    p, seen = Parameter("p", np.zeros(100, np.float32)), []
    trainer = Trainer(
        [p], "sgd", compression_params={"type": "2bit", "threshold": 0.5}, communicator=LocalCommunicator()
    )
    trainer.observe(lambda step, numbers: seen.append((step, numbers["density"])), every=1)
    p.grad = np.float32(np.arange(100) < 30)
    trainer.step(1)
    p.grad = np.float32(np.arange(100) < 10)
    trainer.allreduce_grads()
    assert len(seen) == 1
    trainer.update(1)
    assert seen == [(1, 0.3), (2, 0.3)]  # what was kept is sent too


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("error", [OSError, FloatingPointError, KeyboardInterrupt])
def test_a_callback_that_raises_leaves_no_gradient_behind(halves, error):
    """The step is done when it raises: its gradient is not applied again."""

    def callback(step, numbers):
        raise error

    p = Parameter("p", np.zeros(4, np.float32))
    trainer = Trainer([p], "sgd", {"learning_rate": 1.0}, communicator=LocalCommunicator())
    trainer.observe(callback, every=1)
    p.grad = np.ones(4, np.float32)
    if halves:
        trainer.allreduce_grads()
    step, again = (trainer.update, RuntimeError) if halves else (trainer.step, ValueError)
    with pytest.raises(error):
        step(1)
    with pytest.raises(again, match=r"stale since the last step|update must come after allreduce_grads"):
        step(1)
    assert p.data.tolist() == [-1, -1, -1, -1]


def test_partial_refused_and_hand_made_steps_are_not_observed():
    seen, params = [], laws.parameters(SHAPES)
    opt = DistOpt(SGD(0.1), LocalCommunicator(), nonfinite="skip")
    opt.observe(lambda step, numbers: seen.append((step, numbers)), every=1)
    opt.backward_and_partial_update(laws.pairs(opt.communicator, params, 0))
    bad = [(p, np.full_like(p.data, np.nan)) for p in params]
    assert not opt.step(bad, ErrorFeedback(TopK(0.1)))
    opt.update(params[0], np.zeros_like(params[0].data))
    opt.step()
    assert seen == []
    opt(laws.pairs(opt.communicator, params, 1))
    sure = {"energy": 1, "residual": 0, "residual_ratio": 0, "age": 0, "density": 1, "cosine": 1}
    assert seen == [(3, sure)]
    zeros = [(p, np.zeros_like(p.data)) for p in params]
    opt.step(zeros, ErrorFeedback(TopK(0.1)))
    assert seen[-1] == (4, sure | {"density": 0})


def test_observed_numbers_of_infinite_gradients_are_nan():
    seen, params = [], laws.parameters(SHAPES)
    opt = DistOpt(SGD(0.1), LocalCommunicator(), nonfinite="propagate")
    opt.observe(lambda step, numbers: seen.append(numbers), every=1)
    opt.step([(p, np.full_like(p.data, np.inf)) for p in params], ErrorFeedback(TwoBit()))
    assert math.isnan(seen[0]["energy"])
    assert math.isnan(seen[0]["cosine"])


def test_wrong_arguments_of_observe_are_refused(monkeypatch):
    opt = DistOpt(SGD(0.1), LocalCommunicator())
    with pytest.raises(TypeError, match="callback must be callable with a step and its numbers, or None, got 3"):
        opt.observe(3)
    with pytest.raises(TypeError, match=r"every must be an integer, got 1\.5"):
        opt.observe(print, every=1.5)
    with pytest.raises(ValueError, match="every must be at least 0, got -1"):
        opt.observe(print, every=-1)
    monkeypatch.setattr(opt.engine.comm, "gpu", 0)
    with pytest.raises(ValueError, match="observe: the communicator must have its arrays on the host"):
        opt.observe(print)
