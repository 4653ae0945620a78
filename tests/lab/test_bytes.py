"""Bytes of steps are those of gradients: other messages have lines of their own, in reports and in tables."""

import json
import sys

import numpy as np
import pytest

import laws
from distopt import DistOpt, Trainer, run_ranks, simulate
from distopt.cli import main
from distopt.comm import LocalCommunicator, Metered
from distopt.comm.ledger import Ledger
from distopt.comm.message import MessageTag
from distopt.compress import DeepGradientCompression, Dense, ErrorFeedback, Half, Packed, Threshold, TopK, TwoBit
from distopt.lab.experiment import Experiment
from distopt.optim import LARS, SGD
from launch import distopt_run, finish, needs_mpi

SHAPES = [(40, 5), (50,)]
PARAMETERS = 4 * 250
BUCKET = 4 * (208 + 50)  # members begin at multiples of 64 bytes
STEPS = 3
MODES = {
    "dense": Dense(),
    "half": Half(),
    "top-K": ErrorFeedback(TopK(0.02)),
    "threshold": ErrorFeedback(Threshold(1.5)),
    "2 bits": ErrorFeedback(TwoBit(0.5)),
    "packed": ErrorFeedback(Packed(TopK(0.05))),
    "DGC": DeepGradientCompression(TopK(0.01)),
}


def line(calls, payload, wire):
    return {"calls": calls, "payload": payload, "wire": wire}


def trained(comm, mode="dense", **options):
    """A metered communicator, the DistOpt and the parameters of three steps on it."""
    metered, params = Metered(comm), laws.parameters(SHAPES, rank=comm.rank)
    opt = DistOpt(SGD(0.1), metered, **options)
    for step in range(STEPS):
        opt.step(laws.pairs(comm, params, step), MODES[mode])
    return metered, opt, params


def of_all_steps(metered):
    total = metered.ledger.total_of_steps()
    return total["calls"], total["payload"], total["sent"]


# ----------------------------------------------------------------------------------------------- the report


def test_parameters_at_the_start_have_a_line_of_their_own():
    def main(comm):
        metered, _, _ = trained(comm, "top-K")
        assert metered.report() == {
            "all_gather": line(STEPS, STEPS * 5 * 8, STEPS * 5 * 8),
            "start broadcast": line(2, PARAMETERS, PARAMETERS * (comm.rank == 0)),
        }
        assert of_all_steps(metered) == (STEPS, STEPS * 40, STEPS * 40)
        assert metered.ledger.total()["payload"] == STEPS * 40 + PARAMETERS
        return True

    assert all(run_ranks(2, main))


def test_steps_have_the_same_bytes_with_and_without_a_start():
    def main(comm):
        with_start, without = (of_all_steps(trained(comm, mode, broadcast=b)[0]) for b in (True, False))
        return with_start == without

    for mode in MODES:
        assert all(run_ranks(2, main)), mode


@pytest.mark.parametrize(
    ("name", "send"),
    [
        ("other broadcast", lambda opt, metered, params: opt.broadcast(params)),
        ("other all_reduce", lambda opt, metered, params: opt.all_reduce(np.zeros(9))),
        ("other all_reduce", lambda opt, metered, params: metered.all_reduce(np.zeros(9))),
        ("other all_gather", lambda opt, metered, params: metered.all_gather(np.zeros(9))),
    ],
)
def test_messages_sent_by_hand_do_not_count_as_steps(name, send):
    def main(comm):
        metered, opt, params = trained(comm)
        before, steps = metered.report(), of_all_steps(metered)
        send(opt, metered, params)
        after = metered.report()
        assert after.pop(name)["payload"] > 0
        assert (after, of_all_steps(metered)) == (before, steps)
        return True

    assert all(run_ranks(3, main))


def test_a_loop_by_hand_may_say_that_it_sends_gradients():
    metered = Metered(LocalCommunicator())
    with metered.tagged(MessageTag("gradients", 1)):
        metered.all_reduce(np.zeros(10))
    assert metered.report() == {"all_reduce": line(1, 80, 0)}


def test_measurements_of_quality_do_not_count_as_steps():
    def main(comm):
        metered, params = Metered(comm), laws.parameters(SHAPES, rank=comm.rank)
        opt, seen = DistOpt(SGD(0.1), metered), []
        opt.observe(lambda step, numbers: seen.append(numbers), every=1)
        for step in range(STEPS):
            opt.step(laws.pairs(comm, params, step), MODES["top-K"])
        assert [numbers["wire"] for numbers in seen] == [40, 80, 120], "rank 0 has sent its parameters besides"
        report = metered.report()
        assert list(report) == ["all_gather", "quality all_reduce", "start broadcast"], "steps come first"
        assert report["quality all_reduce"] == line(STEPS, STEPS * BUCKET, STEPS * BUCKET)
        assert of_all_steps(metered) == (STEPS, STEPS * 40, STEPS * 40)
        return True

    assert all(run_ranks(2, main))


def test_parameters_of_partial_steps_and_norms_of_shared_ones_are_steps():
    def partial(comm):
        metered, params = Metered(comm), laws.parameters(SHAPES, rank=comm.rank)
        opt = DistOpt(SGD(0.1), metered)
        opt.backward_and_partial_update(laws.pairs(comm, params, 0))
        return metered

    def norms(comm):
        metered, params = Metered(comm), laws.parameters(SHAPES)
        opt = DistOpt(LARS(0.1), metered)
        for p, view in zip(params, opt.parameter_views(params), strict=True):
            p.data = view
        opt(laws.pairs(comm, params, 0))
        return metered

    for make, phase in ((partial, "parameters"), (norms, "update")):
        for metered in run_ranks(2, make):
            payload = {row["phase"]: row["payload"] for row in metered.ledger.by("phase")}
            payload.pop("start", None)  # parameters that are shared need no broadcast
            assert payload[phase] > 0
            assert metered.report()["all_reduce"]["payload"] == sum(payload.values()) == of_all_steps(metered)[1]


def test_a_trainers_broadcast_at_the_start_has_a_line_of_its_own():
    def main(comm):
        metered, params = Metered(comm), laws.parameters(SHAPES, rank=comm.rank)
        trainer = Trainer(params, "sgd", {"learning_rate": 0.1}, communicator=metered)
        for p in params:
            p.grad = np.ones_like(p.data)
        trainer.step(1)
        return metered.report()

    for rank, report in enumerate(run_ranks(2, main)):
        assert report["start broadcast"] == line(2, PARAMETERS, PARAMETERS * (rank == 0))
        assert report["all_reduce"]["calls"] == 1


def test_a_report_without_messages_is_empty():
    assert Metered(LocalCommunicator()).report() == Ledger().report() == {}
    assert set(Ledger().total_of_steps().values()) == {0}
    assert list(Ledger().total_of_steps()) == list(Ledger().total())


@pytest.mark.sampled(9)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_simulation_reports_what_rank_0_does(mode, size):
    """Nothing is subtracted: the start is on its own line in both."""

    def main(comm):
        metered, _, _ = trained(comm, mode, deterministic=True)
        return metered.report()

    params, sim = laws.parameters(SHAPES), simulate(size, SGD(0.1))
    for step in range(STEPS):
        sim.step(lambda rank, step=step: laws.pairs(laws.VirtualRank(rank, size), params, step), MODES[mode])
    assert run_ranks(size, main)[0] == sim.report()


# ----------------------------------------------------------------------------------------------- records


def record(path, mode="topk", totals=None, steps=20, ranks=2, **curves):
    run = Experiment(path, mode, 1, ranks=ranks)
    for name, points in curves.items():
        for step, value in points:
            run.log(step, **{name: value})
    run.finish(totals, steps)
    return path


def compared(capsys, *arguments):
    """(cells by column, remarks) of each row; columns are two spaces apart."""
    assert main(["compare", *map(str, arguments)]) == 0
    head, *lines = ([c.strip() for c in text.split("  ") if c.strip()] for text in capsys.readouterr().out.splitlines())
    rows = [dict(zip(head, cells, strict=True)) for cells in lines if len(cells) == len(head)]
    return rows, [cells[0] for cells in lines if len(cells) != len(head)]


def test_compare_divides_bytes_of_steps_by_steps(tmp_path, capsys):
    def train(comm):
        metered, opt, params = trained(comm, "top-K")
        opt.broadcast(params)
        return metered.report()

    totals = run_ranks(2, train)[0]
    [row], remarks = compared(capsys, record(tmp_path / "a", totals=totals, steps=STEPS, loss=[(1, 0.5)]))
    assert (row["payload/step"], row["wire/step"], row["wire"]) == ("40 B", "40 B", "120 B")
    assert row["outside steps"] == "2.00 kB", "1000 B at the start, 1000 B by hand"
    assert not remarks


def test_compare_writes_both_as_numbers(tmp_path, capsys):
    totals = {"all_gather": line(20, 800, 1600), "start broadcast": line(2, 4000, 8000)}
    compared(capsys, record(tmp_path / "a", totals=totals), "--json", tmp_path / "out.json")
    [row] = json.loads((tmp_path / "out.json").read_text())["rows"]
    found = {name: row[name]["mean"] for name in row if name.startswith(("payload", "wire"))}
    assert found == {
        **{"payload_per_step": 40, "payload_total": 800, "payload_outside_steps": 4000},
        **{"wire_per_step": 80, "wire_total": 1600, "wire_outside_steps": 8000},
    }


def test_a_broadcast_in_an_older_record_does_not_count_as_steps(tmp_path, capsys):
    totals = {"all_gather": line(20, 800, 800), "broadcast": line(2, 4000, 4000)}
    [row], _ = compared(capsys, record(tmp_path / "a", totals=totals))
    assert (row["wire/step"], row["outside steps"]) == ("40 B", "4.00 kB")


def test_a_curve_of_all_bytes_is_told_from_one_of_steps(tmp_path, capsys):
    totals = {"all_gather": line(20, 800, 800), "start broadcast": line(2, 4000, 4000)}
    steps = record(tmp_path / "steps", "a", totals, wire=[(20, 800)], loss=[(20, 1.0)])
    everything = record(tmp_path / "all", "b", totals, wire=[(20, 4800)], loss=[(20, 1.0)])
    _, remarks = compared(capsys, steps, everything, "--curve", "loss", "--reach", "1")
    assert [text for text in remarks if "curve" in text] == [
        f"{everything}: the curve wire has also the 4.00 kB sent outside of steps"
    ]


def test_a_run_whose_steps_sent_nothing_is_reported(tmp_path, capsys):
    path = record(tmp_path / "a", totals={"other all_reduce": line(20, 800, 800)})
    [row], remarks = compared(capsys, path)
    assert (row["wire/step"], row["outside steps"]) == ("0 B", "800 B")
    assert remarks == [f"{path}: its steps sent nothing; the 800 B outside of them are not compared"]


def test_rows_of_a_mode_are_neighbours_and_ranks_grow_as_numbers(tmp_path, capsys):
    totals = {"all_reduce": line(1, 8, 8)}
    given = [("topk", 64), ("dense", 64), ("topk", 8), ("dense", None), ("dense", 8), ("topk", 2), ("dense", 2)]
    paths = [record(tmp_path / f"{m}-{r}", m, totals, ranks=r) for m, r in given]
    rows, _ = compared(capsys, *paths)
    assert [(row["mode"], row["ranks"]) for row in rows] == [
        *(("topk", "2"), ("topk", "8"), ("topk", "64")),
        *(("dense", "2"), ("dense", "8"), ("dense", "64"), ("dense", "-")),
    ]


def test_without_a_dense_run_the_first_mode_is_the_base_on_any_number_of_ranks(tmp_path, capsys):
    given = [("fp16", 2, 800), ("fp16", 8, 1600), ("topk", 2, 80), ("topk", 8, 400)]
    paths = [record(tmp_path / f"{m}-{r}", m, {"all_reduce": line(20, n, n)}, ranks=r) for m, r, n in given]
    rows, remarks = compared(capsys, *paths)
    assert [row["fp16 sends"] for row in rows] == ["1 x", "1 x", "10 x", "4 x"]
    assert not remarks


# ----------------------------------------------------------------------------------------------- processes

SCRIPT = """
import sys
import numpy as np
import distopt
from distopt.compress import ErrorFeedback, TopK
from distopt.experiment import Experiment

world = distopt.comm.Metered(distopt.world())
opt = distopt.DistOpt(distopt.optim.SGD(0.1), world)
w = distopt.Parameter("w", np.zeros(10_000, np.float32))
mine = Experiment(sys.argv[1], "topk", seed=1, ranks=world.size) if world.rank == 0 else None
for step in range(1, 21):
    gradient = np.random.default_rng([step, world.rank]).standard_normal(10_000, np.float32)
    opt.step([(w, gradient)], ErrorFeedback(TopK(0.01)))
    total = np.zeros(1)
    opt.all_reduce(total)
    if mine:
        mine.log(step, accuracy=step / 20, wire=world.ledger.total_of_steps()["sent"])
if mine:
    mine.finish(totals=world.report(), accuracy=1.0)
"""


@needs_mpi
@pytest.mark.mpi
def test_two_processes_send_the_bytes_that_a_simulation_tells(tmp_path):
    """800 a step: 100 of 10,000 entries, of 8 bytes each, to the other rank."""
    (tmp_path / "train.py").write_text(SCRIPT)
    code, output = distopt_run(2, tmp_path / "train.py", tmp_path / "real.json", timeout=120)
    assert code == 0, output
    w, sim = laws.parameters([(10_000,)])[0], simulate(2, SGD(0.1))
    with Experiment(tmp_path / "sim.json", "topk of virtual ranks", 1, ranks=2) as run:
        for step in range(1, 21):
            sim.step(lambda r, s=step: [(w, np.random.default_rng([s, r]).standard_normal(10_000, "f4"))], MODES_1)
            run.log(step, accuracy=step / 20, wire=sim.ledger.total_of_steps()["sent"])
        run.finish(sim.report(), accuracy=1.0)
    command = [sys.executable, "-m", "distopt", "compare", tmp_path / "real.json", tmp_path / "sim.json"]
    code, output = finish([*map(str, command), "--reach", "0.5", "--json", str(tmp_path / "out.json")], 120)
    assert code == 0, output
    real, virtual = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert real["wire_per_step"]["mean"] == real["payload_per_step"]["mean"] == 800
    assert real["reached"]["mean"] == 8000
    for name in ("payload_per_step", "wire_per_step", "wire_total", "reached"):
        assert real[name] == virtual[name]
    assert (real["wire_outside_steps"]["mean"], virtual["wire_outside_steps"]["mean"]) == (40_000 + 20 * 8, 40_000)


MODES_1 = ErrorFeedback(TopK(0.01))
