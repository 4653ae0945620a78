"""A rank with a GPU ends at any vote or call of NCCL, and the others go on with the bits of a run of fewer ranks."""

import collections
import sys
import zlib

import numpy as np
import pytest

from distopt.comm import Elastic, NcclCommunicator, run_ranks, threads
from doubles.ranks import on_gpus
from laws import inputs, lost
from laws.lost import Judge, Killed, made, same
from tiers import every

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
gpu, nccl = pytest.importorskip("doubles.gpu"), pytest.importorskip("doubles.nccl")

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("doubles")]

MODES = [
    *("dense", "overlap", "half", "clipped", "hooked", "top-K", "top-K in two phases", "dgc", "one bit in two phases"),
    *("int8", "three batches", "three batches of top-K", "three sums", "views", "partial", "share", "loss scaler"),
    *("local steps", "local steps of top-K"),
]


class Fate:
    """A rank ends at its ``at``-th vote or call of NCCL; its GPU does nothing more, and its memory is gone."""

    def __init__(self, rank=None, at=0):
        self.rank, self.at, self.ended = rank, at, []
        self.count = collections.Counter()

    def instant(self, rank):
        if self.ended and rank == self.rank:
            raise Killed  # on its way out
        self.count[rank] += 1
        if rank == self.rank and self.count[rank] == self.at:
            self.ended.append(rank)
            machine = gpu.machine()
            with machine.lock:
                machine.queues.clear()
            raise Killed


@pytest.fixture
def fate(monkeypatch):
    """Return a function that makes a fate the present one."""
    present, meet, submit = [], threads.ThreadRendezvous.meet, nccl.NcclCommunicator._submit

    def fated_meeting(meeting, rank, *arguments):
        present[-1].instant(meeting.ranks[rank])
        return meet(meeting, rank, *arguments)

    def fated_call(comm, call, stream):
        present[-1].instant(comm.device_id())
        try:
            submit(comm, call, stream)
        finally:
            if present[-1].ended and comm.device_id() == present[-1].rank:
                comm.abort()

    monkeypatch.setattr(threads.ThreadRendezvous, "meet", fated_meeting)
    monkeypatch.setattr(nccl.NcclCommunicator, "_submit", fated_call)

    def begin(**victim):
        present.append(Fate(**victim))
        return present[-1]

    return begin


def run(mode, ranks):
    """The same of ranks with a GPU each, over NCCL."""
    return lost.run(mode, ranks, lambda threads: NcclCommunicator.over(threads, gpu=threads.rank))


@pytest.mark.parametrize("mode", every(2, MODES))
def test_survivors_have_the_bits_of_fewer_ranks(mode, fate):
    """One instant of each mode for two ranks; the thorough tier has more."""
    judge, rng = Judge(mode, fate, run, launch=on_gpus), np.random.default_rng(zlib.crc32(mode.encode()))
    counting = fate()
    run(mode, 3)
    for victim in (0, 2):
        judge.judge(rank=victim, at=int(rng.integers(1, counting.count[victim] + 1)))


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_survivors_have_the_bits_of_fewer_ranks_whenever_one_ends(mode, fate):
    """At 4 instants of two ranks each."""
    judge, counting, rng = Judge(mode, fate, run, launch=on_gpus), fate(), np.random.default_rng(5)
    run(mode, 3)
    for victim in (0, 1):
        for at in rng.integers(1, counting.count[victim] + 1, 4):
            judge.judge(rank=victim, at=int(at))


@pytest.mark.parametrize("calls_before", [3, 17])
def test_the_same_ranks_go_on_after_a_failure_of_nccl(calls_before, fate):
    """It may mean that a rank was lost; none was."""
    fate()
    exchanged, wanted = run("top-K", 3)
    nccl._made.clear()
    nccl.faults.asynchronous = {(1, 0): (calls_before, nccl.REMOTE_ERROR)}
    assert exchanged == (3, 3, 3, 3)
    found = run("top-K", 3)
    assert nccl._made == {0: 2, 1: 2, 2: 2}
    same(found, (exchanged, wanted))


def test_failures_of_nccl_that_do_not_end_are_told(fate):
    fate()
    communicators = NcclCommunicator.TRIALS + 1
    nccl.faults.asynchronous = {(1, number): (3, nccl.REMOTE_ERROR) for number in range(communicators)}
    with pytest.raises(RuntimeError, match=r"rank 1: NCCL failed on GPU 1 in .*NCCL_DEBUG=WARN says more"):
        run("dense", 3)
    assert nccl._made[2] == communicators  # and the other two went on


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_ranks_of_an_elastic_job_vote_over_a_communicator_that_can_lose_some(device, monkeypatch):
    world = sys.modules["distopt.comm.world"]
    monkeypatch.setattr(world.membership, "wanted", lambda: True)
    monkeypatch.setattr(world, "_lacks_gpu", lambda device, alone: "")

    def main(threads):
        def host(reason):
            return threads

        comm = world._over_nccl_or(host, NcclCommunicator.from_mpi, device, "the launcher")
        return type(comm), comm.size, comm._host is threads

    assert run_ranks(2, main) == [(NcclCommunicator, 2, True)] * 2


def test_a_process_with_a_gpu_cannot_take_the_place_of_a_lost_rank(monkeypatch):
    world = sys.modules["distopt.comm.world"]
    monkeypatch.setattr(world.membership, "joins", lambda: True)
    monkeypatch.setattr(world, "_lacks_gpu", lambda device, alone: "")
    monkeypatch.setattr(world, "_worlds", [])
    with pytest.raises(RuntimeError, match="start without --restarts"):
        world.world("cuda")


def test_a_captured_step_is_refused_where_ranks_may_be_lost(fate):
    fate()

    def main(threads):
        elastic = Elastic(NcclCommunicator.over(threads, gpu=threads.rank))
        params = inputs.move_to_device(elastic, inputs.parameters())
        with pytest.raises(ValueError, match="some of these may be lost: start without --elastic"):
            made("dense", elastic, params).capture(lambda: zip(params, params, strict=True))

    run_ranks(2, main)
