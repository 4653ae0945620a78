"""The examples run as their users run them, on real data."""

import re
from pathlib import Path

import pytest

from launch import distopt_run, needs_mpi

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = needs_mpi


def accuracy(output):
    return float(re.search(r"test accuracy (0\.\d{4}|1\.0000)$", output, re.M)[1])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_digits(size):
    code, output = distopt_run(size, EXAMPLES / "digits.py", timeout=60)
    assert code == 0, output
    assert accuracy(output) >= 0.96
    sent = int(re.search(r"sent per rank and step: ([\d,]+) bytes", output)[1].replace(",", ""))
    elements = 64 * 128 + 128 + 128 * 10 + 16  # the last bias is padded to 64 bytes
    assert sent == 2 * (size - 1) * 4 * elements // size or abs(sent - 2 * (size - 1) * 4 * elements / size) < 64


def test_digits_with_a_cnn_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install 'distopt[plot]'")
    picture = tmp_path / "digits.png"
    code, output = distopt_run(
        2, EXAMPLES / "digits.py", "--model", "cnn", "--epochs", 8, "--plot", picture, timeout=60
    )
    assert code == 0, output
    assert accuracy(output) >= 0.96
    assert picture.read_bytes().startswith(b"\x89PNG")


SHARES = {"half": 0.51, "partial": 0.3, "topk": 0.05, "threshold": 0.5, "2bit": 1 / 15, "1bit": 1 / 30}


@pytest.mark.parametrize("mode", SHARES)
def test_digits_in_every_mode(mode):
    lr = 0.03 if mode == "1bit" else 0.1
    code, output = distopt_run(2, EXAMPLES / "digits.py", "--mode", mode, "--lr", lr, timeout=60)
    assert code == 0, output
    assert accuracy(output) >= 0.96
    payload = int(re.search(r"payload per rank and step: ([\d,]+) bytes", output)[1].replace(",", ""))
    dense = 4 * (64 * 128 + 128 + 128 * 10 + 10)
    assert payload < dense * SHARES[mode]


def test_every_number_of_ranks_trains_alike():
    """The batch is shared out, so the losses of 1 and 2 ranks are the same up to rounding."""
    losses = []
    for size in (1, 2):
        _, output = distopt_run(size, EXAMPLES / "digits.py", "--epochs", 10, timeout=60)
        losses.append(float(re.search(r"epoch 10/10  loss (\S+)", output)[1]))
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_a_large_batch_costs_plain_sgd_accuracy_and_others_less(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install 'distopt[plot]'")
    picture = tmp_path / "large_batch.png"
    code, output = distopt_run(2, EXAMPLES / "large_batch.py", "--seeds", 1, "--plot", picture, timeout=120)
    assert code == 0, output
    found = {name: float(last) for name, last in re.findall(r"([A-Z][\w,' -]*\w) +\d+ +\d+ +(\d\.\d+)$", output, re.M)}
    assert found.pop("SGD") < 0.94
    assert len(found) == 6
    assert min(found.values()) > 0.96, found
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_large_batch_with_other_schedules():
    options = ["--lr-step-epochs", "2,3", "--warmup-strategy", "lars", "--num-epochs", 4, "--seeds", 1]
    code, output = distopt_run(2, EXAMPLES / "large_batch.py", *options, timeout=120)
    assert code == 0, output
    assert len(re.findall(r" \d\.\d+$", output, re.M)) == 7
