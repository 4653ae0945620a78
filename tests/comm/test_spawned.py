"""What runs on real GPUs (tests/gpu/test_ranks.py), on doubles: its processes, and its jobs."""

import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")

import spawned

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("doubles")]


@pytest.mark.parametrize(
    "job", [spawned.verbs, spawned.streams, spawned.steps, spawned.captured], ids=lambda j: j.__name__
)
def test_jobs_for_real_gpus_pass_on_doubles(job, tmp_path):
    found = spawned.run(job, 2, tmp_path, spawned.on_doubles, timeout=120.0)
    assert found == {"0": "done", "1": "done"}


def wrong(comm):
    assert comm.rank == 0, "a law is broken"
    return "done"


def test_a_spawned_rank_that_fails_is_reported(tmp_path):
    found = spawned.run(wrong, 2, tmp_path, spawned.on_doubles)
    assert found["0"] == "done"
    assert found["1"].startswith("AssertionError: a law is broken")
