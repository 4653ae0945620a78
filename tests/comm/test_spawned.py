"""What runs on real GPUs (tests/gpu/test_ranks.py), on doubles: its processes, and its jobs."""

import argparse
import functools
import os

import numpy as np
import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")

import cupy
import spawned
import workers

import laws
from distopt.comm.nccl_library import REGISTER
from distopt.lab.laws import ranks

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("doubles")]


@pytest.mark.parametrize(
    "job", [spawned.verbs, spawned.streams, spawned.steps, spawned.captured], ids=lambda j: j.__name__
)
def test_jobs_for_real_gpus_pass_on_doubles(job, tmp_path):
    found = spawned.run(job, 2, tmp_path, spawned.on_doubles, timeout=120.0)
    assert found == {"0": "done", "1": "done"}


def registered(rank):
    """Doubles, and the variable that registers buckets."""
    os.environ[REGISTER] = "1"
    spawned.on_doubles(rank)


def test_the_job_of_registered_buckets_passes_on_doubles(tmp_path):
    found = spawned.run(spawned.registered, 2, tmp_path, registered, timeout=120.0)
    assert found == {"0": "done", "1": "done"}


def test_a_part_of_the_laws_passes_on_doubles(tmp_path):
    found = spawned.run(functools.partial(spawned.law, part="more"), 2, tmp_path, spawned.on_doubles, timeout=120.0)
    assert found == {"0": "done", "1": "done"}


def test_the_parts_of_the_laws_are_all_of_them(monkeypatch):
    """``laws.all_of_them`` has the digests beside them."""
    whole, parts = [], []
    names = ("ranks_agree_with_whole_batch", "nothing_is_lost", "ranks_agree_with_one", "same_bits", "resume")
    for name in (*names, "modes_agree", "overlap_changes_no_bit", "independence"):
        for module in (laws, ranks):
            monkeypatch.setattr(module, name, lambda comm, *rest, name=name, **more: called.append((name, rest, more)))
    comm, called = argparse.Namespace(gpu=0, alloc=np.zeros, peers=lambda _: None), whole
    laws.all_of_them(comm)
    called = parts
    for part in spawned.LAWS:
        spawned.law(comm, part)
    spawned.digests(comm)
    assert sorted(map(repr, parts)) == sorted(map(repr, whole))
    assert len(whole) > 100


def test_ranks_claim_to_be_different_hosts_only_where_they_share_a_gpu(monkeypatch):
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 4)
    assert workers.environment(1) == {}
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 3)
    assert workers.environment(1)["NCCL_HOSTID"] == "rank1"
    assert workers.environment(1)["NCCL_NET"] == "Socket"


def wrong(comm):
    assert comm.rank == 0, "a law is broken"
    return "done"


def test_a_spawned_rank_that_fails_is_reported(tmp_path):
    found = spawned.run(wrong, 2, tmp_path, spawned.on_doubles)
    assert found["0"] == "done"
    assert found["1"].startswith("AssertionError: a law is broken")
