"""distopt compare: numbers from records, against arithmetic by hand; plots; and reports of what is missing."""

import contextlib
import itertools
import json
import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distopt import DistOpt, Parameter, formatting, run_ranks
from distopt.cli import main
from distopt.comm import Metered
from distopt.lab.commands import plotting
from distopt.lab.experiment import Experiment, read
from distopt.optim import SGD

PNG = b"\x89PNG\r\n\x1a\n"


def train(path, mode="dense", seed=0, wire=(), accuracy=(), ranks=2, results=None, totals="same", **settings):
    """A run of as many steps as there are bytes, payload being half of the wire."""
    run = Experiment(path, mode, seed, ranks=ranks, **settings)
    sent = 0
    for step, nbytes in enumerate(wire, 1):
        sent += nbytes
        run.log(step, wire=sent)
    for step, value in accuracy:
        run.log(step, accuracy=value)
    run.finish({"all_reduce": {"calls": len(wire), "payload": sent // 2, "wire": sent}} if totals else None, **results)
    return str(path)


@pytest.fixture
def runs(tmp_path):
    """Two seeds of top-K, and a dense run, which comes last."""
    return [
        train(tmp_path / "k1.json", "topk", 1, [600, 400], [(1, 0.2), (2, 0.8)], results={"accuracy": 0.8}),
        train(tmp_path / "k2.json", "topk", 2, [600, 1400], [(1, 0.7), (2, 0.9)], results={"accuracy": 0.9}),
        train(tmp_path / "d.json", "dense", 1, [50_000] * 3, [(1, 0.1), (3, 0.95)], results={"accuracy": 0.95}),
    ]


def compare(*arguments):
    return main(["compare", *map(str, arguments)])


def cells(line):
    """Columns are two spaces apart."""
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_compare_prints_a_table_with_the_worked_values(runs, capsys):
    assert compare(*runs, "--reach", "0.7") == 0
    head, *rows = map(cells, capsys.readouterr().out.splitlines())
    assert head == [
        *("mode", "ranks", "seeds", "steps", "payload/step", "wire/step", "wire", "outside steps"),
        *("dense sends", "accuracy", "wire to accuracy >= 0.7"),
    ]
    topk, dense = rows
    assert topk == [
        *(
            "topk",
            "2",
            "1, 2",
            "2",
            "375 B (250 B to 500 B)",
            "750 B (500 B to 1.00 kB)",
            "1.50 kB (1.00 kB to 2.00 kB)",
            "0 B",
        ),
        *("66.7 x", "0.85 (0.8 to 0.9)", "800 B (600 B to 1.00 kB)"),
    ]
    assert dense == ["dense", "2", "1", "3", "25.0 kB", "50.0 kB", "150 kB", "0 B", "1 x", "0.95", "150 kB"]


def test_columns_are_aligned(runs, capsys):
    assert compare(*runs) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(set(map(len, lines))) == 1, "all lines end with a number"


def test_json_has_the_same_numbers(runs, tmp_path):
    out = tmp_path / "n.json"
    assert compare(*runs, "--reach", "0.7", "--json", out) == 0
    found = json.loads(out.read_text())
    assert found["aim"] == {"curve": "accuracy", "value": 0.7, "rises": True}
    topk, dense = found["rows"]
    assert topk == {
        "label": "topk",
        "mode": "topk",
        "ranks": 2,
        "seeds": [1, 2],
        "counted_from": [None, None],
        "base": "dense",
        "ratio": pytest.approx(50_000 / 750),
        "steps": {"mean": 2, "low": 2, "high": 2},
        "payload_per_step": {"mean": 375, "low": 250, "high": 500},
        "payload_total": {"mean": 750, "low": 500, "high": 1000},
        "wire_per_step": {"mean": 750, "low": 500, "high": 1000},
        "wire_total": {"mean": 1500, "low": 1000, "high": 2000},
        "payload_outside_steps": {"mean": 0, "low": 0, "high": 0},
        "wire_outside_steps": {"mean": 0, "low": 0, "high": 0},
        "reached": {"mean": 800, "low": 600, "high": 1000},
        "results": {"accuracy": {"mean": pytest.approx(0.85), "low": 0.8, "high": 0.9}},
    }
    assert dense["ratio"] == 1
    assert dense["reached"]["mean"] == 150_000


def test_without_a_dense_run_the_first_run_is_the_base(runs, tmp_path):
    out = tmp_path / "n.json"
    other = train(tmp_path / "o.json", "dgc", 1, [75], results={})
    assert compare(*runs[:2], other, "--json", out) == 0
    found = json.loads(out.read_text())
    assert [row["base"] for row in found["rows"]] == ["topk", "topk"]
    assert [row["ratio"] for row in found["rows"]] == [1, 10]


def test_runs_are_compared_with_the_dense_run_of_their_ranks_and_settings(tmp_path, capsys):
    """Settings that both runs have must be equal; a setting that only one has does not matter."""
    out = tmp_path / "n.json"
    given = [
        ("dense", 2, 100, {"model": "A"}),
        ("dense", 2, 40, {"model": "B", "lr": 0.1}),
        ("dense", 8, 160, {}),
        ("topk", 2, 10, {"model": "A", "density": 0.1}),
        ("topk", 2, 10, {"model": "B", "lr": 0.1}),
        ("topk", 8, 80, {"model": "A"}),
        ("topk", 2, 10, {"model": "B", "lr": 0.2}),
        ("dgc", 4, 50, {}),
        ("dgc", None, 50, {}),
    ]
    paths = [train(tmp_path / f"{k}", m, 1, [n], ranks=r, results={}, **s) for k, (m, r, n, s) in enumerate(given)]
    assert compare(*paths, "--json", out) == 0
    assert [row["ratio"] for row in json.loads(out.read_text())["rows"]] == [1, 1, 1, 10, 4, 4, 2, None, None]
    lines = capsys.readouterr().out.splitlines()
    assert [cells(line)[-1] for line in lines[1:10]] == ["1 x", "1 x", "1 x", "10 x", "4 x", "4 x", "2 x", "-", "-"]
    assert lines[10:] == [
        'topk lr=0.2 model="B": compared with dense lr=0.1 model="B", which has another lr',
        "dgc: no dense run on 4 ranks to compare it with",
        "dgc: no dense run without a number of ranks to compare it with",
    ]


@pytest.mark.plot
def test_values_that_are_not_finite_are_not_drawn(runs, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    kept = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: kept.append(figure))
    lost = train(tmp_path / "lost", "lost", 1, [5] * 3, [(1, math.nan), (2, math.inf), (3, -math.inf)], results={})
    part = train(tmp_path / "part", "part", 1, [5] * 3, [(1, 0.5), (2, math.nan), (3, 0.25)], results={})
    assert compare(runs[2], lost, part, "--plot", tmp_path / "out.png") == 0
    assert [line.get_xydata().tolist() for line in kept[0].axes[0].lines[1:]] == [[[5, 0.5], [15, 0.25]]]
    assert capsys.readouterr().out.splitlines()[4:] == [
        f"{lost}: 3 of 3 values of accuracy are not finite",
        f"{part}: 1 of 3 values of accuracy are not finite",
    ]


def test_settings_and_ranks_tell_rows_apart(tmp_path, capsys):
    fields = {"wire": [8], "results": {}}
    paths = [
        train(tmp_path / "1", "topk", 1, density=0.1, lr=1, **fields),
        train(tmp_path / "2", "topk", 2, lr=1, density=0.1, **fields),
        train(tmp_path / "3", "topk", 1, density=0.2, lr=1, **fields),
        train(tmp_path / "4", "topk", 1, lr=1, **fields),
        train(tmp_path / "5", "topk", None, ranks=None, density=0.5, **fields),
    ]
    assert compare(*paths) == 0
    rows = [cells(line)[:3] for line in capsys.readouterr().out.splitlines()[1:5]]
    assert rows == [
        ["topk density=0.1", "2", "1, 2"],
        ["topk density=0.2", "2", "1"],
        ["topk", "2", "1"],
        ["topk", "-", "?"],
    ]


def test_a_loss_is_reached_when_it_falls_to_the_aim(tmp_path, capsys):
    run = Experiment(tmp_path / "a", "dense", 1, ranks=2)
    for step, loss in enumerate([math.nan, 2.0, 0.5, 0.1, 0.7], 1):
        run.log(step, loss=loss, wire=1000 * step)
    run.finish({"all_reduce": {"calls": 5, "payload": 5000, "wire": 5000}})
    assert compare(tmp_path / "a", "--curve", "loss", "--reach", "0.4") == 0
    head, row, note = capsys.readouterr().out.splitlines()
    assert (cells(head)[-1], cells(row)[-1]) == ("wire to loss <= 0.4", "4.00 kB")
    assert note == f"{tmp_path}/a: 1 of 5 values of loss are not finite"


def test_a_run_that_begins_beyond_the_aim_has_reached_it_at_its_first_step(runs, tmp_path, capsys):
    start = train(tmp_path / "s", "warm", 1, [10, 10], [(1, 0.9), (2, 0.85)], results={})
    assert compare(*runs, start, "--reach", "0.8") == 0, "most runs rise"
    assert cells(capsys.readouterr().out.splitlines()[3])[-1] == "10 B"


def test_bytes_at_a_step_without_a_log_are_those_of_the_next_one(tmp_path, capsys):
    run = Experiment(tmp_path / "a", "dense", 1, ranks=2)
    for step in (2, 4):
        run.log(step, wire=100 * step)
    for step in (1, 3, 5):
        run.log(step, accuracy=step / 10)
    run.finish({"all_reduce": {"wire": 400, "payload": 1}}, steps=8)
    assert compare(tmp_path / "a", "--reach", "0.3") == 0
    assert cells(capsys.readouterr().out.splitlines()[1])[-1] == "400 B"
    assert compare(tmp_path / "a", "--reach", "0.5") == 0, "by then nobody knows how many"
    table, *notes = capsys.readouterr().out.splitlines()[1:]
    assert cells(table)[-1] == "-"
    assert cells(table)[5] == "50 B", "of 8 steps"
    assert notes == [f"{tmp_path}/a: does not come to accuracy >= 0.5 where bytes are known"]


def test_missing_curves_and_totals_are_reported_line_by_line(runs, tmp_path, capsys):
    bare = train(tmp_path / "bare", "bare", 1, results={"loss": 1.5}, totals=None)
    idle = train(tmp_path / "idle", "idle", 1, results={})
    part = train(tmp_path / "part", "part", 1, [10], [(1, 0.99)], results={}, totals=None)
    broken = tmp_path / "broken"
    with contextlib.suppress(FloatingPointError), Experiment(broken, "broken", 1) as run:
        run.log(5, wire=10, accuracy=0.1)
        raise FloatingPointError
    assert compare(runs[2], bare, idle, part, broken, "--reach", "0.9") == 0
    lines = capsys.readouterr().out.splitlines()
    assert cells(lines[2]) == ["bare", "2", "1", "0", "-", "-", "-", "-", "-", "-", "1.5", "-"]
    assert lines[6:] == [
        f"{bare}: totals do not say payload and wire, so bytes are unknown",
        f"{bare}: no curve accuracy and no curve wire",
        f"{idle}: no steps, so bytes per step are unknown",
        f"{idle}: no curve accuracy and no curve wire",
        f"{part}: totals do not say payload and wire, so bytes are unknown",
        f"{broken}: ended by FloatingPointError after step 5",
        f"{broken}: totals do not say payload and wire, so bytes are unknown",
        f"{broken}: does not come to accuracy >= 0.9 where bytes are known",
    ]


def test_a_wire_curve_that_ends_below_the_total_is_reported(tmp_path, capsys):
    """Such as when the bytes of each step were logged, not those since the start."""
    run = Experiment(tmp_path / "a", "dense", 1, ranks=2)
    for step in (1, 2, 3):
        run.log(step, wire=4000, accuracy=0.5)
    run.finish({"all_reduce": {"wire": 12_000, "payload": 12_000}})
    assert compare(tmp_path / "a", "--reach", "0.5") == 0
    assert f"{tmp_path}/a: the curve wire ends at 4.00 kB of 12.0 kB" in capsys.readouterr().out


def trained(path, folder, start, stop, seed=1):
    """A record of steps start + 1 to stop on two ranks, 1,000 bytes each; it goes on from the checkpoint before."""

    def main(comm):
        comm, w = Metered(comm), Parameter("w", np.zeros(250, np.float32))
        opt = DistOpt(SGD(1.0), comm)
        if start:
            opt.load(folder, [w])
        run = Experiment(path, "dense", seed, ranks=2) if comm.rank == 0 else None
        while opt.step_counter < stop:
            opt([(w, np.full(250, comm.rank, np.float32))])
            if run:
                sent = comm.ledger.total_of_steps()["sent"]
                run.log(opt.step_counter, wire=sent, accuracy=opt.step_counter / 10)
        opt.save(folder, [w])
        if run:
            run.finish(comm.report())

    run_ranks(2, main)
    return str(path)


def test_bytes_of_a_resumed_run_are_divided_by_the_steps_that_were_counted(tmp_path, capsys):
    folder, out = tmp_path / "checkpoint", tmp_path / "n.json"
    first = trained(tmp_path / "1.json", folder, 0, 3)
    rest = trained(tmp_path / "2.json", folder, 3, 8)
    assert read(first)["counted_from"] == 0
    assert read(rest)["counted_from"] == 3
    assert compare(rest, "--reach", "0.5", "--json", out) == 0
    _, row, *notes = capsys.readouterr().out.splitlines()
    assert cells(row)[3:7] == ["8", "1.00 kB", "1.00 kB", "5.00 kB"], "steps, payload and wire of one, wire of all"
    assert cells(row)[-1] == "-"
    counted = f"{rest}: bytes are counted from step 3 of 8, where its ledger began"
    assert notes == [f"{counted}, so those until accuracy >= 0.5 are unknown"]
    (entry,) = json.loads(out.read_text())["rows"]
    assert (entry["counted_from"], entry["wire_per_step"]["mean"], entry["reached"]) == ([3], 1000, None)
    assert compare(rest) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [counted]
    assert compare(first, "--reach", "0.2") == 0
    assert cells(capsys.readouterr().out.splitlines()[1])[-1] == "2.00 kB"


@pytest.mark.plot
def test_a_curve_over_bytes_that_are_not_all_counted_is_not_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    trained(tmp_path / "1.json", tmp_path / "c", 0, 3)
    rest = trained(tmp_path / "2.json", tmp_path / "c", 3, 8)
    assert compare(rest, "--plot", tmp_path / "out.png") == 2
    assert "nothing to draw: no run has the curves accuracy and wire" in capsys.readouterr().err


def test_runs_of_one_mode_and_seed_are_said_to_be_so(runs, tmp_path, capsys):
    again = train(tmp_path / "k3.json", "topk", 1, [800, 800], [(1, 0.3), (2, 0.6)], results={"accuracy": 0.6})
    unknown = [train(tmp_path / f"u{k}.json", "other", None, [80], results={"loss": k}) for k in range(2)]
    assert compare(*runs, again, *unknown) == 0
    lines = capsys.readouterr().out.splitlines()
    assert cells(lines[1])[2] == "1, 2, 1"
    assert lines[4:] == ["topk: 2 runs have the same seed 1, and each counts in the means"]


@pytest.mark.plot
@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_a_plot_is_written_in_every_format(kind, runs, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / f"out.{kind}"
    assert compare(*runs, "--plot", out) == 0
    drawn = out.read_bytes()
    assert drawn.startswith({"png": PNG, "svg": b"<?xml", "pdf": b"%PDF"}[kind])
    assert len(drawn) < 100_000


@pytest.mark.plot
def test_the_plot_draws_the_curves_over_bytes(runs, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    kept = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: kept.append(figure))
    assert compare(*runs, "--plot", tmp_path / "out.png") == 0
    (axes,) = kept[0].axes
    assert [line.get_xydata().tolist() for line in axes.lines] == [
        [[600, 0.2], [1000, 0.8]],
        [[600, 0.7], [2000, 0.9]],
        [[50_000, 0.1], [150_000, 0.95]],
    ]
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_legend().get_texts()] == ["topk", "dense"], "one for both seeds"
    styles = [(line.get_color(), line.get_marker()) for line in axes.lines]
    assert styles[0] == styles[1]
    assert all(a != b for a, b in zip(styles[0], styles[2], strict=True)), "in grey too"
    assert len({line.get_linestyle() for line in axes.lines}) == 1, "all on two ranks"


@pytest.mark.plot
def test_a_mode_has_one_colour_and_a_number_of_ranks_its_dashes(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="pictures need distopt[plot]")
    kept, modes, ranks = [], "abcdefghijkl", (64, 2, 8)
    monkeypatch.setattr(plotting, "save", lambda figure, path: kept.append(figure))
    for mode in modes:
        for n in ranks:
            train(tmp_path / f"{mode}{n}", mode, 1, [n, n], [(1, 0.1), (2, 0.9)], ranks=n, results={})
    train(tmp_path / "m", "m", 1, results={})  # of which there is nothing to draw
    assert compare(*sorted(tmp_path.iterdir()), "--plot", tmp_path / "out.png") == 0
    (axes,) = kept[0].axes
    assert len(axes.lines) == 36
    looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.lines]
    assert len(set(looks)) == 36
    assert len({colour for colour, _, _ in looks}) == len(modes)
    for k in range(12):
        assert len({look[:2] for look in looks[3 * k : 3 * k + 3]}) == 1, "its marker too"
        assert [look[2] for look in looks[3 * k : 3 * k + 3]] == [look[2] for look in looks[:3]]
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == [*modes, "2 ranks", "8 ranks", "64 ranks"]


@pytest.mark.plot
@pytest.mark.parametrize("low", [1, 499_000])
@pytest.mark.parametrize("times", [1, 1.2, 4.9, 6.1, 10, 40, 99, 101, 700, 1e4, 1e6, 1e9])
def test_labels_of_ticks_do_not_meet(low, times):
    pytest.importorskip("matplotlib", reason="pictures need distopt[plot]")
    figure, axes = plotting.new("", "", "")
    axes.plot([low, low * times], [1, 2], label="long " * 9, **plotting.look(0))
    plotting.log_axis(axes, "x", [low, low * times], formatting.nbytes)
    plotting.legend(axes)
    plotting.make_room(figure)
    figure.draw_without_rendering()
    left, right = axes.get_xlim()
    ticks = [t for t, at in zip(axes.get_xticklabels(), axes.get_xticks(), strict=True) if left <= at <= right]
    boxes = [tick.get_window_extent() for tick in ticks]
    assert boxes
    assert all(b.x0 - a.x1 >= 8 for a, b in itertools.pairwise(boxes)), [tick.get_text() for tick in ticks]


@pytest.mark.plot
@pytest.mark.parametrize("labels", [["a"], ["long label " * 5] * 3, [f"mode {k}" for k in range(40)]])
def test_a_legend_lies_beside_the_curves(labels):
    pytest.importorskip("matplotlib", reason="pictures need distopt[plot]")
    figure, axes = plotting.new("title", "across", "up")
    for k, label in enumerate(labels):
        axes.plot([1, 2], [k, k + 1], label=label, **plotting.look(k))
    plotting.legend(axes)
    plotting.make_room(figure)
    figure.draw_without_rendering()
    curves, legend, page = axes.get_window_extent(), axes.get_legend().get_window_extent(), figure.bbox
    assert curves.width >= 4.5 * figure.dpi
    assert curves.x1 <= legend.x0
    assert legend.x1 <= page.x1
    assert page.y0 <= legend.y0 < legend.y1 <= page.y1


@pytest.mark.plot
def test_many_points_are_a_small_file(tmp_path):
    pytest.importorskip("matplotlib")
    steps = 3000
    for mode in "abcdefgh":
        curve = [(k, math.sin(k * ord(mode))) for k in range(1, steps + 1)]
        train(tmp_path / mode, mode, 1, [ord(mode) ** 3] * steps, curve, results={})
    out = tmp_path / "out.png"
    assert compare(*(tmp_path / mode for mode in "abcdefgh"), "--plot", out) == 0
    assert len(out.read_bytes()) < 100_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--curve", "acuracy"], "there is no curve 'acuracy': there are accuracy, wire; did you mean accuracy?"),
        (["--reach", "nan"], "--reach must be finite, got nan"),
        (["--plot", "{}/missing/out.png"], "missing/out.png"),
        (["--plot", "{}"], "a picture must end in .png, .svg, .pdf, got {}"),
        (["--plot", "{}/out.jpeg"], "a picture must end in .png, .svg, .pdf, got {}/out.jpeg"),
        (["--json", "{}"], "Is a directory"),
        (["--json", "{}/d.json/out.json"], "Not a directory"),
        (["{}/d.json"], "each file must be given once, got {}/d.json twice"),
        (["{}/copy.json"], "each file must be a run of its own, got {}/copy.json, which is a copy of {}/d.json"),
        (["{}/gone.json"], "No such file or directory: '{}/gone.json'"),
        (["{}/other.json"], "other.json is no experiment's record"),
        (["{}/new.json"], "new.json: format must be 'distopt experiment 1'"),
    ],
)
def test_wrong_arguments_are_errors_of_one_line(arguments, said, runs, tmp_path, capsys):
    (tmp_path / "other.json").write_text('{"format": "some other"}')
    (tmp_path / "copy.json").write_bytes((tmp_path / "d.json").read_bytes())
    (tmp_path / "new.json").write_text('{"format": "distopt experiment 99"}')
    assert compare(*runs, *(a.replace("{}", str(tmp_path)) for a in arguments)) == 2
    out, err = capsys.readouterr()
    assert err.startswith("distopt compare: ")
    assert said.replace("{}", str(tmp_path)) in err
    assert err.count("\n") == 1
    assert not out, "before anything is shown"


@pytest.mark.parametrize(("flag", "name"), [("--json", "d.json"), ("--json", "link"), ("--plot", "d.png")])
def test_a_record_is_not_overwritten(flag, name, runs, tmp_path, capsys):
    (tmp_path / "link").symlink_to(tmp_path / "d.json")
    (tmp_path / "d.png").hardlink_to(tmp_path / "d.json")
    before = (tmp_path / "d.json").read_bytes()
    assert compare(*runs, flag, tmp_path / name) == 2
    assert (
        f"{flag} must be another file than those that are read, got {tmp_path / name}; it would be lost"
        in capsys.readouterr().err
    )
    assert (tmp_path / "d.json").read_bytes() == before


@pytest.mark.plot
@pytest.mark.parametrize("ends", [(3, 3), (3, 4), (1, 1e3), (1, 1e12)])
@pytest.mark.parametrize("unit", [formatting.nbytes, formatting.seconds])
def test_a_logarithmic_axis_has_ticks_to_read(ends, unit):
    pytest.importorskip("matplotlib")
    figure, axes = plotting.new("", "", "")
    axes.plot(ends, [1, 2], **plotting.look(9))
    plotting.log_axis(axes, "x", ends, unit)
    figure.draw_without_rendering()
    low, high = axes.get_xlim()
    shown = [t.get_text() for x, t in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True) if low <= x <= high]
    assert 1 <= len(shown) <= 15
    assert len(set(shown)) == len(shown)
    assert all(" " in label and ".00" not in label for label in shown)


@pytest.mark.plot
def test_a_plot_without_any_curve_is_refused(runs, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    lone = train(tmp_path / "lone", "lone", 1, [0, 0], [(1, 0.5)], ranks=1, results={})
    assert compare(lone, "--plot", tmp_path / "out.png") == 2
    assert (
        "nothing to draw: no run has the curves accuracy and wire, finite and with bytes above 0"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out.png").exists()


def test_a_plot_without_matplotlib_is_refused_and_a_table_is_not(runs, tmp_path, monkeypatch, capsys):
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert compare(*runs, "--plot", tmp_path / "out.png") == 2
    assert capsys.readouterr().err.endswith("pip install 'distopt[plot]'\n")
    assert compare(*runs) == 0, "a table needs none"


def test_check_writable_changes_no_file(tmp_path):
    old = tmp_path / "old.txt"
    old.write_text("old")
    plotting.check_writable(old)
    plotting.check_writable(tmp_path / "new.txt")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("old.txt", "old")]


@pytest.mark.parametrize(
    ("n", "shown"),
    [
        (0, "0 B"),
        (7, "7 B"),
        (12.5, "12.5 B"),
        (999, "999 B"),
        (999.6, "1.00 kB"),
        (1000, "1.00 kB"),
        (9994, "9.99 kB"),
        (9996, "10.0 kB"),
        (99_949, "99.9 kB"),
        (99_951, "100 kB"),
        (999_499, "999 kB"),
        (999_501, "1.00 MB"),
        (102_228_128, "102 MB"),
        (1.5e18, "1500 PB"),
        (math.nan, "nan B"),
    ],
)
def test_nbytes_prints_three_digits_and_a_unit(n, shown):
    assert formatting.nbytes(n) == shown


def test_seconds_prints_three_digits_and_a_unit():
    shown = [formatting.seconds(t) for t in (0, 5e-9, 1.25e-6, 0.045, 1, 870.4, 12_345)]
    assert shown == ["0 ns", "5 ns", "1.25 us", "45.0 ms", "1.00 s", "870 s", "12345 s"]


@given(st.floats(1, 1e17))
def test_three_digits_are_within_half_a_percent(n):
    number, unit = formatting.nbytes(n).split()
    assert float(number) * 1000 ** ("B", "kB", "MB", "GB", "TB", "PB").index(unit) == pytest.approx(n, rel=0.0051)
    assert len(number.replace(".", "")) <= 3


def test_a_table_is_safe_to_print():
    assert formatting.table([["a", "long"], ["\x1b[31mred", "1"]]) == ["  a            long", "  \\x1b[31mred     1"]
