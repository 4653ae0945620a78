"""NCCL on real GPUs: make test-gpu-nccl.  Ranks may share one; the same ranks run in CI on doubles."""

import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
import nccl_checks
import spawned
import workers

from launch import needs_mpi, run_mpi

pytestmark = pytest.mark.gpu

# A collective of several ranks on one GPU takes some ten milliseconds, most of them for taking turns.
TIMEOUT = 120.0


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    """Where the parent, which makes the id, waits for the ranks."""
    for name, value in workers.SEVERAL_ON_ONE.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("job", [spawned.verbs, spawned.streams, spawned.captured], ids=lambda job: job.__name__)
def test_verbs_streams_and_captured_steps_work_on_real_nccl(job, size, tmp_path):
    found = spawned.run(job, size, tmp_path, workers.a_host_of_its_own, timeout=TIMEOUT)
    assert found == {str(rank): "done" for rank in range(size)}


@pytest.mark.parametrize("size", [2, 4])
def test_every_mode_has_the_same_bits_on_all_ranks(size, tmp_path):
    found = spawned.run(spawned.steps, size, tmp_path, workers.a_host_of_its_own, timeout=TIMEOUT)
    assert found == {str(rank): "done" for rank in range(size)}


def test_a_process_that_closes_nothing_ends(tmp_path):
    found = spawned.run(nccl_checks.forgotten, 2, tmp_path, workers.a_host_of_its_own, timeout=TIMEOUT)
    assert found == {"0": "done", "1": "done"}


def test_a_process_that_is_killed_is_named_by_the_other(tmp_path):
    """The other one learns it, and ends, although its GPU waits for ever."""
    found = spawned.run(nccl_checks.killed, 2, tmp_path, workers.a_host_of_its_own, timeout=TIMEOUT)
    assert found == {"0": "PeerLeft: rank 1 ended without a word, before a barrier"}


@pytest.mark.mpi
@needs_mpi
def test_processes_may_vote_over_mpi(tmp_path):
    run_mpi(2, workers.over_mpi, tmp_path, timeout=TIMEOUT)
