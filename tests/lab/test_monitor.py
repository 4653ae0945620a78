"""Callbacks, against what the standard library reads back."""

import csv
import json
import math
from contextlib import closing

import numpy as np
import pytest

from distopt.lab.experiment import Callback, CsvFile, Experiment, JsonLines, TensorBoard, WeightsAndBiases

CALLS = [
    (1, {"loss": 0.1 + 0.2, "loss, at night": np.float32(0.1)}),
    (2, {"loss": math.inf}),
    (5, {"loss": 7, "loss, at night": math.nan}),
]


class Board:
    """Both kinds of service."""

    def __init__(self):
        self.seen = []

    def add_scalar(self, name, number, step):
        self.seen.append((name, number, step))

    def log(self, numbers, step):
        self.seen.append((numbers, step))


def test_csv_file_writes_each_step_at_once_with_all_digits(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text("an older run\n")
    with closing(CsvFile(path)) as callback:
        for k, (step, numbers) in enumerate(CALLS):
            callback(step, numbers)
            assert len(path.read_text().splitlines()) == k + 2, "each line is there when the call returns"
    found = list(csv.reader(path.read_text().splitlines()))
    assert found[0] == ["step", "loss", "loss, at night"]
    assert [line[0] for line in found[1:]] == ["1", "2", "5"]
    assert float(found[1][1]) == 0.1 + 0.2, "all digits"
    assert float(found[1][2]) == float(np.float32(0.1))
    assert found[2][1:] == ["inf", ""]
    assert found[3][1:] == ["7", "nan"]


def test_csv_refuses_new_columns_and_writes_nothing(tmp_path):
    path = tmp_path / "run.csv"
    with closing(CsvFile(path)) as callback:
        callback(1, {"loss": 1.0})
        before = path.read_text()
        with pytest.raises(
            ValueError, match="names must be among the first call's columns step, loss, got accuracy, f1"
        ):
            callback(2, {"f1": 1.0, "loss": 0.5, "accuracy": 1.0})
        assert path.read_text() == before
        callback(2, {"loss": 0.5})
    assert path.read_text() == "step,loss\n1,1.0\n2,0.5\n"


def test_csv_waits_for_numbers_to_name_its_columns(tmp_path):
    path = tmp_path / "run.csv"
    with closing(CsvFile(path)) as callback:
        callback(1, {})
        callback(2, {"loss": 0.5})
        callback(3, {})
    assert path.read_text() == "step,loss\n2,0.5\n3,\n"


def test_json_lines_writes_each_step_at_once_as_strict_json(tmp_path):
    path = tmp_path / "run.jsonl"
    with closing(JsonLines(path)) as callback:
        for k, (step, numbers) in enumerate(CALLS):
            callback(step, numbers)
            assert len(path.read_text().splitlines()) == k + 1

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    assert [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 0.1 + 0.2, "loss, at night": float(np.float32(0.1))},
        {"step": 2, "loss": "Infinity"},
        {"step": 5, "loss": 7, "loss, at night": "NaN"},
    ]


def test_tensorboard_and_weights_and_biases_get_every_number():
    board, run = Board(), Board()
    for callback in (TensorBoard(board), WeightsAndBiases(run)):
        callback(3, {"loss": np.float64(0.5), "accuracy": 1})
    assert board.seen == [("loss", 0.5, 3), ("accuracy", 1, 3)]
    assert run.seen == [({"loss": 0.5, "accuracy": 1}, 3)]
    with pytest.raises(TypeError, match="writer must be an object with the method add_scalar"):
        TensorBoard("runs/1")
    with pytest.raises(TypeError, match="run must be an object with the method log"):
        WeightsAndBiases(None)


@pytest.mark.parametrize("kind", ["csv", "json", "board", "experiment"])
def test_monitors_refuse_wrong_steps_and_values(kind, tmp_path):
    path = tmp_path / "run"
    callback: Callback = {
        "csv": lambda: CsvFile(path),
        "json": lambda: JsonLines(path),
        "board": lambda: TensorBoard(Board()),
        "experiment": lambda: Experiment(path, "dense"),
    }[kind]()
    with pytest.raises(TypeError, match=r"step must be an integer, got 1.5"):
        callback(1.5, {"loss": 1.0})
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        callback(-1, {"loss": 1.0})
    with pytest.raises(TypeError, match=r"loss must be a number, got '1.0'"):
        callback(1, {"loss": "1.0"})
    with pytest.raises(ValueError, match="other than 'step'"):
        callback(1, {"step": 2})
    for numbers in ({3: 1.0}, None):
        with pytest.raises(TypeError, match="names of numbers must be texts, got"):
            callback(1, numbers)
    assert not path.exists() or path.read_text() == ""
    if kind in ("csv", "json"):
        callback.close()


@pytest.mark.parametrize("make", [CsvFile, JsonLines, lambda path: Experiment(path, "dense")])
def test_a_monitor_with_a_bad_path_fails_at_construction(make, tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        make(tmp_path / "missing" / "run")
    with pytest.raises(IsADirectoryError):
        make(tmp_path)
    assert not list(tmp_path.iterdir())
