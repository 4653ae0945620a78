"""One script as users write it: make test-gpu-train.  It runs in CI on doubles (tests/project/test_train_gpu.py)."""

import importlib.util
import sys

import gpu_training
import pytest
import workers

from distopt import device
from distopt.run.launcher import find_launcher
from launch import has_mpi

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("loopback")]


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
def test_a_job_that_is_killed_goes_on_with_the_same_bits(optimizer, tmp_path):
    train = gpu_training.launched(sys.executable, gpu_training.SCRIPT, "--optimizer", optimizer)
    gpu_training.loses_a_rank_and_goes_on(train, tmp_path)


@pytest.mark.parametrize("size", workers.SIZES[1:])
def test_so_does_a_job_of_several_ranks(size, tmp_path):
    train = gpu_training.of_children(size, tmp_path / "found", workers.begin)
    gpu_training.loses_a_rank_and_goes_on(train, tmp_path / "saved")


@pytest.mark.skipif(device.gpu_state() != "ok" or device.gpu_count() < 2, reason="there are no two GPUs")
def test_so_does_one_under_a_launcher_with_a_gpu_for_each_rank(tmp_path):
    size = min(4, device.gpu_count())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", size]
    if has_mpi():
        launcher = [*find_launcher().command(size), sys.executable]
    elif importlib.util.find_spec("torch") is None:
        pytest.skip("there is neither mpirun nor torchrun")
    train = gpu_training.launched(*launcher, gpu_training.SCRIPT)
    gpu_training.loses_a_rank_and_goes_on(train, tmp_path)
