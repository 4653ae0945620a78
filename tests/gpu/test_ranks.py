"""NCCL on real GPUs: make test-gpu-one, test-gpu-two and test-gpu-four.

Ranks may share a GPU; the same ranks run in CI on doubles (tests/comm/test_spawned.py).
"""

import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
import spawned
import workers

from launch import needs_mpi, run_mpi

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("loopback")]

# A collective of several ranks on one GPU takes some ten milliseconds, most of them for taking turns.
TIMEOUT = 120.0
JOBS = [spawned.verbs, spawned.streams, spawned.captured, spawned.steps]


@pytest.mark.parametrize("size", workers.SIZES)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_ranks_over_nccl_do_their_job(job, size, tmp_path):
    found = spawned.run(job, size, tmp_path, workers.begin, timeout=TIMEOUT)
    assert found == {str(rank): "done" for rank in range(size)}


@pytest.mark.parametrize("size", workers.SIZES)
def test_buckets_may_be_registered_with_nccl(size, tmp_path):
    found = spawned.run(spawned.registered, size, tmp_path, workers.with_registered_buckets, timeout=TIMEOUT)
    assert found == {str(rank): "done" for rank in range(size)}


@pytest.mark.mpi
@needs_mpi
def test_two_ranks_may_vote_over_mpi(tmp_path):
    run_mpi(2, workers.over_mpi, tmp_path, timeout=TIMEOUT)
