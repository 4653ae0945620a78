"""The NCCL communicator on doubles of GPUs and of NCCL: every verb, every order of streams, and what goes wrong."""

import time

import numpy as np
import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")

import cupy

import nccl_checks
from distopt import device, run_ranks
from distopt.comm import LocalCommunicator, Metered, NcclCommunicator, Ordered, nccl_unique_id
from distopt.guard import PeerLeft
from doubles import gpu, nccl
from launch import needs_mpi, run_mpi


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """The doubles, for one test."""
    for variable in ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"):
        monkeypatch.delenv(variable, raising=False)
    nccl_checks.install(monkeypatch.setattr)
    with nccl_checks.standing_in():
        yield
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
    nccl.faults.__init__()


def with_nccl(size, main):
    """Call ``main(comm)`` on threads with a GPU each."""

    def run(threads):
        comm = NcclCommunicator(threads.control)
        found = main(comm)
        comm.close()
        return found

    return run_ranks(size, run)


def raised(size, main, kind):
    """The errors that ``main(comm)`` raises on thread ranks, in rank order; all of them must be of a kind."""

    def run(threads):
        with pytest.raises(kind) as caught:
            main(threads)
        return str(caught.value)

    return run_ranks(size, run)


# ----------------------------------------------------------------------------------------------------- verbs


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_verb(size):
    with_nccl(size, nccl_checks.everything)


@needs_mpi
@pytest.mark.parametrize("size", [2, 4])
def test_processes_that_vote_over_mpi(size, tmp_path):
    run_mpi(size, nccl_checks.over_mpi, tmp_path)


ORDERS = {
    "the own stream last": lambda comm: gpu.lagging(comm._stream.ptr),
    "the caller's stream last": lambda comm: gpu.lagging(0),
    **{f"any order, {seed}": lambda comm, seed=seed: gpu.shuffled(f"{seed} {comm.rank}") for seed in range(4)},
    "the newest stream last": lambda comm: min,
    "ranks of both kinds": lambda comm: gpu.lagging(0 if comm.rank else comm._stream.ptr),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_streams_may_lag(size, order):
    def main(comm):
        with gpu.lazily(ORDERS[order](comm)):
            nccl_checks.streams(comm)

    with_nccl(size, main)


def test_a_verb_does_not_wait_for_the_gpu():
    def main(comm):
        x = gpu.array(np.ones(100, np.float32))
        machine = gpu.machine()
        with gpu.lazily(gpu.lagging(0)):
            machine.host.clear()
            with comm.aside():
                comm.all_reduce(x)
            comm.broadcast(x)
            comm.wait()
            assert machine.host == []  # no allocation, no wait
            comm.all_gather(x)
            comm.wait()
            assert machine.host == ["allocate"]

    with_nccl(2, main)


def test_wrappers_pass_on_what_streams_need():
    def main(comm):
        wrapped = Metered(Ordered(comm))
        with wrapped.aside():
            assert device.current_stream() is comm._stream
        wrapped.check()
        assert wrapped.beside.comm.comm is comm
        assert wrapped.xp is cupy
        assert wrapped.peers(comm.alloc(3, np.float32)) is None
        assert "Metered(Ordered(<NcclCommunicator, rank" in repr(wrapped)

    with_nccl(2, main)
