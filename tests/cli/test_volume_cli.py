"""distopt volume and distopt advise: what they print and write, and what they refuse before work starts."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import laws
from distopt import DistOpt, simulate
from distopt.cli import main
from distopt.comm import LocalCommunicator
from distopt.lab import advise, buckets, forecast, mode, network, shapes
from distopt.lab.commands import plotting
from distopt.lab.commands.volume import bar
from distopt.lab.cost import ALGORITHMS, Link
from distopt.lab.fit import Fit, Line, Segment
from distopt.lab.tape import Tape
from distopt.lab.tape.join import join
from distopt.lab.tape.recorder import request
from distopt.optim import SGD

PNG = b"\x89PNG\r\n\x1a\n"
SHAPES = {"a": [30, 40], "b": [70]}


@pytest.fixture
def small(tmp_path):
    file = tmp_path / "small.json"
    file.write_text(json.dumps(SHAPES))
    return str(file)


def volume(*arguments):
    return main(["volume", *map(str, arguments)])


def cells(text):
    """Columns are two spaces apart."""
    return [[cell for cell in re.split(r"\s{2,}", line) if cell] for line in text.splitlines()]


def test_volume_prints_a_table_with_the_worked_values(capsys):
    """Of ResNet-50 by default: dense and half of it on two ranks by hand."""
    assert volume("--modes", "dense,half", "--ranks", "8,2", "--no-measure") == 0
    title, head, *rows, note = cells(capsys.readouterr().out)
    assert title[0].startswith("resnet50: 161 tensors, 25,557,032 elements, 11 buckets; 10GbE (9.40 Gbit/s")
    assert head == ["mode", "ranks", "payload/step", "wire/step", "dense sends", "wire time", "compute", "exchange"]
    assert rows[0][:6] == ["dense", "2", "102 MB", "102 MB", "1 x", "92.8 ms"]
    assert rows[1][:5] == ["half", "2", "51.1 MB", "51.1 MB", "2 x"]
    assert [row[:2] for row in rows[2:]] == [["dense", "8"], ["half", "8"]]
    assert note[0].startswith("wire time: predicted; compute: adding up alone; the update")


def test_volume_and_advise_know_logical_ranks(capsys):
    """Of three ranks the first process sends 4/5 of each one's gradients, and a fifth of the sum four times."""
    setting = ("--modes", "dense", "--logical", "12", "--no-measure")
    assert volume(*setting, "--ranks", "5,12") == 0
    title, head, *rows, _ = cells(capsys.readouterr().out)
    assert title[0].endswith("; 12 logical ranks; bytes of the first process")
    assert head[:5] == ["mode", "processes", "ranks in each", "payload/step", "wire/step"]
    assert [row[:5] for row in rows] == [
        ["dense", "5", "3 or 2", "327 MB", "327 MB"],
        ["dense", "12", "1", "102 MB", "187 MB"],
    ]
    assert main(["advise", *setting, "--ranks", "5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("resnet50 on 12 logical ranks, 3 or 2 in each of 5 processes, 10GbE")
    assert "bytes of the first process in a step" in out


@pytest.mark.thorough
def test_volume_json_has_the_forecast_bytes(small, tmp_path, capsys):
    out = tmp_path / "out.json"
    arguments = ("--model", small, "--modes", "dense,topk=0.1,dgc=0.1,2bit", "--ranks", "1,4,64", "--per-node", 4)
    assert volume(*arguments, "--json", out) == 0
    assert "leaves node" in capsys.readouterr().out
    found = json.loads(out.read_text())
    there = buckets([("b", (70,)), ("a", (30, 40))])
    for row in found["rows"]:
        expected = forecast(there, mode(row["mode"]), row["ranks"], 4)._asdict()
        assert {name: row[name] for name in expected} == expected | {"fallen": list(expected["fallen"])}
        assert row["exchange_seconds"] == pytest.approx(row["wire_seconds"] + row["compute_seconds"])
        assert row["dense_sent"] == forecast(there, mode("dense"), row["ranks"], 4).sent
    assert {row["ranks"] for row in found["rows"]} == {1, 4, 64}
    assert found["link"]["bandwidth"] == 1.175e9
    assert found["network"] == "10GbE (9.40 Gbit/s, 30.0 us) for the 4 ranks of a node, NVLink inside"


def test_volume_csv_has_the_rows_of_its_json(small, tmp_path):
    """Logical ranks too, whose processes send more."""
    table, out = tmp_path / "out.csv", tmp_path / "out.json"
    arguments = ("--model", small, "--modes", "dense,topk=0.1", "--ranks", "2,4", "--logical", 6, "--no-measure")
    assert volume(*arguments, "--csv", table, "--json", out) == 0
    with table.open(newline="") as file:
        found = list(csv.DictReader(file))
    expected = json.loads(out.read_text())["rows"]
    assert [row | {"fallen": str(len(row["fallen"]))} for row in expected] == [
        {name: cell if name in ("mode", "fallen") else json.loads(cell or "null") for name, cell in row.items()}
        for row in found
    ]
    assert [(row["mode"], row["ranks"]) for row in found] == [(m, n) for n in "24" for m in ("dense", "topk=0.1")]


def labels(figure):
    return [axes.get_xlabel() for axes in figure.axes]


@pytest.mark.plot
@pytest.mark.parametrize("modes", ["dense,half", "topk=0.1,topk=0.01,dgc=0.01+packed"])
def test_volume_plot_draws_modes_over_ranks_and_densities(small, tmp_path, modes, capsys, monkeypatch):
    out, drawn, save = tmp_path / "out.png", [], plotting.save
    monkeypatch.setattr(plotting, "save", lambda figure, path: (drawn.extend(labels(figure)), save(figure, path)))
    assert volume("--model", small, "--modes", modes, "--ranks", "2,3,64", "--no-measure", "--plot", out) == 0
    assert out.read_bytes().startswith(PNG)
    if modes != "dense,half":
        assert drawn == ["ranks", "ranks", "density, on 3 ranks", "density, on 3 ranks"], "the middle one"
    assert volume("--model", small, "--ranks", "1", "--no-measure", "--plot", out) == 2
    assert "nothing to draw: one rank sends nothing" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- gradients


def record(folder, out, monkeypatch):
    """Three steps of one rank."""
    for name, value in request(folder, 3, 1).items():
        monkeypatch.setenv(name, value)
    params = laws.parameters([(30, 40), (70,)])
    opt = DistOpt(SGD(0.1), LocalCommunicator())
    for step in range(3):
        opt(laws.pairs(laws.VirtualRank(0, 1), params, step))
    opt.close()
    join(folder, out, "here")
    return params


@pytest.fixture
def tape(tmp_path, monkeypatch):
    (tmp_path / "parts").mkdir()
    record(tmp_path / "parts", tmp_path / "tape.safetensors", monkeypatch)
    for name in request(tmp_path, 1, 1):
        monkeypatch.delenv(name)
    return tmp_path / "tape.safetensors"


def test_volume_of_recorded_gradients_counts_what_passes_the_threshold(tape, tmp_path, capsys):
    """What a threshold lets through, on three ranks with a step of the tape each, counted here."""
    out = tmp_path / "out.json"
    given = ("--gradients", tape, "--steps", 1, "--ranks", 3, "--no-measure")
    assert volume(*given, "--modes", "threshold=1.5,half", "--json", out) == 0
    assert "1 recorded step; bytes of one rank" in capsys.readouterr().out
    threshold, half = json.loads(out.read_text())["rows"]
    grads = [[grad for _, grad in Tape(tape).gradients(step, 0)] for step in range(3)]
    counts = [sum(int((np.abs(g) >= 1.5).sum()) for g in grad) for grad in grads]
    assert threshold["payload"] == 8 * counts[0] + 8  # and its length
    assert threshold["sent"] == 2 * threshold["payload"]
    assert threshold["received"] == 8 * (counts[1] + counts[2]) + 16
    there = buckets([(e.name, e.shape) for e in Tape(tape).order])
    assert half["payload"] == forecast(there, mode("half"), 3).payload


def test_volume_of_a_tape_keeps_the_residual_from_step_to_step(tape, tmp_path):
    """The residual of a step is added to the next one's gradient."""
    out = tmp_path / "out.json"
    given = ("--gradients", tape, "--ranks", 3, "--modes", "threshold=1.5", "--no-measure", "--json", out)
    assert volume(*given) == 0
    left, count = [np.zeros(g.shape, np.float32) for _, g in Tape(tape).gradients(0, 0)], 0
    for step in range(3):
        left = [kept + g for kept, (_, g) in zip(left, Tape(tape).gradients(step, 0), strict=True)]
        count += sum(int((np.abs(kept) >= 1.5).sum()) for kept in left)
        left = [np.where(np.abs(kept) >= 1.5, 0, kept) for kept in left]
    (row,) = json.loads(out.read_text())["rows"]
    assert row["payload"] == pytest.approx(8 * count / 3 + 8)


def test_bytes_that_depend_on_no_data_are_the_same_from_a_tape_and_from_shapes(tape, tmp_path):
    out, more = tmp_path / "a.json", tmp_path / "b.json"
    names = "dense,topk=0.05,dgc=0.05+packed,1bit"
    assert volume("--gradients", tape, "--modes", names, "--ranks", "2,5", "--no-measure", "--json", out) == 0
    model = tmp_path / "m.json"
    model.write_text(json.dumps([[e.name, list(e.shape)] for e in reversed(Tape(tape).order)]))
    assert volume("--model", model, "--modes", names, "--ranks", "2,5", "--no-measure", "--json", more) == 0
    assert json.loads(out.read_text())["rows"] == json.loads(more.read_text())["rows"]


def test_a_tape_of_another_model_is_refused(tape, small, capsys):
    assert volume("--gradients", tape, "--model", small) == 2
    assert re.search("tape.safetensors: p0 must be in the model, got it on the tape alone", capsys.readouterr().err)


def test_residuals_that_do_not_fit_into_memory_are_refused(tape, capsys, monkeypatch):
    """1270 elements, and 10 in a gap, of 4 bytes, twice, on 100 ranks: a megabyte."""
    monkeypatch.setattr("os.sysconf", lambda name: 1000)
    assert volume("--gradients", tape, "--modes", "dense,dgc=0.1", "--ranks", 100) == 2
    assert "dgc=0.1 must fit into the 1.00 MB of this machine, got 1.02 MB" in capsys.readouterr().err


def test_the_progress_bar_is_shown_on_terminals_only_and_does_not_wrap(capsys, monkeypatch):
    bar(2)("x")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    tick = bar(2)
    tick("dense")
    tick("half")
    first, second = capsys.readouterr().err.split("\r")[1:]
    assert f"[{'#' * 15}{' ' * 15}] 1/2 dense" in first
    assert f"[{'#' * 30}] 2/2 half\n" in second
    monkeypatch.setenv("COLUMNS", "40")
    bar(1)("a long name")
    assert capsys.readouterr().err == f"\r\x1b[K[{'#' * 30}] 1/1 a \n", "which does not wrap"


# ------------------------------------------------------------------------------------------------------------ advice


@pytest.mark.thorough
def test_advise_prints_a_verdict_for_every_number_of_ranks(capsys, monkeypatch):
    monkeypatch.setattr("distopt.lab.compute.SHAPE", (256, 1024))  # what is measured is a matter of ``test_volume.py``
    assert (
        main(["advise", "--model", "vgg16", "--link", "1GbE", "--ranks", "2,16", "--modes", "half", "--no-measure"])
        == 0
    )
    found = capsys.readouterr().out.split("\n\n")
    assert [text.partition(",")[0] for text in found] == ["vgg16 on 2 ranks", "vgg16 on 16 ranks"]
    assert all("Use half: the exchange takes" in text for text in found)
    assert main(["advise", "--link", "NVLink", "--ranks", "8", "--backward", "0.1"]) == 0
    assert "Do not compress: dense takes 100 ms" in capsys.readouterr().out


def test_advise_takes_gradients_from_the_last_layer_to_the_first(capsys):
    """Which of a model's buckets are ready first decides what hides behind the backward pass."""
    setting = ("--model", "bert-base", "--link", "10GbE", "--ranks", "8", "--modes", "half", "--backward", "0.3")
    assert main(["advise", *setting, "--no-measure"]) == 0
    there = buckets(shapes("bert-base")[::-1])
    assert capsys.readouterr().out == f"bert-base on {advise(there, 8, network('10GbE'), 'half', 0.3, None)}\n"
    turned = advise(there[::-1], 8, network("10GbE"), "half", 0.3, None)
    assert turned.dense.takes.exchange != advise(there, 8, network("10GbE"), "half", 0.3, None).dense.takes.exchange


def test_volume_and_advise_use_a_measured_network(tmp_path, small, capsys):
    """An all-reduce of two ranks: two messages, and all bytes once."""
    line = Line(0.0, (Segment(0.0, 0.002, 1e-6),), ((1 << 20, 1.0),))
    lines = dict.fromkeys(ALGORITHMS, line)
    Fit(Link("measured on 2 ranks", 0.001, 1e6, 0.0), lines, {"ranks": 2}).write(tmp_path / "fit.json")
    out = tmp_path / "out.json"
    setting = ("--model", small, "--fit", str(tmp_path / "fit.json"), "--no-measure")  # on its own ranks
    assert volume(*setting, "--modes", "dense", "--json", out) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["payload"] == 4 * (70 + 10 + 1200)
    assert row["exchange_seconds"] == pytest.approx(2 * 0.001 + row["payload"] * 1e-6)
    capsys.readouterr()
    assert main(["advise", *setting]) == 0
    assert "on 2 ranks, measured on 2 ranks (8.00 Mbit/s, 1.00 ms)" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("command", ["volume", "advise"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model resnet5", "did you mean resnet50?"),
        ("--model no.json", "No such file"),
        ("--modes dens", "did you mean dense?"),
        ("--modes threshold=0.1", "mode must send as much whatever the gradients are, got threshold=0.1"),
        ("--link 10GB", "did you mean 10GbE?"),
        ("--inside NVLnk --per-node 2", "did you mean NVLink?"),
        ("--inside PCIe5", "say how many with --per-node"),
        ("--model=", "there is no model ''"),
        ("--link=", "link must be one of"),
        ("--ranks 0", "--ranks must be whole numbers from 1 to 65536 with commas between them, got 0"),
        ("--ranks 65537", "--ranks must be whole numbers from 1 to 65536"),
        ("--modes topk=0.01,topk=0.010", "modes must be different, got topk=0.01 twice"),
        ("--ranks 2,,4", "--ranks must be whole numbers"),
        ("--ranks 2,x", "--ranks must be whole numbers"),
        ("--ranks 12 --per-node 8", "--ranks must fill nodes of 8, got 12"),
        ("--per-node 0", "--per-node must be at least 1, got 0"),
        ("--logical 0", "--logical must be at least 1, got 0"),
        ("--logical 3 --ranks 4", "logical must be from 4, the number of processes, to 65536, got 3"),
        ("--logical 3 --modes local=9", "modes must exchange gradients at each step with logical ranks, got local=9"),
        ("--threshold -1", "threshold must be at least 0, got -1"),
        ("--fit no.json", "No such file"),
        ("--fit no.json --link 1GbE", "--fit must be the only network, got another one; leave out --link"),
    ],
)
def test_wrong_arguments_are_errors_of_one_line(command, arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([command, *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"distopt {command}: ")
    assert words in err


def refused(monkeypatch, *arguments):
    """Nothing is counted or measured before these arguments are."""

    def never(*given):
        raise AssertionError("work began")

    monkeypatch.setattr("distopt.lab.commands.volume.rows", never)
    monkeypatch.setattr("distopt.lab.commands.setting.measure", never)
    return volume(*arguments)


def test_files_that_cannot_be_written(monkeypatch, tmp_path, capsys, small):
    for arguments, words in (
        (("--plot", tmp_path / "no" / "a.png"), "No such file"),
        (("--json", tmp_path), "Is a directory"),
        (("--plot", "a.gif"), "must end in .png, .svg, .pdf"),
        (("--gradients", tmp_path / "no"), "No such file"),
        (("--gradients", small), "small.json"),
        (("--steps", 3), "give it with --gradients"),
    ):
        assert refused(monkeypatch, *arguments) == 2
        assert words in capsys.readouterr().err


def test_nothing_that_is_read_is_overwritten(monkeypatch, tmp_path, capsys, small):
    png = tmp_path / "a.png"
    lost = [("--model", small, flag, small) for flag in ("--json", "--csv")]
    for arguments in (*lost, ("--json", png, "--plot", png)):
        assert refused(monkeypatch, *arguments) == 2
        assert re.search("it would be lost|--json and --plot must be different files", capsys.readouterr().err)
    assert json.loads(Path(small).read_text()) == SHAPES


@pytest.mark.thorough
def test_a_named_pipe_is_opened_once_for_json(tmp_path, small):
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, "-m", "distopt", "volume", "--model", small, "--no-measure", "--json", "pipe"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as writer:
        assert json.loads((tmp_path / "pipe").read_text())["model"] == small
        assert writer.wait(60) == 0


@pytest.mark.plot
def test_labels_of_a_picture_are_drawn_without_markup(tmp_path):
    """matplotlib would take dollars as mathematics, and leave out what begins with a line below."""
    _, axes = plotting.new("$x$", "across", "up")
    for label in ("_hidden", "$x_{", "l" * 100):
        axes.plot([1, 2], [1, 2], label=label)
    axes.plot([1, 2], [2, 1])
    plotting.legend(axes)
    texts = axes.get_legend().get_texts()
    assert [t.get_text() for t in texts] == ["_hidden", "$x_{", "l" * 45 + "..."]
    assert not any(t.get_parse_math() for t in (*texts, axes.title))
    plotting.save(axes.figure, tmp_path / "a.png")


def test_a_plot_without_matplotlib_is_refused_with_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert refused(monkeypatch, "--plot", tmp_path / "a.png") == 2
    assert plotting.INSTALL in capsys.readouterr().err


def test_forecast_buckets_are_those_of_a_simulated_step():
    """The names of shapes and of recorded parameters make the same buckets as a step does."""
    there = buckets(shapes("resnet50")[::-1])
    assert sum(int(b.records["size"].sum()) for b in there) == 25_557_032
    params = laws.parameters([(30, 40), (70,)])
    sim = simulate(2, SGD(0.1), threshold=80)
    sim(lambda rank: laws.pairs(laws.VirtualRank(rank, 2), params, 0))
    assert [b.names for b in buckets([(p.name, p.data.shape) for p in params], 80)] == [
        b.names for b in sim.plan.buckets
    ]
