"""The study of examples/study: it goes on where it was killed, and its tables and pictures are those of its records."""

import importlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks.namespaces import missing
from distopt.experiment import read
from launch import PROJECT, finish

STUDY = PROJECT / "examples" / "study"
PUBLISHED = PROJECT / "docs" / "experiments" / "study"
TINY = ["--no-hosts", "--epochs", "1", "--seeds", "2", "--modes", "dense", "topk=0.01", "local=10", "--out"]
AS_A_USER = {"PYTHONSAFEPATH": ""}  # a script finds its neighbours


def command(folder, *options):
    return [sys.executable, str(STUDY / "study.py"), *TINY, str(folder), *options]


@pytest.fixture
def study(monkeypatch):
    """examples/study/study.py as a module."""
    for folder in (STUDY.parent, STUDY):
        monkeypatch.syspath_prepend(folder)
    return importlib.import_module("study")


def numbers(folder):
    """What is to be the same in each repetition."""
    of_trainings = sorted((folder / "records").glob("training-*.json"))
    fields = ("mode", "seed", "settings", "curves", "totals", "steps")
    return {path.name: [read(path)[field] for field in fields] for path in of_trainings}


@pytest.mark.thorough
@pytest.mark.plot
def test_a_study_that_was_killed_goes_on_where_it_was(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install 'distopt[plot]'")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    first = killed / "records" / "training-dense-seed-1.json"
    job = subprocess.Popen(command(killed), env=os.environ | AS_A_USER, stderr=subprocess.DEVNULL)
    for _ in range(1200):
        if first.exists() or job.poll() is not None:
            break
        time.sleep(0.05)
    job.send_signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    before = first.read_bytes()
    assert len(numbers(killed)) < 6
    for folder in (killed, whole):
        code, output = finish(command(folder), 200, env=AS_A_USER)
        assert code == 0, output
    assert first.read_bytes() == before
    assert numbers(killed) == numbers(whole)
    assert len(numbers(whole)) == 6
    for folder in (killed, whole):
        assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
        text = (folder / "tables.md").read_text()
        assert "| top-K 1 % | " in text
        assert "measured / predicted" not in text, "nothing was measured between hosts"
    code, output = finish(command(killed, "--epochs", "2"), 60, env=AS_A_USER)
    assert code == 2, output
    assert "training-dense-seed-1.json: settings must be {" in output
    assert first.read_bytes() == before


def test_a_record_that_was_interrupted_is_measured_again(study, tmp_path):
    def interrupted(experiment):
        experiment.log(1, accuracy=0.5)
        raise KeyboardInterrupt

    cell = study.cells.Cell("dense", "dense", 1, {"epochs": 1}, interrupted)
    with pytest.raises(KeyboardInterrupt):
        cell.run(tmp_path)
    assert read(tmp_path / "dense.json")["raised"] == "KeyboardInterrupt"
    assert cell.record(tmp_path) is None
    again = cell._replace(measure=lambda experiment: (None, {"accuracy": 0.75}))
    again.run(tmp_path)
    assert cell.record(tmp_path)["results"]["accuracy"] == 0.75


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mode",
    [
        *("dense", "half", "int8", "2bit=0.05", "topk=0.01", "topk=0.001+packed", "dgc=0.001+packed+1d"),
        *("local=10", "local=50", "local=50+chunks=64/4096+packed:2bit"),
    ],
)
def test_what_advise_predicts_are_the_bytes_that_the_ledger_counts(mode, study):
    """Of the second window of a mode; of DGC the sixth step, when its warm-up is over."""
    trainings, volume = study.trainings, importlib.import_module("volume")
    assert mode in trainings.MODES
    run, windows = volume.Run(mode, trainings.RANKS, seed=1, epochs=1), 6 if mode.startswith("dgc") else 2
    (images, labels), _ = volume.digits(np)
    layers, (ranks, step, _) = trainings.network(1), trainings.virtual(run)
    sent = []
    for _ in range(windows):
        for _ in range(trainings.every(mode)):
            step(lambda rank: volume.gradients(layers, images[rank : rank + 2], labels[rank : rank + 2], []))
        sent.append(ranks.ledger.total_of_steps()["sent"])
    buckets = study.cells.buckets(trainings.shapes())
    advice = study.cells.advise(buckets, trainings.RANKS, study.cells.network("1GbE"), [mode], measure=None)
    (choice,) = (choice for choice in advice.choices if choice.mode.name == mode)
    assert (sent[-1] - sent[-2]) / trainings.every(mode) == pytest.approx(choice.sends.sent, abs=1)


@pytest.mark.mpi
def test_a_round_of_steps_between_two_hosts_is_recorded(study, tmp_path):
    if reason := missing():
        pytest.skip(reason)
    cell = study.cells.steps("grid", "1gbit", ["dense", "local=2"], 2, 1)
    cell.run(tmp_path)
    record = cell.record(tmp_path)
    assert record["topology"] == {"ranks": 2, "hosts": 2}
    assert set(record["curves"]) == {"one rank alone", "dense", "local=2"}
    steps = study.results.Steps([record])
    line = 8 * 1_126_410 * 4 / 1e9  # seconds of the gradients' bytes
    assert steps.median("1gbit", "dense") > line
    assert steps.median("1gbit", "local=2") > line / 2


@pytest.mark.plot
def test_tables_and_pictures_are_those_of_the_records(study, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install 'distopt[plot]'")
    records = PUBLISHED / "records"
    rounds = len(list(records.glob("steps-1gbit-round-*.json")))
    planned = study.plan(3, study.trainings.EPOCHS, list(study.trainings.MODES), rounds)
    found = [cell.record(records) for cell in planned]
    assert None not in found
    assert len(found) == len(list(records.iterdir()))
    study.show(study.results.Study(found), tmp_path)
    assert (tmp_path / "tables.md").read_text() == (PUBLISHED / "tables.md").read_text()
    for picture in ("accuracy.png", "grid.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert sum(path.stat().st_size for path in records.iterdir()) < 300_000
