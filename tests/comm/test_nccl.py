"""The NCCL communicator on doubles of GPUs and of NCCL: every verb, every order of streams, and errors."""

import argparse
import json
import multiprocessing
import os
import re
import sys
import threading
import time

import numpy as np
import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")

import cupy
import nccl_checks
import spawned

import laws
from distopt import DistOpt, device, run_ranks, world
from distopt.comm import (
    LocalCommunicator,
    Metered,
    NcclCommunicator,
    Ordered,
    nccl_library,
    nccl_unique_id,
)
from distopt.comm.control import PeerLeft
from distopt.comm.launchers import Transport
from distopt.comm.nccl import end_all
from doubles import gpu, nccl, nccl_buffers, shim
from launch import finish, needs_mpi, run_mpi

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """The doubles, for one test."""
    for variable in ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE", "CUDA_VISIBLE_DEVICES", nccl_library.REGISTER):
        monkeypatch.delenv(variable, raising=False)
    nccl_checks.install(monkeypatch.setattr)
    shim.library("float")  # for the processes that a test starts too
    yield
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
    nccl.faults.__init__()


def with_nccl(size, main):
    """Call ``main(comm)`` on threads with a GPU each."""

    def run(threads):
        comm = NcclCommunicator(threads.control)
        result = main(comm)
        comm.close()
        return result

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
def test_every_verb_works_over_nccl(size):
    with_nccl(size, nccl_checks.everything)


@needs_mpi
@pytest.mark.parametrize("size", [2, 4])
def test_processes_may_vote_over_mpi(size, tmp_path):
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
def test_verbs_are_right_however_far_streams_lag(size, order):
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
            with comm.on_comm_stream():
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
        with wrapped.on_comm_stream():
            assert device.current_stream() is comm._stream
        wrapped.check()
        assert wrapped.duplicate().comm.comm is comm.duplicate() is comm
        assert wrapped.xp is cupy
        assert wrapped.peers(comm.alloc(3, np.float32)) is None
        assert "Metered(Ordered(<NcclCommunicator, rank" in repr(wrapped)

    with_nccl(2, main)


def test_a_job_has_one_nccl_communicator_per_rank():
    """Two of them would need an order among each other."""
    with_nccl(2, lambda comm: laws.train(comm, overlap=True))
    assert nccl._made == {0: 1, 1: 1}


def test_nccls_kernels_go_before_those_of_a_backward_pass():
    def main(comm):
        assert comm._stream.priority == gpu.GREATEST_PRIORITY
        assert device.new_stream().priority == device.current_stream().priority == 0

    with_nccl(1, main)


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("0", "0")])
def test_kernels_of_several_communicators_start_in_the_hosts_order_unless_the_user_says_otherwise(
    given, found, monkeypatch
):
    monkeypatch.setenv(nccl_library.LAUNCH_ORDER, "")
    if given is None:
        monkeypatch.delenv(nccl_library.LAUNCH_ORDER)
    else:
        monkeypatch.setenv(nccl_library.LAUNCH_ORDER, given)
    nccl_library.binding.cache_clear()
    nccl_unique_id()
    assert os.environ[nccl_library.LAUNCH_ORDER] == found


# ----------------------------------------------------------------------------------------------------- processes


def run_processes(main, size, folder, **options):
    """What came of each rank, a process, that ended by itself."""
    return spawned.run(main, size, folder, spawned.on_doubles, **options)


@pytest.mark.parametrize("size", [2, 3])
def test_processes_that_vote_over_sockets_have_the_bits_of_the_host(size, tmp_path):
    results = run_processes(nccl_checks.trained, size, tmp_path)
    for rank, digest in enumerate(run_ranks(size, lambda comm: laws.digest(laws.train(comm, deterministic=True)[0]))):
        assert results[str(rank)].endswith(digest), "the bits of ranks on the host"
        assert f"<NcclCommunicator, rank {rank} of {size}, cupy: NCCL 2.28.9 on GPU {rank}" in results[str(rank)]
        assert "votes over local sockets" in results[str(rank)]


def test_a_process_that_dies_is_named_by_the_others(tmp_path):
    results = run_processes(nccl_checks.killed, 3, tmp_path)
    assert results == dict.fromkeys("01", "PeerLeft: rank 2 ended without a word, before a barrier")


def test_a_process_that_leaves_early_is_named_by_the_others(tmp_path):
    results = run_processes(nccl_checks.left, 3, tmp_path)
    assert results.pop("2") == "None"
    assert results == dict.fromkeys("01", "PeerLeft: rank 2 left after a barrier, before a step")


def test_a_process_that_fails_after_a_vote_is_named_by_the_others(tmp_path):
    results = run_processes(nccl_checks.fails, 3, tmp_path)
    assert set(results) == {"0", "1"}
    for text in results.values():
        assert text.startswith("PeerLeft: rank 2 failed with KeyboardInterrupt: , after step 2, before "), text


def test_a_process_that_never_starts_is_named_by_the_others(tmp_path):
    results = run_processes(nccl_checks.never, 3, tmp_path, ranks=(0, 1), patience=1.0)
    text = "RuntimeError: rank 2 of 3 did not come within 1 s: see what they printed"
    assert results == {"0": text, "1": text}


def test_a_first_process_that_never_starts_is_named_by_the_others(tmp_path):
    results = run_processes(nccl_checks.never, 2, tmp_path, ranks=(1,), patience=1.0)
    assert results["1"].startswith("RuntimeError: rank 1 of 2: rank 0 did not come within 1 s; were all ranks started")


def test_a_process_that_closes_nothing_ends(tmp_path):
    assert run_processes(nccl_checks.forgotten, 2, tmp_path) == {"0": "done", "1": "done"}


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((b"short", 0, 2), TypeError, "nccl_id must be the 128 bytes .* got bytes of 5"),
        (("0" * 128, 0, 2), TypeError, "got str"),
        ((bytes(128), 2, 2), ValueError, "local_rank must be below world_size=2, got 2"),
        ((bytes(128), -1, 2), ValueError, "local_rank must be at least 0, got -1"),
        ((bytes(128), 0, 0), ValueError, "world_size must be at least 1, got 0"),
        ((bytes(128), "0", 2), TypeError, "local_rank must be an integer, got '0'"),
    ],
)
def test_wrong_arguments_of_from_id_are_refused(arguments, kind, text):
    with pytest.raises(kind, match=text):
        NcclCommunicator.from_id(*arguments)


def test_the_multiprocess_example_without_a_gpu_does_nothing():
    code, output = finish([sys.executable, nccl_checks.EXAMPLES / "multiprocess.py"], 60)
    assert (code, len(output.splitlines())) == (0, 1), output
    assert output.startswith("nothing to do: no CUDA driver")


def test_the_multiprocess_example_trains(tmp_path):
    """The parent's part is the children's start."""
    options = argparse.Namespace(lr=0.1, seed=1, batch=64, epochs=4)
    spawn, unique_id = multiprocessing.get_context("spawn"), nccl_unique_id()
    arguments = [(unique_id, rank, 2, options, tmp_path) for rank in range(2)]
    children = [spawn.Process(target=nccl_checks.example, args=a, daemon=True) for a in arguments]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0]
    said = (tmp_path / "0").read_text().splitlines()
    assert [line.split("  ")[0] for line in said[:-1]] == [f"epoch {k}/4" for k in range(1, 5)]
    assert float(said[-1].removeprefix("test accuracy ")) > 0.93
    assert (tmp_path / "1").read_text() == ""


# ----------------------------------------------------------------------------------------------------- what is missing


def alike(errors, text):
    """The same text on every rank."""
    assert len(set(errors)) == 1, errors
    assert re.search(text, errors[0]), errors[0]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_driver_on_one_rank_is_an_error_on_all(rank, monkeypatch):
    def count():
        if gpu._local.number == 7:
            raise cupy.cuda.runtime.CUDARuntimeError(35)
        return gpu.GPUS

    def main(threads):
        gpu._local.number = 7 if threads.rank == rank else 0
        NcclCommunicator(threads.control)

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", count)
    text = rf"rank {rank}: no GPU for NCCL: no CUDA driver, .* \(cudaErrorInsufficientDriver\): .*; or use device='cpu'"
    alike(raised(3, main, RuntimeError), text)


def test_a_missing_nccl_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(cupy.cuda.nccl, "available", False)
    text = r"rank 0: no GPU for NCCL: NCCL is not installed, or .*: pip install 'distopt\[cuda13\]'"
    alike(raised(2, lambda threads: NcclCommunicator(threads.control), RuntimeError), text)
    with pytest.raises(RuntimeError, match="NCCL is not installed"):
        nccl_unique_id()


def test_an_nccl_too_old_or_of_another_version_is_refused_on_every_rank(monkeypatch):
    def versions(*numbers):
        monkeypatch.setattr(cupy.cuda.nccl, "get_version", lambda: numbers[gpu._local.number])

    def main(threads):
        gpu._local.number = threads.rank
        NcclCommunicator(threads.control)

    versions(22809, 21702)
    alike(raised(2, main, RuntimeError), r"rank 1: no GPU for NCCL: NCCL 2.17.2 is too old, 2.18.1 is wanted: pip inst")
    versions(22809, 22809, 22707)
    alike(raised(3, main, ValueError), "^ranks differ: rank 0 has NCCL 2.28.9, rank 2 has NCCL 2.27.7$")


def test_a_gpu_that_is_not_there():
    def main(threads):
        NcclCommunicator(threads.control, gpu=4 if threads.rank else 0)

    alike(raised(2, main, ValueError), "rank 1: gpu must be a number from 0 to 3, .* got 4")


def test_two_ranks_on_one_gpu_are_refused(monkeypatch):
    def main(threads):
        NcclCommunicator(threads.control, gpu=[0, 1, 1][threads.rank]).close()

    errors = raised(3, main, ValueError)
    alike(
        errors,
        r"^each rank must be on a GPU of its own for NCCL, got ranks 1 and 2 on GPU 1 \(0000:01:00.0\) of host .*;",
    )
    for way in ("fewer ranks per host", "CUDA_VISIBLE_DEVICES", "device='cpu'", "NCCL_HOSTID", "NCCL_MULTI_RANK"):
        assert way in errors[0]
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    alike(raised(3, main, ValueError), "got ranks 1 and 2 on GPU 1")  # this NCCL does not know it
    nccl.faults.version = 23004
    run_ranks(3, main)


def test_partitions_of_one_gpu_need_a_newer_nccl(monkeypatch):
    """They have one place on the bus, but a UUID each, by which NCCL tells them apart from 2.30 on."""
    monkeypatch.setattr(
        cupy.cuda.runtime, "getDeviceProperties", lambda number: gpu.properties(number) | {"pciBusID": 1}
    )
    alike(raised(2, lambda threads: NcclCommunicator(threads.control), ValueError), "got ranks 0 and 1 on GPU 1")
    nccl.faults.version = 23007
    with_nccl(2, lambda comm: comm.all_reduce(gpu.array(np.ones(3, np.float32))))


@pytest.mark.parametrize(
    ("place", "text"), [((0, 15, 0), "0000:0f:00.0"), ((1, 2, 3), "0001:02:03.0"), ((0x10000, 1, 0), "10000:01:00.0")]
)
def test_a_gpu_in_any_pci_domain_has_a_bus_id(place, text, monkeypatch):
    properties = dict(zip(("pciDomainID", "pciBusID", "pciDeviceID"), place, strict=True))
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda number: properties)
    assert device.bus_id(0) == text


@pytest.mark.parametrize("read", [b"\1\2", bytes(range(1, 17)), bytes(range(1, 17)) + b"more"])
def test_a_uuid_has_32_digits_however_much_of_it_cupy_reads(read, monkeypatch):
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda number: {"uuid": read})
    assert device.uuid(0) == read[:16].hex().ljust(32, "0")


def identity(host="node1", bus="0000:01:00.0", alone="0"):
    return json.dumps([[host, bus], f"GPU 0 ({bus}) of host {host}", [host, bus], alone])


@pytest.mark.parametrize(
    ("ranks", "advised"),
    [
        ([identity(), identity(bus="0000:02:00.0")], True),  # both call it 0: each sees its own only
        ([identity(alone=""), identity(bus="0000:02:00.0", alone="")], True),
        ([identity(), identity(bus="0000:02:00.0", alone="1")], False),  # the variable alone tells them apart
        ([identity(alone=None), identity(bus="0000:02:00.0", alone=None)], False),  # they see several
        ([identity(), identity(bus="0000:02:00.0"), identity(bus="0000:02:00.0", alone=None)], True),
        ([identity(), identity(host="node2", bus="0000:02:00.0")], False),
        ([identity(), identity()], False),  # a test: both on one GPU
        ([identity(), identity(host="node2"), identity(host="node2", bus="0000:02:00.0")], True),
    ],
)
def test_ranks_that_see_nothing_but_a_gpu_each_are_advised(ranks, advised):
    assert bool(nccl_library.isolated(ranks)) == advised


def test_ranks_with_isolated_gpus_are_told_once_and_in_their_repr(monkeypatch, capfd):
    """As Slurm's --gpus-per-task=1 does it: each rank has GPU 0, and another one."""

    def properties(number):
        return gpu.properties(number) | {"pciBusID": gpu._local.rank, "uuid": bytes([gpu._local.rank] * 16)}

    def main(threads):
        gpu._local.rank = threads.rank
        comm = NcclCommunicator(threads.control)
        assert "; ranks of host" in repr(comm)
        assert "--gpu-bind=none" in repr(comm)
        comm.close()

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 1)
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", properties)
    run_ranks(3, main)
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1
    assert re.match("distopt: ranks of host .* see one GPU each and not those of the others: .*NVLink; show", told[0])


def test_more_ranks_than_gpus():
    alike(raised(5, lambda threads: NcclCommunicator(threads.control), ValueError), "got ranks 0 and 4 on GPU 0")


def test_ranks_that_claim_other_hosts_may_share_a_gpu(monkeypatch):
    class Environment(dict):  # each thread a process of its own
        def get(self, name, default=None):
            return f"host {gpu._local.rank}" if name == "NCCL_HOSTID" else default

    def main(threads):
        gpu._local.rank = threads.rank
        NcclCommunicator(threads.control, gpu=0).close()

    monkeypatch.setattr(os, "environ", Environment())
    run_ranks(2, main)


def test_an_nccl_id_that_cannot_be_made_is_an_error_on_all_ranks():
    nccl.faults.id = True
    alike(
        raised(3, lambda threads: NcclCommunicator(threads.control), RuntimeError),
        "rank 0: NCCL cannot make an id: NCCL_ERROR_SYSTEM_ERROR: .*; NCCL_DEBUG=INFO says more",
    )


@pytest.mark.parametrize("rank", [0, 2])
def test_an_nccl_start_that_fails_on_one_rank_is_an_error_on_all_at_once(rank):
    nccl.faults.start, nccl.faults.patience = rank, 3.0
    started = time.monotonic()
    alike(
        raised(3, lambda threads: NcclCommunicator(threads.control), RuntimeError),
        rf"^rank {rank}: NCCL cannot start: NCCL_ERROR_SYSTEM_ERROR",
    )
    assert time.monotonic() - started < 2, "nobody waits for a time limit"


def test_ranks_that_do_not_find_each_other_give_up_after_the_patience(monkeypatch):
    monkeypatch.setattr(NcclCommunicator, "CONNECT_SECONDS", 0.3)
    nccl.faults.never, nccl.faults.patience = 1, 3.0
    # whichever rank is the first to see that it is late
    text = r"rank \d: NCCL's ranks did not find each other within 0.3 s: .* NCCL_SOCKET_IFNAME"
    alike(raised(2, lambda threads: NcclCommunicator(threads.control), RuntimeError), text)


# ----------------------------------------------------------------------------------------------------- what goes wrong


def test_an_asynchronous_nccl_error_is_found_and_nothing_is_enqueued_afterwards():
    """A collective that never ends is found by a check while waiting for it."""
    nccl.faults.asynchronous = {(1, 0): (2, nccl.REMOTE_ERROR)}

    def main(threads):
        comm = NcclCommunicator(threads.control)
        x = gpu.array(np.ones(9, np.float32))
        comm.all_reduce(x)
        comm.all_reduce(x)
        comm.check()
        comm.broadcast(x, 0)
        comm.wait()
        if comm.rank == 0:
            return
        with pytest.raises(RuntimeError) as caught:
            device.synchronize(device.current_stream(), comm.check)
        assert re.match(
            "rank 1: NCCL failed on GPU 1 in broadcast from rank 0 of 9 float32, or before: NCCL_ERROR_REMOTE_ERROR: .*"
            "; NCCL_DEBUG=WARN says more",
            str(caught.value),
        )
        for verb in (lambda: comm.all_reduce(x), comm.check):
            with pytest.raises(RuntimeError, match="rank 1: NCCL failed on GPU 1 in broadcast"):
                verb()
        assert comm.abort()
        comm.close()  # twice is once
        with pytest.raises(RuntimeError, match="NCCL failed on GPU 1"):
            comm.all_reduce(x)

    run_ranks(2, main)


@pytest.mark.parametrize(("status", "fails"), [(nccl.IN_PROGRESS, False), (8, True)])
def test_nccl_states_unknown_to_cupy_are_errors_or_progress(status, fails):
    def main(comm):
        nccl.faults.asynchronous = {(0, 0): (0, status)}
        comm._comm.calls = 1
        if fails:
            with pytest.raises(RuntimeError, match="rank 0: NCCL failed on GPU 0 in its start, or before: status 8, a"):
                comm.check()
        else:
            comm.check()
        nccl.faults.asynchronous = {}

    with_nccl(1, main)


def test_an_nccl_error_of_the_buckets_communicator_is_found_by_check():
    def main(comm):
        wire = comm.duplicate()
        wire.all_reduce(gpu.array(np.ones(9, np.float32)))
        comm.control.vote("the sum", 1, list)
        nccl.faults.asynchronous = {(0, wire._comm.number): (0, nccl.REMOTE_ERROR)}
        if comm.rank == 0:
            with pytest.raises(
                RuntimeError, match="rank 0: NCCL failed on GPU 0 in all_reduce of 9 float32, or before"
            ):
                comm.check()
        comm.control.vote("the look", 1, list)
        nccl.faults.asynchronous = {}

    with_nccl(2, main)


def test_a_call_that_nccl_refuses_is_an_error():
    def main(comm):
        nccl.faults.refuses = 0
        with pytest.raises(
            RuntimeError, match="rank 0: NCCL failed on GPU 0 in all_reduce of 2 float32: NCCL_ERROR_INVALID"
        ):
            comm.all_reduce(gpu.array(np.ones(2, np.float32)))
        assert not nccl.in_a_group()

    with_nccl(1, main)


def test_an_error_of_distopts_own_is_not_called_nccls():
    def main(comm):
        def all_reduce(*arguments):
            raise ZeroDivisionError("oops")

        comm._comm.allReduce = all_reduce
        for match in ("^rank 0: distopt failed on GPU 0 in all_reduce of 2 float32: ZeroDivisionError: oops$",) * 2:
            with pytest.raises(RuntimeError, match=match):
                comm.all_reduce(gpu.array(np.ones(2, np.float32)))

    with_nccl(1, main)


def test_after_an_interrupted_group_of_calls_the_communicator_refuses_every_call(monkeypatch):
    """The first of two pieces was sent and the second never will be, so other ranks wait for it."""

    def main(comm):
        calls = []

        def all_reduce(*arguments):
            if calls:
                raise KeyboardInterrupt
            calls.append(arguments)

        comm.CHUNK, x = 4, gpu.array(np.ones(8, np.float32))
        comm._comm.allReduce = all_reduce
        with pytest.raises(KeyboardInterrupt):
            comm.all_reduce(x)
        assert not nccl.in_a_group()
        with pytest.raises(RuntimeError, match="failed on GPU 0 in all_reduce of 8 float32, which was interrupted"):
            comm.all_reduce(x)

    with_nccl(1, main)


def test_an_abort_that_hangs_is_given_up_in_time():
    nccl.faults.abort = 2.0

    def main(threads):
        comm = NcclCommunicator(threads.control)
        started = time.monotonic()
        assert not comm.abort(0.1)
        assert time.monotonic() - started < 1
        with pytest.raises(RuntimeError, match="rank 0: the communicator was aborted"):
            comm.all_reduce(gpu.array(np.ones(2, np.float32)))

    run_ranks(1, main)


def test_at_exit_operations_that_a_dead_peer_owes_are_aborted():
    """Waiting for it takes no longer than half of the deadline."""

    def main(threads):
        comm = NcclCommunicator(threads.control)
        inner = comm._comm
        comm.all_reduce(gpu.array(np.ones(9, np.float32)))
        threads.control.vote("all have connected", 1, list)
        if comm.rank == 1:
            comm.abort()  # as a process that is gone
        threads.control.vote("rank 1 is gone", 1, list)
        if comm.rank == 0:
            comm.all_reduce(gpu.array(np.ones(9, np.float32)))
            started = time.monotonic()
            end_all(1.0)
            assert time.monotonic() - started < 5
        assert inner.aborted
        assert not inner.destroyed
        threads.control.vote("all have ended", 1, list)

    run_ranks(2, main)


def connected(threads, number):
    """Communicators that have made a collective, for which NCCL waits until all ranks are there."""
    comms = [NcclCommunicator(threads.control) for _ in range(number)]
    for comm in comms:
        comm.all_reduce(gpu.array(np.ones(9, np.float32)))
    threads.control.vote("all have connected", 1, list)
    return comms


def test_at_exit_all_stuck_communicators_are_told_to_end_before_one_is_waited_for():
    """The kernels of the second one would keep NCCL from freeing what the first one has."""

    def main(threads):
        comms = connected(threads, 2)
        if threads.rank == 1:
            for comm in comms:
                comm.abort()  # as a process that is gone
        threads.control.vote("rank 1 is gone", 1, list)
        if threads.rank == 0:
            for comm in comms:
                comm.all_reduce(gpu.array(np.ones(9, np.float32)))
            nccl_buffers.library.log.clear()
            end_all(1.0)
            assert nccl_buffers.library.log == ["abort", "abort", "reclaim", "reclaim"]
        threads.control.vote("all have ended", 1, list)

    run_ranks(2, main)


def test_at_exit_the_deadline_is_for_all_communicators_together():
    def main(threads):
        comms = connected(threads, 3)
        if threads.rank == 1:
            for comm in comms:
                comm.abort()
        threads.control.vote("rank 1 is gone", 1, list)
        if threads.rank == 0:
            nccl.faults.abort = 4.0
            for comm in comms:
                comm.all_reduce(gpu.array(np.ones(9, np.float32)))
            started = time.monotonic()
            end_all(1.0)
            assert 0.9 < time.monotonic() - started < 1.9
        threads.control.vote("all have ended", 1, list)

    run_ranks(2, main)


def test_at_exit_a_finished_communicator_is_destroyed_and_not_aborted():
    """Peers may still read what an abort would take from them."""

    def main(threads):
        comm = NcclCommunicator(threads.control)
        inner = comm._comm
        comm.all_reduce(gpu.array(np.ones(9, np.float32)))
        threads.control.vote("both have summed", 1, list)
        end_all(20.0)
        assert inner.destroyed
        assert not inner.aborted

    run_ranks(2, main)


def test_a_helper_that_is_stuck_is_replaced_while_a_thread_can_be_started(monkeypatch):
    def main(threads):
        first, second = (NcclCommunicator(threads.control) for _ in range(2))
        nccl.faults.abort = 1.0
        assert not first.abort(0.1)
        nccl.faults.abort = 0.0

        def start(self):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        monkeypatch.setattr(threading.Thread, "start", start)
        assert second.abort(10.0)

    run_ranks(1, main)


def test_a_closed_nccl_communicator_refuses_every_call():
    def main(threads):
        comm = NcclCommunicator(threads.control)
        comm.close()
        comm.close()
        with pytest.raises(RuntimeError, match="the communicator is closed"):
            comm.all_reduce(gpu.array(np.ones(2, np.float32)))
        with pytest.raises(RuntimeError, match="the communicator is closed"):
            comm.check()

    run_ranks(2, main)


def test_a_peer_that_has_left_is_named():
    def main(comm):
        if comm.rank == 0:
            with pytest.raises(PeerLeft, match=r"rank 1 left (while|before) rank 0"):
                comm.barrier()

    def run(threads):
        main(NcclCommunicator(threads.control))

    run_ranks(2, run)


def test_arrays_on_the_host_or_on_another_gpu_are_refused():
    def main(comm):
        here, there = gpu.array(np.ones(3, np.float32)), None
        gpu._local.number = 3
        there = gpu.array(np.ones(3, np.float32))
        with pytest.raises(
            ValueError, match=r"current GPU must be 0, the communicator's, got 3; call cupy.cuda.Device\(0\).use"
        ):
            comm.all_reduce(here)
        with pytest.raises(ValueError, match="current GPU must be 0, the communicator's, got 3"):
            comm.alloc(3, np.float32)
        gpu._local.number = 0
        verbs = [
            comm.all_reduce,
            comm.all_gather,
            lambda x: comm.all_to_all([x]),
            comm.reduce_scatter,
            comm.broadcast,
            Ordered(comm).all_reduce,
        ]
        for verb in verbs:
            with pytest.raises(
                TypeError, match=r"carries must be on GPU 0, got an array \(3,\) float32, on the host: cupy.asarray"
            ):
                verb(np.ones(3, np.float32))
            with pytest.raises(
                ValueError, match=r"carries must be on GPU 0, got an array \(3,\) float32 on GPU 3: allocate after"
            ):
                verb(there)
            with pytest.raises(TypeError, match="got list"):
                verb([1.0])
        with pytest.raises(TypeError, match="not contiguous"):
            comm.all_reduce(gpu.array(np.ones(6))[::2])
        with pytest.raises(TypeError, match="complex64 on GPU 0"):
            comm.all_reduce(gpu.array(np.ones(6, np.complex64)))
        with pytest.raises(ValueError, match="root must be a rank from 0 to 0, got 1"):
            comm.broadcast(here, 1)
        with pytest.raises(ValueError, match="parts must be 1 arrays"):
            comm.all_to_all([here, here])

    with_nccl(1, main)


def test_communicators_of_the_host_refuse_arrays_of_a_gpu():
    x = gpu.array(np.ones(3, np.float32))

    def main(comm):
        for verb in (comm.all_reduce, comm.all_gather, comm.broadcast):
            with pytest.raises(
                TypeError, match=r"carries must be on the host, got an array \(3,\) float32 on GPU 0: cupy.asn"
            ):
                verb(x)

    run_ranks(2, main)


# ----------------------------------------------------------------------------------------------------- world


def test_one_rank_carries_arrays_of_both_kinds():
    comm = LocalCommunicator("alone", gpu=0)
    assert repr(comm) == "<LocalCommunicator, rank 0 of 1, cupy: alone>"
    assert device.gpu_of(comm.alloc(3, np.float32)) == 0
    for make in (gpu.array, np.array):
        x = make([1.0, 2.0, 3.0])
        comm.all_reduce(x)
        comm.broadcast(x)
        (gathered,), (part,), mine = comm.all_gather(x), comm.all_to_all([x]), comm.reduce_scatter(x)
        for array in (gathered, part, mine):
            assert array is not x
            assert type(array) is type(x)
            assert device.host_copy(array).tolist() == [1, 2, 3]
    nccl_checks.in_rank_order(LocalCommunicator())


CAUSES = {
    35: r"no CUDA driver, or one too old for this cupy \(cudaErrorInsufficientDriver\): it takes a machine",
    100: r"the CUDA driver sees no GPU \(cudaErrorNoDevice\): check CUDA_VISIBLE_DEVICES",
    802: r"the GPUs are not ready \(cudaErrorSystemNotReady\): start nvidia-fabricmanager",
    999: r"the CUDA driver fails \(cudaErrorUnknown\): nvidia-smi and dmesg say why",
    2: r"CUDA does not start \(cudaErrorMemoryAllocation\): it takes a machine with an NVIDIA GPU",
}


@pytest.mark.parametrize("status", CAUSES)
def test_every_cause_of_no_gpu_has_its_remedy(status, monkeypatch):
    def count():
        raise cupy.cuda.runtime.CUDARuntimeError(status)

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", count)
    assert re.match(CAUSES[status], device.gpu_state())


@needs_mpi
def test_world_under_a_launcher_is_made_for_every_device(tmp_path):
    run_mpi(2, nccl_checks.worlds_over_mpi, tmp_path)


@pytest.fixture
def fresh_world(monkeypatch):
    monkeypatch.setattr(sys.modules["distopt.comm.world"], "_worlds", [])
    monkeypatch.setattr(sys.modules["distopt.comm.world"], "transport", lambda *_: Transport("", "no launcher"))
    return monkeypatch


def test_a_world_of_one_rank_takes_the_gpu_if_asked_or_on_auto(fresh_world):
    for asked in ("cuda", "auto"):
        comm = world(asked)
        assert repr(comm) == "<LocalCommunicator, rank 0 of 1, cupy: no launcher; GPU 0>"
        assert world(asked) is comm
    assert repr(world("cpu")) == "<LocalCommunicator, rank 0 of 1, numpy: no launcher; device='cpu'>"


def test_auto_takes_a_gpu_only_for_a_script_that_uses_cupy(fresh_world):
    fresh_world.delitem(sys.modules, "cupy")
    assert repr(world("auto")) == (
        "<LocalCommunicator, rank 0 of 1, numpy: no launcher; the script has not imported cupy>"
    )


def test_a_world_without_a_gpu_refuses_cuda_and_takes_the_host_on_auto(fresh_world):
    fresh_world.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    with pytest.raises(RuntimeError, match="device='cuda': the CUDA driver sees no GPU: check CUDA_VISIBLE_DEVICES"):
        world("cuda")
    assert "numpy: no launcher; the CUDA driver sees no GPU" in repr(world("auto"))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"nccl_id": bytes(128), "local_rank": 0}, "world_size missing"),
        ({"local_rank": 0, "world_size": 2}, "nccl_id missing"),
        ({"nccl_id": bytes(128), "local_rank": 0, "world_size": 1, "communicator": LocalCommunicator()}, "and a comm"),
    ],
)
def test_nccl_id_local_rank_and_world_size_must_be_given_together(given, text):
    with pytest.raises(ValueError, match=f"nccl_id, local_rank and world_size must be given together.*{text}"):
        DistOpt(**given)


def test_dist_opt_of_one_rank_from_an_nccl_id_closes_what_it_made():
    """SINGA's way to make a communicator."""
    opt = DistOpt(nccl_id=nccl_unique_id(), local_rank=0, world_size=1)
    x = nccl_checks.up(np.ones(3, np.float32))
    opt.all_reduce(x)
    opt.wait()
    assert device.host_copy(x).tolist() == [1, 1, 1]
    opt.close()
    with pytest.raises(RuntimeError, match="closed"):
        opt.communicator.check()
