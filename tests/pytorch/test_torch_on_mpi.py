"""torch under mpirun and distopt run: the communicator of MPI serves tensors, with the results of torch's ranks."""

import functools
import sys

import numpy as np
import pytest
from gloo_launch import run_torch

import launch
from tiers import by_size

pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
import mpi_ranks
import pass_cases
import sync_cases

pytestmark = [pytest.mark.torch, pytest.mark.mpi]


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory):
    """Runs all cases of ``synchronize`` under mpiexec, once for each number of ranks."""

    def ranks(size):
        folder = tmp_path_factory.mktemp("r")
        return launch.run_mpi(size, mpi_ranks.cases, folder, str(folder / "store"), timeout=300)

    return functools.cache(ranks)


@pytest.mark.parametrize(("size", "name"), by_size(sync_cases.cases_of, [2], full=[3]))
def test_synchronize_on_mpi(ranks_of, size, name):
    for rank in ranks_of(size):
        assert not str(rank[name]), str(rank[name])


@pytest.fixture(scope="module")
def passes(tmp_path_factory):
    """What two ranks have run of all cases of passes."""
    return launch.run_mpi(2, pass_cases.run_all, tmp_path_factory.mktemp("p"), timeout=300)


@pytest.mark.parametrize("name", pass_cases.cases_of(2))
def test_what_an_exchange_is_on_mpi(passes, name):
    for rank in passes:
        assert not str(rank[name]), str(rank[name])


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_mpi_and_torchrun_train_alike(size, tmp_path):
    """To the bit: both add up in rank order."""
    mpi, gloo = (run(size, mpi_ranks.trained, tmp_path) for run in (launch.run_mpi, run_torch))
    for name, x in mpi[0].items():
        for one, other in zip(mpi, gloo, strict=True):
            np.testing.assert_array_equal(one[name], x, name)
            np.testing.assert_array_equal(other[name], x, name)


def test_a_layer_is_thawed_on_all_ranks_or_refused_by_name(tmp_path):
    mpi, gloo = (run(2, mpi_ranks.changing, tmp_path) for run in (launch.run_mpi, run_torch))
    for rank in (*mpi, *gloo):
        assert "rank 1 has parameters that require a gradient from now on: 0.bias, 0.weight" in str(rank["text"])
        np.testing.assert_array_equal(rank["parameters"], mpi[0]["parameters"])


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
import distopt, distopt.torch as dt
{before}
model = torch.nn.Linear(4, 1, bias=False)
opt = distopt.DistOpt(distopt.optim.SGD(1.0), params=model)
before = model.weight.detach().clone()
opt(model(torch.ones(1, 4) * (1 + opt.global_rank)).sum())
assert torch.allclose(before - model.weight, torch.full((1, 4), 1.5)), (before, model.weight)
print(distopt.world())
"""
OWN_GROUP = """
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
dist.init_process_group("gloo", init_method="file://" + sys.argv[0] + ".store", rank=rank, world_size=2)
"""


@pytest.mark.parametrize("before", ["", OWN_GROUP])
def test_a_script_under_distopt_run(before, tmp_path):
    """With a process group of its own, too, it is MPI's ranks that train."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(before=before))
    code, output = launch.distopt_run(2, script, timeout=90, env={"OMP_NUM_THREADS": "1"})
    assert code == 0, output
    assert output.count("<MpiCommunicator, rank ") == 2
    assert "mpi" in output.partition(" set ")[0], output


def test_torchrun_inside_of_mpiexec_wins(tmp_path):
    """One torchrun, as a wrapper on each node starts it; MPI's variables are inherited."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(before=""))
    launcher = launch.find_launcher()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    code, output = launch.finish(
        [*launcher.command(1), *torchrun], 90, env=launcher.environment(1) | {"OMP_NUM_THREADS": "1"}
    )
    assert code == 0, output
    assert output.count("gloo; torchrun set RANK=") == 2, output


def test_ranks_of_distopt_run_inside_of_torchrun_are_mpis(tmp_path):
    """The innermost launcher is the one that started them."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(before=""))
    inner = [sys.executable, "-m", "distopt", "run", "-n", "2", str(script)]
    (tmp_path / "outer.py").write_text(f"import subprocess\nsubprocess.run({inner}, check=True)")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    code, output = launch.finish([*torchrun, str(tmp_path / "outer.py")], 90, env={"OMP_NUM_THREADS": "1"})
    assert code == 0, output
    assert output.count("<MpiCommunicator, rank ") == 2, output
