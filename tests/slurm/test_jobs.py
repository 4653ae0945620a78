"""The scripts of examples/slurm on a real Slurm: they train, save when they are asked to end, and outlive a node."""

import os
import signal

import pytest
from cluster import lacks_pmix
from slurm_jobs import Job

from distopt.run.launcher import find_launcher

pytestmark = pytest.mark.slurm
ENDLESS = 10**6
TRAINED = r"test accuracy 0\.9[5-9]"


@pytest.fixture
def mpi():
    """The name of the script for the MPI library that is installed."""
    if find_launcher().brand == "MPICH":
        return "mpich"
    if lacks := lacks_pmix():
        pytest.skip(lacks)
    return "openmpi"


@pytest.fixture
def endless(cluster, tmp_path, mpi):
    """Two ranks on two nodes that train until they are ended."""
    job = Job.training(cluster, tmp_path, mpi, ENDLESS, "--nodes=2", "--ntasks-per-node=1")
    job.wait_for("step 100 ")
    return job


def saved_step(job):
    return int(job.wait_for(r"ended by SIGTERM after step (\d+); saved")[1])


def test_ranks_of_srun_and_an_mpi_train_on_two_nodes(cluster, tmp_path, mpi):
    job = Job.training(cluster, tmp_path, mpi, 300, "--nodes=2", "--ntasks-per-node=1")
    assert job.end() == "COMPLETED", job.read()
    job.wait_for(TRAINED)
    for rank, node in enumerate(["node1", "node2"]):
        assert f"rank {rank} of 2 on {node} begins at step 0" in job.read()


@pytest.mark.parametrize("name", ["torchrun", "elastic"])
def test_one_launcher_on_each_node_starts_the_ranks(cluster, tmp_path, name):
    pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
    job = Job.training(cluster, tmp_path, name, 300)
    assert job.end() == "COMPLETED", job.read()
    job.wait_for(TRAINED)
    assert "of 2 on node1 begins at step 0" in job.read()
    assert "of 2 on node2 begins at step 0" in job.read()


def test_an_elastic_job_goes_on_without_a_node(cluster, tmp_path):
    pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
    job = Job.training(cluster, tmp_path, "elastic", ENDLESS)
    job.wait_for("step 100 ")
    lost = job.processes("node2")
    assert len(lost) >= 2, "distopt run and its rank"
    for process in lost:
        os.kill(process, signal.SIGKILL)
    job.wait_for("lost rank 1 of 2 at step .*; 1 go")
    job.call("scancel", "--signal=TERM")
    assert saved_step(job) > 100
    job.call("scancel")
    job.end()


def test_a_step_that_loses_a_rank_ends_the_job(endless):
    os.kill(endless.processes("node2")[0], signal.SIGKILL)
    assert endless.end() == "FAILED"
    assert "ExitCode=0:0" not in endless.show()
    assert "Restarts=0" in endless.show()


def test_ranks_save_when_their_job_is_cancelled(endless):
    endless.call("scancel")
    assert endless.end() == "CANCELLED"
    assert saved_step(endless) >= 100
    assert "Restarts=0" in endless.show()


def test_a_job_that_is_asked_to_end_comes_back_and_goes_on_where_it_stopped(cluster, endless):
    endless.call("scancel", "--signal=TERM")
    step = saved_step(endless)
    cluster.wait(lambda: "JobState=PENDING" in endless.show() and endless.has_ended_on_nodes(), "the queue")
    cluster.call("scontrol", "update", f"JobId={endless.number}", "StartTime=now")  # and not two minutes later
    endless.wait_for(f"rank 1 of 2 on .* begins at step {step}\n")
    endless.call("scancel")
    endless.end()


def test_ranks_save_before_the_time_is_up(cluster, endless):
    """The script asks for SIGTERM 120 s before the end."""
    cluster.call("scontrol", "update", f"JobId={endless.number}", "TimeLimit=2")
    assert saved_step(endless) >= 100
    endless.call("scancel")  # the script has put it into the queue again
    assert endless.end() == "CANCELLED"


def test_each_task_of_an_array_studies_one_mode(cluster, tmp_path):
    pytest.importorskip("threadpoolctl")
    smaller = {"--seeds 3": "--seeds 1 --epochs 1", "--out runs": f"--out {tmp_path}/runs"}
    job = Job(cluster, tmp_path, "volume_study", smaller)
    assert job.end() == "COMPLETED", [file.read_text() for file in tmp_path.glob("output-*.txt")]
    records = sorted(file.name for file in (tmp_path / "runs").iterdir())
    assert len(records) == 4 * 2, records  # modes, numbers of ranks
