"""Buckets that are registered with NCCL, on the doubles (DISTOPT_NCCL_REGISTER)."""

import gc
import sys

import numpy as np
import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")

import laws
from distopt import device, run_ranks
from distopt.comm import NcclCommunicator
from distopt.comm.nccl import end_all
from distopt.comm.nccl_library import REGISTER
from doubles import gpu, nccl, nccl_buffers
from doubles.ranks import on_gpus

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("doubles", "registered")]


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setenv(REGISTER, "1")


def log():
    """What NCCL's library was asked since the last look."""
    gc.collect()
    found = list(nccl_buffers.library.log)
    nccl_buffers.library.log.clear()
    return found


def test_by_default_nothing_is_registered(monkeypatch):
    monkeypatch.delenv(REGISTER)
    on_gpus(1, lambda comm: laws.train(comm))
    assert log() == ["destroy"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_registered_buckets_have_the_bits_of_others(size):
    def main(comm):
        params, opt = laws.train(comm, deterministic=True)
        assert "buckets registered" in repr(comm)
        for view in opt.gradient_views(params):
            assert nccl_buffers.library.knows(comm._comm, device.address(view)) or not view.size
        return laws.digest(params)

    expected = run_ranks(size, lambda comm: laws.digest(laws.train(comm, deterministic=True)[0]))
    assert on_gpus(size, main) == expected


@pytest.mark.parametrize(("version", "name"), [(22809, "window"), (22703, "window"), (22602, "register")])
def test_memory_is_registered_until_the_communicator_ends_and_freed_after_it(version, name):
    """Windows are for NCCL 2.27 and later."""

    def main(comm):
        laws.train(comm, steps=2)
        assert log() == ["alloc", name]  # once, whatever the number of steps; nobody has the optimizer any more

    nccl.faults.version = version
    on_gpus(1, main)
    assert log() == [f"de{name}", "free", "destroy"]


def test_ranks_that_cannot_reach_each_others_memory_register_without_windows():
    nccl_buffers.library.has_windows = False
    on_gpus(2, lambda comm: laws.train(comm))
    assert sorted(log()) == sorted(2 * ["alloc", "register", "deregister", "free", "destroy"])


def test_memory_that_is_still_used_outlives_the_communicator():
    def main(threads):
        comm = NcclCommunicator(threads.control)
        x = comm.alloc(3, np.float32)
        comm.register(x)
        comm.close()
        assert log() == ["alloc", "window", "dewindow", "destroy"]
        assert device.host_copy(x).tolist() == [0, 0, 0]
        assert comm.abort()  # too late to matter
        del x
        assert log() == ["free"]

    run_ranks(1, main)


def test_memory_is_freed_after_what_the_gpu_still_does_with_it():
    def main(threads):
        comm = NcclCommunicator(threads.control)
        x = comm.alloc(3, np.float32)
        comm.close()
        with gpu.lazily(gpu.lagging(0)) as machine:
            device.clear(x)
            assert any(machine.queues.values())
            del x
            assert log()[-1] == "free"
            assert not any(machine.queues.values())

    run_ranks(1, main)


def test_a_block_is_freed_from_another_gpu():
    def main(threads):
        comm = NcclCommunicator(threads.control)
        x = comm.alloc(3, np.float32)
        comm.close()
        device.use_gpu(2)
        waited = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                device.array_module().cuda.runtime, "deviceSynchronize", lambda: waited.append(device.current_gpu())
            )
            del x
            assert log()[-1] == "free"
        assert waited == [0]
        assert device.current_gpu() == 2
        device.use_gpu(0)

    run_ranks(1, main)


def test_at_exit_memory_is_deregistered_before_the_communicator_is_destroyed(monkeypatch):
    monkeypatch.setattr(sys.modules["distopt.comm.nccl"], "_alive", [])

    def main(threads):
        comm = NcclCommunicator(threads.control)
        comm.register(comm.alloc(3, np.float32))
        end_all()

    run_ranks(1, main)
    assert log() == ["alloc", "window", "dewindow", "free", "destroy"]


def test_the_memory_of_a_plan_that_is_gone_is_freed_when_the_next_one_is_registered():
    def main(comm):
        params, opt = laws.train(comm, steps=1)
        assert log() == ["alloc", "window"]
        opt.backward_and_update(laws.pairs(comm, params, 1), threshold=7)
        assert log() == ["alloc", "window"]
        opt.backward_and_update(laws.pairs(comm, params, 2), threshold=8)
        assert log() == ["alloc", "dewindow", "free", "window"]

    on_gpus(1, main)


def test_an_aborted_communicators_memory_is_neither_deregistered_nor_freed():
    """Its kernels may still be at it."""

    def main(threads):
        comm = NcclCommunicator(threads.control)
        x = comm.alloc(3, np.float32)
        comm.register(x)
        assert comm.abort()

    run_ranks(1, main)
    assert log() == ["alloc", "window", "abort", "reclaim"]


def test_ranks_must_agree_on_whether_buckets_are_registered(monkeypatch):
    def run(threads):
        gpu._local.rank = threads.rank
        with pytest.raises(ValueError, match=f"rank 0 has {REGISTER}=0, rank 1 has {REGISTER}=1"):
            NcclCommunicator(threads.control)

    monkeypatch.setattr("distopt.comm.nccl.registers", lambda: gpu._local.rank == 1)
    run_ranks(2, run)


def test_a_setting_that_is_neither_0_nor_1_is_refused(monkeypatch):
    def run(threads):
        with pytest.raises(ValueError, match=f"rank 0: {REGISTER} must be 0 or 1, or not set, got 'yes'"):
            NcclCommunicator(threads.control)

    monkeypatch.setenv(REGISTER, "yes")
    run_ranks(2, run)


def test_no_room_for_registered_memory_is_a_memory_error():
    def main(comm):
        gpu.machine().memory = 1000
        with pytest.raises(MemoryError, match="NCCL cannot allocate 4000 bytes of GPU memory for buckets: NCCL_ERROR_"):
            comm.alloc(1000, np.float32)

    on_gpus(1, main)
