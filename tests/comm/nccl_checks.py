"""What the NCCL communicator must do on the doubles, as functions of it; all ranks call them."""

import contextlib
import importlib
import os
import signal
import sys
import time

import comm_checks
import ml_dtypes
import numpy as np
import pytest

import distopt
import laws
from distopt import device
from distopt.comm import Metered, NcclCommunicator, Ordered
from distopt.comm.communicator import NUMBERS, Wrapper, all_reduce_in_rank_order
from distopt.comm.nccl import end_all
from distopt.compress import ErrorFeedback, TopK
from distopt.kernels import dispatch
from launch import PROJECT

EXAMPLES = PROJECT / "examples"


def install(patch=setattr, processes=False):
    """GPUs and NCCL for this process."""
    from doubles import gpu, nccl  # here, since tests of real GPUs are collected where there is no cupy

    gpu.install(patch)
    nccl.install(patch, processes)
    patch(dispatch, "THREADS", 32)  # each is a fiber


class Host(Wrapper):
    """A communicator for numpy arrays which go up to the GPU, over NCCL, and down again."""

    def all_reduce(self, x, op="sum"):
        there = up(x)
        self.comm.all_reduce(there, op)
        self.comm.wait()
        x[...] = device.host_copy(there)

    def all_gather(self, x, ragged=False, into=None):
        return self._down(self.comm.all_gather(up(x), ragged))

    def all_to_all(self, parts, ragged=False):
        return self._down(self.comm.all_to_all([up(x) for x in parts], ragged))

    def reduce_scatter(self, x, op="sum"):
        return self._down([self.comm.reduce_scatter(up(x), op)])[0]

    def broadcast(self, x, root=0):
        there = up(x)
        self.comm.broadcast(there, root)
        self.comm.wait()
        x[...] = device.host_copy(there)

    def alloc(self, n, dtype):
        there = self.comm.alloc(n, dtype)
        assert not device.host_copy(there).any()
        return device.zeros(n, dtype)

    def _down(self, arrays):
        self.comm.wait()
        return [device.host_copy(x) for x in arrays]


def up(x):
    """A copy on the GPU, enqueued."""
    there = device.array_module().empty(x.shape, x.dtype)
    device.copy(there, x)
    return there


def everything(comm, pieces=True):
    """All verbs, whole and in pieces."""
    host = Host(comm)
    comm_checks.verbs(host)
    comm_checks.ordered(host)
    comm_checks.meters(host)
    comm_checks.carried(host)
    comm_checks.subgroups(host)
    if comm.size <= 2:
        comm_checks.halves(host)
    in_rank_order(comm)
    if pieces:
        comm.CHUNK = 1000
        comm_checks.verbs(host)
        comm_checks.verbs(Host(Metered(Ordered(comm))))


def in_rank_order(comm):
    """Sums on the GPU have the bits of sums in rank order on the host; integers too, and with a slice of nothing."""
    for dtype in NUMBERS:
        for n in (1, comm.size, 1003):
            rng = [np.random.default_rng([n, r]) for r in range(comm.size)]
            everyone = [(r.standard_normal(n) * 10.0 ** r.integers(-3, 4, n)).astype(dtype) for r in rng]
            wide = np.float32 if dtype in (np.float16, ml_dtypes.bfloat16) else dtype
            total = everyone[0].astype(wide)
            for x in everyone[1:]:
                total = total + x.astype(wide)
            mine = everyone[comm.rank].copy()
            Host(Ordered(comm)).all_reduce(mine)
            np.testing.assert_array_equal(mine, total.astype(dtype))


def streams(comm):
    """What a step does with two streams.  Right in any order that events allow."""
    size, rank, n = comm.size, comm.rank, 257
    total = sum(range(1, size + 1))

    def mine(k):
        return np.full(n, (rank + 1) * 10.0**k, np.float32)

    def expect(k, found):
        np.testing.assert_array_equal(device.host_copy(found), np.full(n, total * 10.0**k, np.float32))

    x = up(mine(0))  # the verb comes after what the caller has enqueued
    comm.all_reduce(x)
    comm.wait()
    y = device.copied(x)  # and what the caller enqueues afterwards comes after the verb
    device.clear(x)
    expect(0, y)

    comm.all_reduce(up(mine(1)))  # nobody keeps this array but the communicator
    comm.broadcast(up(mine(1)), 0)
    others = [up(mine(2)) for _ in range(3)]  # they must not get its memory
    comm.wait()
    for other in others:
        np.testing.assert_array_equal(device.host_copy(other), mine(2))

    with comm.on_comm_stream():  # in order without a wait
        x = up(mine(3))
        comm.all_reduce(x)
        y = device.copied(x)
        comm.all_reduce(y)
        comm.wait()  # which does nothing in here
        z = device.copied(y)
    comm.wait()
    np.testing.assert_array_equal(device.host_copy(z), np.full(n, size * total * 1e3, np.float32))

    x = up(mine(3))  # which the own stream still uses when nobody else does
    with comm.on_comm_stream():
        comm.all_reduce(x)
        comm.wait()
    del x
    other = up(mine(2))
    comm.wait()
    np.testing.assert_array_equal(device.host_copy(other), mine(2))

    views = up(mine(2))  # what is prepared on the caller's stream, and used aside
    with comm.on_comm_stream():
        comm.all_reduce(views)
    comm.wait()
    expect(2, views)

    for ragged in (False, True):
        got = comm.all_gather(up(mine(1)[: rank + 1] if ragged else mine(1)), ragged)
        kept = up(mine(4))  # while the result is not written yet
        comm.wait()
        for r, part in enumerate(got):
            np.testing.assert_array_equal(device.host_copy(part), np.full(r + 1 if ragged else n, (r + 1) * 10.0, "f4"))
        np.testing.assert_array_equal(device.host_copy(kept), mine(4))
        comm.all_gather(up(mine(1)), ragged)  # a result that nobody wants is not written into others' memory
        other = up(mine(2))
        comm.wait()
        np.testing.assert_array_equal(device.host_copy(other), mine(2))

    got = comm.all_to_all([up(np.full(5, 10 * rank + to, np.int64)) for to in range(size)])
    comm.wait()
    assert [device.host_copy(p).tolist() for p in got] == [[10 * r + rank] * 5 for r in range(size)]

    for unwanted in (lambda: comm.all_to_all([up(mine(1))] * size), lambda: comm.reduce_scatter(up(np.arange(99)))):
        unwanted()
        other = up(mine(2))
        comm.wait()
        np.testing.assert_array_equal(device.host_copy(other), mine(2))

    third = device.new_stream()  # who waits need not be who called, if memory is kept that long
    with third:
        sent = [up(np.full(5, 10 * rank + to, np.int64)) for to in range(size)]
        taken = comm.all_to_all(sent)
    comm.wait()
    assert [device.host_copy(p).tolist() for p in taken] == [[10 * r + rank] * 5 for r in range(size)]
    device.synchronize(third)

    x = up(mine(0))
    all_reduce_in_rank_order(comm, x)
    del got
    comm.wait()
    expect(0, x)
    whole = np.arange(7) + rank
    part = comm.reduce_scatter(up(whole))
    comm.wait()
    cut = comm_checks.slices(7, size)[rank]
    np.testing.assert_array_equal(device.host_copy(part), (size * np.arange(7) + sum(range(size)))[cut])


def over_mpi(comm):
    """NcclCommunicator.from_mpi, in a process of its own."""
    install(processes=True)
    nccl_comm = NcclCommunicator.from_mpi()
    assert nccl_comm.rank == comm.rank
    assert nccl_comm.local_rank == comm.local_rank
    assert "votes over MPI" in repr(nccl_comm) or "votes over Open MPI" in repr(nccl_comm) or "MPICH" in repr(nccl_comm)
    everything(nccl_comm, pieces=False)
    streams(nccl_comm)
    nccl_comm.barrier()
    nccl_comm.close()
    left_open = NcclCommunicator.from_mpi()  # ends with the process
    left_open.barrier()


# ------------------------------------------------------------------------------- processes of one machine, without MPI


def trained(comm):
    """Two streams, and a run of DistOpt."""
    streams(comm)
    digest = laws.digest(laws.train(comm, deterministic=True)[0])
    comm.barrier()
    return f"{comm!r} {digest}"


def killed(comm):
    """The last rank is gone before its part of a sum; the others learn it while they wait for their GPU."""
    comm.all_reduce(up(np.ones(3)))  # for which all connect
    comm.barrier()
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(up(np.ones(3)))
    comm.wait()
    device.synchronize(device.current_stream(), comm.check)


def left(comm):
    """The last rank's script ends, and waits in NCCL's end for the others, which want one more vote."""
    comm.barrier()
    if comm.rank < comm.size - 1:
        comm.control.vote("a step", 7, list)


class Fails(TopK):
    """Between the vote and the exchange, where nobody waits for a word."""

    def extract(self, x, add, context):
        raise KeyboardInterrupt


def fails(comm):
    """The last rank ends with an exception when the others have enqueued a step, whose outcome they wait for.

    They are told at once, and not when it has given up to wait for them in NCCL's end.
    """
    params, opt = laws.train(comm, steps=1)
    compressor, started = TopK(0.5), time.monotonic()
    if comm.rank == comm.size - 1:
        compressor = Fails(0.5)
        end_all.__defaults__ = (60.0,)
    try:
        for step in (1, 2):
            opt.step(laws.pairs(comm, params, step), ErrorFeedback(compressor))
    finally:
        assert time.monotonic() - started < 15


def never(comm):
    """Not all ranks come."""


def forgotten(comm):
    """Nothing is closed, and nothing is waited for: the sum is still owed to the other rank."""
    x = up(np.ones(3, np.float32))
    comm.all_reduce(x)
    comm.close = lambda: None
    return "done"


def example(unique_id, rank, size, given, folder):
    """A child of examples/multiprocess.py: its training loop, DistOpt's three arguments, sockets, and NCCL."""
    install(processes=True)
    importlib.import_module("doubles.arithmetic").install()
    sys.path.insert(0, str(EXAMPLES))
    multiprocess = importlib.import_module("multiprocess")
    with (folder / str(rank)).open("w") as out, contextlib.redirect_stdout(out):
        multiprocess.train(unique_id, rank, size, given)


def worlds_over_mpi(comm):
    """What world() picks under a launcher; ranks that differ in what they have all take what all of them have."""
    install(processes=True)
    known = sys.modules["distopt.comm.world"]._worlds
    assert "numpy: the script has not imported cupy; " in repr(comm)
    for asked in ("cuda", "auto"):
        known.clear()
        found = distopt.world(asked)
        assert isinstance(found, NcclCommunicator)
        found.barrier()
        found.close()
    known.clear()
    cupy = sys.modules["cupy"]
    if comm.rank == 1:
        del sys.modules["cupy"]
    found = distopt.world("auto")
    sys.modules["cupy"] = cupy
    reason = "rank 1: the script has not imported cupy" if comm.rank == 0 else "the script has not imported cupy"
    assert repr(found).startswith(f"<MpiCommunicator, rank {comm.rank} of 2, numpy: {reason}; ")
    comm_checks.ragged(found)
    known.clear()
    nccl = importlib.import_module("doubles.nccl")
    nccl.faults.version = 21300 if comm.rank == 1 else 22809
    with pytest.raises(RuntimeError, match=r"rank 1: no GPU for NCCL: NCCL 2\.13\.0 is too old"):
        distopt.world("cuda")
    assert "rank 1: NCCL 2.13.0 is too old" in repr(distopt.world("auto")) or comm.rank == 1
    known.clear()
    assert "device='cpu'; " in repr(distopt.world("cpu"))
    assert distopt.world("auto") is distopt.world("cpu")
