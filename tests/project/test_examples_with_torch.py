"""The examples for PyTorch learn, by every transport and in every mode, on ranks of torchrun and of MPI."""

import re
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
import torch_examples  # noqa: E402
from gloo_launch import run_torch  # noqa: E402

from launch import PROJECT, distopt_run, finish  # noqa: E402

pytestmark = pytest.mark.torch
EXAMPLES = PROJECT / "examples"


def torchrun(ranks, *script, timeout):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return finish([*command, *map(str, script)], timeout, env={"OMP_NUM_THREADS": "1"})


def losses(output):
    return [float(loss) for loss in re.findall(r"  loss (\S+)  test accuracy [01]\.\d{4}$", output, re.M)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Rows of every case, one for each epoch: training loss first, accuracy last."""
    rows, others = run_torch(2, torch_examples.train_all, tmp_path_factory.mktemp("ranks"), timeout=300)
    for name, of_case in rows.items():
        np.testing.assert_array_equal(of_case, others[name], err_msg=name)
    return rows


@pytest.mark.parametrize("name", torch_examples.CASES)
def test_an_example_learns(name, trained):
    rows = trained[name]
    assert rows[-1, 0] < 0.6 < 2 < rows[0, 0]
    assert rows[-1, -1] > 0.85


def check_alike(rows, others):
    """Rounding alone differs.  After hundreds of steps a tie of max_pool2d, or a relu at 0, may go the other way."""
    losses, expected = np.asarray(rows), np.asarray(others)
    np.testing.assert_allclose(losses[0], expected[0], rtol=1e-4)
    np.testing.assert_allclose(losses, expected, rtol=0.2)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("digits: dense by DDP", "digits: dense"),
        ("digits: DDP without distopt", "digits: dense"),
        ("SINGA: plain, fused", "SINGA: plain"),
    ],
)
def test_losses_are_those_of_torch(name, other, trained):
    check_alike(trained[name][:, 0], trained[other][:, 0])


def test_every_number_of_ranks_trains_alike(trained):
    """A process alone, without a launcher, has the losses of two ranks."""
    command = [sys.executable, EXAMPLES / "torch_digits.py", "--epochs", "6"]
    code, output = finish(command, 60, env={"OMP_NUM_THREADS": "1"})
    assert code == 0, output
    check_alike(losses(output), trained["digits: dense"][:, 0])


@pytest.mark.parametrize(
    ("launch", "options"), [(torchrun, ()), pytest.param(distopt_run, ("--ddp",), marks=pytest.mark.mpi)]
)
def test_launchers_start_the_digits_example(launch, options):
    """DistributedDataParallel gets its process group from the script where the launcher is MPI's."""
    code, output = launch(2, EXAMPLES / "torch_digits.py", "--mode", "int8", "--epochs", 2, *options, timeout=60)
    assert code == 0, output
    assert len(losses(output)) == 2
    sent = float(re.search(r"sent per rank: (\S+) MB \(2 ranks, int8\)$", output, re.M)[1])
    parameters = sum(p.numel() for p in torch_examples.torch_digits.network().parameters())
    assert sent == pytest.approx(2 * 22 * 1e-6 * parameters, rel=0.03)  # a byte each, and scales


@pytest.mark.mpi
def test_mpi_starts_singas_example():
    options = ["--max-epoch", 2, "--dist-option", "sparseTopK", "--fused"]
    code, output = distopt_run(2, EXAMPLES / "torch_singa.py", *options, timeout=60)
    assert code == 0, output
    assert len(re.findall(r"evaluation accuracy [01]\.\d{4}$", output, re.M)) == 2
