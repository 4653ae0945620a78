"""The examples run as their users run them, on real data."""

import functools
import importlib
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from distopt import DistOpt, run_ranks, simulate
from distopt.comm import Metered
from distopt.lab import experiment
from launch import PROJECT, distopt_run
from tiers import every

EXAMPLES = PROJECT / "examples"
pytestmark = pytest.mark.mpi


def accuracy(output):
    return float(re.search(r"test accuracy (0\.\d{4}|1\.0000)$", output, re.M)[1])


@functools.cache
def digits(size):
    """What examples/digits.py prints."""
    code, output = distopt_run(size, EXAMPLES / "digits.py", timeout=60)
    assert code == 0, output
    return output


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_digits_example_learns_and_sends_the_bytes_of_an_all_reduce(size):
    output = digits(size)
    assert accuracy(output) >= 0.96
    sent = int(re.search(r"sent per rank and step: ([\d,]+) bytes", output)[1].replace(",", ""))
    elements = 64 * 128 + 128 + 128 * 10 + 16  # the last bias is padded to 64 bytes
    assert sent == 2 * (size - 1) * 4 * elements // size or abs(sent - 2 * (size - 1) * 4 * elements / size) < 64


def test_the_digits_example_trains_a_cnn_and_draws_its_curve(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install 'distopt[plot]'")
    picture = tmp_path / "digits.png"
    code, output = distopt_run(
        2, EXAMPLES / "digits.py", "--model", "cnn", "--epochs", 8, "--plot", picture, timeout=60
    )
    assert code == 0, output
    assert accuracy(output) >= 0.96
    assert picture.read_bytes().startswith(b"\x89PNG")


SHARES = {
    "half": 0.51,
    "partial": 0.3,
    "topk": 0.05,
    "threshold": 0.5,
    "int8": 0.26,
    "int4": 0.14,
    "2bit": 1 / 15,
    "1bit": 1 / 30,
}


@pytest.mark.parametrize("mode", every(2, SHARES))
def test_the_digits_example_learns_in_every_mode_with_fewer_bytes(mode):
    lr = 0.03 if mode == "1bit" else 0.1
    code, output = distopt_run(2, EXAMPLES / "digits.py", "--mode", mode, "--lr", lr, timeout=60)
    assert code == 0, output
    assert accuracy(output) >= 0.96
    payload = int(re.search(r"payload per rank and step: ([\d,]+) bytes", output)[1].replace(",", ""))
    dense = 4 * (64 * 128 + 128 + 128 * 10 + 10)
    assert payload < dense * SHARES[mode]


def test_every_number_of_ranks_trains_alike():
    """The batch is shared out, so the losses of 1 and 2 ranks are the same up to rounding."""
    losses = [float(re.search(r"epoch 10/\d+  loss (\S+)", digits(size))[1]) for size in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_a_large_batch_costs_plain_sgd_accuracy_and_others_less(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install 'distopt[plot]'")
    picture = tmp_path / "large_batch.png"
    code, output = distopt_run(2, EXAMPLES / "large_batch.py", "--seeds", 1, "--plot", picture, timeout=120)
    assert code == 0, output
    found = {name: float(last) for name, last in re.findall(r"([A-Z][\w,' -]*\w) +\d+ +\d+ +(\d\.\d+)$", output, re.M)}
    assert found.pop("SGD") < 0.94
    assert len(found) == 7
    assert min(found.values()) > 0.96, found
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_large_batch_with_other_schedules():
    options = ["--lr-step-epochs", "2,3", "--warmup-strategy", "lars", "--num-epochs", 4, "--seeds", 1]
    code, output = distopt_run(2, EXAMPLES / "large_batch.py", *options, timeout=120)
    assert code == 0, output
    assert len(re.findall(r" \d\.\d+$", output, re.M)) == 8


def test_muon_learns_faster_than_its_rivals():
    code, output = distopt_run(2, EXAMPLES / "muon.py", "--updates", 40, "--seeds", 1, timeout=200)
    assert code == 0, output
    rows = re.findall(r"(\w+) +\d+\.\d+ +(\d\.\d+) \(0\.000\)$", output, re.M)
    best = {name: max(float(x) for n, x in rows if n == name) for name in ("SGD", "AdamW", "Muon")}
    assert len(rows) == 9
    assert best["Muon"] > 0.96
    assert best["Muon"] == max(best.values())


def epochs_of(output):
    """(epoch, sparsity in %, accuracy, payload, wire) of each line that examples/dgc.py prints."""
    rows = re.findall(r"^(?:\[0\]\S* )? *(\d+) +(\S+) % +(\d\.\d{4}) +([\d,]+) +\S+ +([\d,]+) +\S+$", output, re.M)
    return [(int(a), float(b), float(c), *(int(n.replace(",", "")) for n in bytes_)) for a, b, c, *bytes_ in rows]


WEIGHTS, BIASES = (64 * 512, 512 * 512, 512 * 10), 512 + 512 + 10


def test_the_dgc_example_has_the_published_stages_of_sparsity(tmp_path):
    """The published run: bytes are those of its sparsities, and accuracy is that of all gradients."""
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install 'distopt[plot]'")
    picture = tmp_path / "dgc.png"
    code, output = distopt_run(2, EXAMPLES / "dgc.py", "--plot", picture, timeout=120)
    assert code == 0, output
    assert "302 of 300,032 weights" in output
    epochs = epochs_of(output)
    assert [(e[0], e[1]) for e in epochs[:5]] == [(1, 75), (2, 93.75), (3, 98.4375), (4, 99.6), (5, 99.9)]
    assert {e[1] for e in epochs[5:]} == {99.9}
    assert epochs[-1][0] == 90
    for _, sparsity, _, payload, wire in epochs:
        entries = sum(math.ceil((1 - sparsity / 100) * n - 1e-6) for n in WEIGHTS)
        assert payload == wire == 12 * (8 * entries + 4 * BIASES)
    assert accuracy(output) > 0.97
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_dgc_example_sends_16_bits_and_counts_epochs_of_other_sample_sizes():
    """An epoch of sparsity, 24 steps, is two of the images; packed entries have about 28 bits instead of 64."""
    options = ["--use_fp16=True", "--dgc_total_samples=3072", "--dgc_momentum_type=nesterov", "--max_epochs=10"]
    options += ["--dgc_momentum_factor_masking=False", "--weight_decay=0", "--lr_warmup_strategy=linear"]
    code, output = distopt_run(2, EXAMPLES / "dgc.py", *options, timeout=60)
    assert code == 0, output
    epochs = epochs_of(output)
    assert [(e[0], e[1]) for e in epochs] == [(1, 75), (3, 93.75), (5, 98.4375), (7, 99.6), (9, 99.9), (10, 99.9)]
    assert 12 * 4 * BIASES < epochs[-1][3] < 12 * (4 * 302 + 4 * BIASES)


def test_the_dgc_example_trains_with_dense_momentum_for_comparison():
    options = ["--variable_update=distributed_replicated", "--momentum=0.9", "--max_epochs=12"]
    code, output = distopt_run(2, EXAMPLES / "dgc.py", *options, timeout=60)
    assert code == 0, output
    assert [e[:2] for e in epochs_of(output)] == [(1, 0), (10, 0), (12, 0)]
    assert {e[3] for e in epochs_of(output)} == {12 * 4 * (sum(WEIGHTS) + BIASES + 6)}  # the last one fills 64 bytes
    assert accuracy(output) > 0.95


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--sync_replicas=False", "--sync_replicas: must be True, got False: distopt is synchronous"),
        ("--sync_replicas=async", "--sync_replicas: must be True or False, got 'async'"),
        ("--dgc_momentum_factor_masking=Yes", "masking: must be True or False, got 'Yes'"),
        ("--use_fp16=1", "--use_fp16: must be True or False, got '1'"),
        ("--dgc_sparsity_strategy=0.75,1.5", "must be numbers in [0, 1), as in 0.75,0.9375,0.984375,0.996,0.999"),
        ("--dgc_sparsity_strategy=75%", "got '75%'"),
        ("--dgc_momentum_type=heavy", "choose from"),
        ("--dgc_total_samples=0", "must be a whole number, 1 or more, got '0'"),
    ],
)
def test_the_dgc_example_refuses_wrong_options(option, answer, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["dgc.py", option])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("dgc").main()
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--learning_rate_strategy=0.1", "must be EPOCH:LR"),
        ("--dgc_momentum=1.5", "momentum must be"),
        ("--momentum=0.9", "the optimizer must be without momentum"),
    ],
)
def test_the_dgc_example_ends_where_its_parts_refuse_an_option(option, answer):
    code, output = distopt_run(1, EXAMPLES / "dgc.py", option, timeout=60)
    assert code != 0
    assert answer in output
    assert "test accuracy 0" not in output


@pytest.fixture
def volume(monkeypatch):
    """examples/volume.py as a module."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("volume")


def test_the_volume_example_writes_the_bytes_of_its_formulas(tmp_path):
    """One epoch of 11 steps; dense is a sum of 301,072 elements, top-K 3,011 pairs of 8 bytes to the other rank.

    With 8 ranks it takes two phases, in which the owner of a shard sends as many entries as lie in it.
    """
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install 'distopt[plot]'")
    picture, records = tmp_path / "volume.png", tmp_path / "of" / "runs"
    options = ["--modes", "dense", "topk-0.01", "--ranks", 2, 8, "--epochs", 1, "--seeds", 2]
    command = [sys.executable, EXAMPLES / "volume.py", *options, "--out", records, "--plot", picture]
    as_a_user = dict(os.environ) | {"PYTHONSAFEPATH": ""}  # a script finds its neighbours
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, env=as_a_user)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(list(records.iterdir())) == 8
    for ranks in (2, 8):
        sent = {"dense": 2 * (ranks - 1) * 4 * 301_072 // ranks, "topk-0.01": (ranks - 1) * 8 * 3011}
        for mode, wire in sent.items():
            for seed in (1, 2):
                found = experiment.read(records / f"{mode}-{ranks}-ranks-seed-{seed}.json")
                (total,) = found["curves"]["wire"]["values"]
                assert found["curves"]["wire"]["steps"] == [11]
                assert found["totals"].pop("start broadcast")["payload"] == 4 * 301_066  # there is no gap
                assert sum(verb["wire"] for verb in found["totals"].values()) == total
                if ranks == 2 or mode == "dense":
                    assert total == 11 * wire
                else:
                    assert 0.1 * 11 * wire < total < 0.5 * 11 * wire
                assert found["results"]["accuracy"] == found["curves"]["accuracy"]["values"][-1] > 0.2
    rows = re.findall(r"^  (dense|topk-0.01) +0\.\d+ 0\.\d+ .* ([\d.]+) x +- -", done.stdout, re.M)
    assert [mode for mode, _ in rows] == ["dense", "topk-0.01"] * 2
    assert [float(times) for _, times in rows[:3]] == [1.0, 50.0, 1.0]
    assert float(rows[3][1]) > 25


@pytest.mark.parametrize("mode", ["threshold", "dgc-packed"])
def test_volume_has_the_numbers_of_real_ranks(mode, volume):
    """The same function trains virtual ranks and threads: parameters to the bit, bytes one by one."""
    run = volume.Run(mode, ranks=2, seed=1, epochs=2)

    def real(comm):
        layers, opt = volume.network(run), DistOpt(volume.optimizer(run), Metered(comm), deterministic=True)
        compressor = volume.MODES[mode](run.steps)
        step = lambda losses: opt.step(losses(comm.rank), compressor)  # noqa: E731
        epochs = list(volume.train(run, layers, step, opt.communicator.ledger))
        return [p.data for layer in layers for p in layer.params], epochs, opt.communicator.report()

    with volume.threadpool_limits(1):
        (params, epochs, report), _ = run_ranks(2, real)
        layers, sim = volume.network(run), simulate(2, volume.optimizer(run))
        step = functools.partial(sim.step, compressor=volume.MODES[mode](run.steps))
        virtual = list(volume.train(run, layers, step, sim.ledger))
    for expected, p in zip(params, (p for layer in layers for p in layer.params), strict=True):
        np.testing.assert_array_equal(p.data.view(np.uint32), expected.view(np.uint32))
    assert [e._replace(loss=0) for e in virtual] == [e._replace(loss=0) for e in epochs]  # a rank knows its own loss
    assert sim.report() == report


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (["--ranks", "1"], "--ranks: must share out 128 samples, so be 2, 4, 8 ... 128, got 1"),
        (["--ranks", "2", "3"], "got 3"),
        (["--ranks", "two"], "must be a whole number, 1 or more, got 'two'"),
        (["--modes", "topk"], "--modes: invalid choice: 'topk'"),
        (["--seeds", "0"], "got '0'"),
        (["--plot", "volume.txt"], "a picture must end in .png, .svg, .pdf, got volume.txt"),
    ],
)
def test_the_volume_example_refuses_wrong_options(options, answer, volume, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["volume.py", *options, "--out", str(tmp_path / "runs")])
    with pytest.raises(SystemExit, match="2"):
        volume.main()
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 4])
def test_local_steps_learn_as_much_with_fewer_bytes(size, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install 'distopt[plot]'")
    picture = tmp_path / "local.png"
    code, output = distopt_run(size, EXAMPLES / "local_steps.py", "--every", "1", "10", "--plot", picture, timeout=90)
    assert code == 0, output
    rows = re.findall(r"^\s*(?:\[0\])?\s*(\d+) +(0\.\d{4}) +([\d.]+) MB", output, re.M)
    assert [int(every) for every, _, _ in rows] == [1, 10], output
    assert all(float(good) >= 0.96 for _, good, _ in rows)
    assert float(rows[0][2]) == pytest.approx(10 * float(rows[1][2]), rel=0.05)
    assert picture.read_bytes().startswith(b"\x89PNG")
