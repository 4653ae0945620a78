"""Ranks that end too early, over NCCL on a real GPU: make test-gpu-faults."""

import time

import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
import nccl_checks
import spawned
import workers

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("loopback")]
TIMEOUT = 120.0


def run(job, folder, size=2):
    """What came of the ranks, and the seconds until all had ended."""
    started = time.monotonic()
    found = spawned.run(job, size, folder, workers.begin, timeout=TIMEOUT)
    return found, time.monotonic() - started


@pytest.mark.parametrize("size", workers.SIZES[:2])
def test_a_process_that_closes_nothing_ends(size, tmp_path):
    found, _ = run(nccl_checks.forgotten, tmp_path, size)
    assert found == {str(rank): "done" for rank in range(size)}


def test_a_process_that_is_killed_is_named_by_the_other_which_ends(tmp_path):
    """Its GPU waits for ever for the part of a sum, until NCCL is told to abort."""
    found, seconds = run(nccl_checks.killed, tmp_path)
    assert found == {"0": "PeerLeft: rank 1 ended without a word, before a barrier"}
    assert seconds < 60, "the other's exit may take ten seconds, and the start of CUDA and NCCL some more"


def test_a_process_that_leaves_early_is_named_by_the_other(tmp_path):
    found, _ = run(nccl_checks.left, tmp_path)
    assert found == {"0": "PeerLeft: rank 1 left after a barrier, before a step", "1": "None"}


def test_a_process_that_fails_after_a_vote_is_named_by_the_other(tmp_path):
    found, _ = run(nccl_checks.fails, tmp_path)
    assert list(found) == ["0"]
    assert found["0"].startswith("PeerLeft: rank 1 failed with KeyboardInterrupt: , after step 2, before ")
