"""examples/train_gpu.py, whole and unchanged, on doubles of GPUs; tests/gpu/test_train.py runs it on real ones."""

import importlib
import sys

import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")

import gpu_training
import spawned

from distopt.run.launcher import find_launcher
from doubles import shim
from launch import PROJECT, needs_mpi

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("doubles")]
SMALL = ["--model", "mlp", "--batch", "8"]
ON_DOUBLES = [sys.executable, PROJECT / "tests/doubles/script.py", gpu_training.SCRIPT]


def test_a_process_without_a_launcher_is_killed_and_goes_on_with_the_same_bits(tmp_path):
    shim.library("float")  # once, instead of by each process
    gpu_training.loses_a_rank_and_goes_on(gpu_training.launched(*ON_DOUBLES, *SMALL), tmp_path)


@needs_mpi
@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
def test_four_ranks_of_mpirun_lose_one_and_go_on_with_the_same_bits(optimizer, tmp_path):
    shim.library("float")
    launcher = find_launcher()
    train = gpu_training.launched(*launcher.command(4), *ON_DOUBLES, *SMALL, timeout=240.0, **launcher.environment(4))
    gpu_training.loses_a_rank_and_goes_on(train, tmp_path, "--optimizer", optimizer)


def on_doubles(rank):
    """For a process that has no GPU, whose arrays are to calculate."""
    spawned.on_doubles(rank)
    importlib.import_module("doubles.arithmetic").install()


def test_children_that_share_a_gpu_lose_one_and_go_on_with_the_same_bits(tmp_path):
    shim.library("float")
    train = gpu_training.of_children(2, tmp_path / "found", on_doubles)
    gpu_training.loses_a_rank_and_goes_on(train, tmp_path / "saved", *SMALL)
