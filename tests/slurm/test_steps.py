"""Steps of srun, with the right option for MPI and with the wrong one."""

import importlib.util
import sys

import pytest

from launch import find_launcher, finish

pytestmark = pytest.mark.slurm
SCRIPT = "import numpy as np, distopt; w = distopt.world(); x = np.ones(1); w.all_reduce(x); print(f'sum {x[0]:g}')"


def srun(cluster, *arguments):
    """(exit code, output) of a step."""
    return finish(["srun", *arguments], 120, env=cluster.environment)


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return file


@pytest.fixture
def mpich():
    if find_launcher().brand != "MPICH":
        pytest.skip("needs MPICH: Slurm's plugin for Open MPI is not everywhere")


def test_distopt_run_inside_a_step_starts_ranks_by_itself(cluster, script):
    """Slurm's own launcher would wait for the cores of the step that waits for it."""
    code, output = srun(cluster, "-n", "1", sys.executable, "-m", "distopt", "run", "-n", "2", str(script))
    assert (code, output.count("sum 2")) == (0, 2), output


def test_srun_without_the_right_mpi_option_takes_torch_or_says_what_to_add(cluster, script):
    code, output = srun(cluster, "-n", "2", "--mpi=none", sys.executable, str(script))
    if importlib.util.find_spec("torch"):
        assert (code, output.count("sum 2")) == (0, 2), output
        return
    kind = "pmi2" if find_launcher().brand == "MPICH" else "pmix"
    assert code != 0, output
    assert f"Start with: srun --mpi={kind} -n 2 python script.py" in output
    assert "sum 1" not in output


@pytest.mark.usefixtures("mpich")
def test_srun_starts_ranks_of_mpich(cluster, script):
    code, output = srun(cluster, "-n", "2", "--mpi=pmi2", sys.executable, str(script))
    assert (code, output.count("sum 2")) == (0, 2), output


@pytest.mark.usefixtures("mpich")
def test_a_rank_that_fails_before_the_ranks_have_met_ends_the_step(cluster, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, distopt\nif os.environ['SLURM_PROCID'] == '1': 1 / 0\n" + SCRIPT)
    code, output = finish(
        ["srun", "-K", "-n", "2", "--mpi=pmi2", sys.executable, str(script)], 120, env=cluster.environment
    )
    assert code != 0, output
    assert "rank 1: Traceback" in output
    assert "sum" not in output
