"""What the doubles of GPUs and NCCL must not hide: each test plants a mistake that real ones punish, and sees it."""

import contextlib
import ctypes
import threading
import time

import numpy as np
import pytest

import laws
from distopt import DistOpt, Parameter, device, kernels, run_ranks
from distopt.comm import LocalCommunicator, NcclCommunicator
from distopt.comm.nccl import end_all
from distopt.kernels.signatures import NATIVE
from distopt.optim import SGD
from doubles import shim
from doubles.ranks import on_gpus
from simt.build import build

cupy = pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
gpu, nccl = (pytest.importorskip(f"doubles.{name}") for name in ("gpu", "nccl"))
CudaError = cupy.cuda.runtime.CUDARuntimeError

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("doubles")]


def filled(*values):
    """Arrays of 9 elements on the current GPU."""
    return [gpu.array(np.full(9, value, np.float32)) for value in values]


def elements(x):
    return set(device.host_copy(x).tolist())


# ----------------------------------------------------------------------------------------------- threads of a rank


def in_a_thread(main):
    """What ``main()`` returns in a thread that this one starts."""
    found = []
    thread = threading.Thread(target=lambda: found.append(main()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_of_a_rank_has_the_ranks_gpu():
    """A helper that waits for the null stream waits for what the rank has enqueued there."""

    def main(comm):
        def helper():
            device.use_gpu(comm.gpu)
            device.current_stream().synchronize()
            return gpu.machine()

        with gpu.lazily(min) as machine:
            done = []
            machine.enqueue("late", lambda: done.append("late"))
            assert in_a_thread(helper) is machine
            return done

    assert on_gpus(2, main) == [["late"]] * 2


def test_ranks_that_are_threads_share_no_gpu_pinned_memory_or_list_of_communicators():
    def main(threads):
        comm = NcclCommunicator(threads.control, gpu=threads.rank)
        piece = device.pinned.pool.acquire(8)
        device.pinned.pool.release(piece, comm.gpu)
        found = id(gpu.process()), id(gpu.machine()), id(piece), len(nccl.ours._alive[:])
        comm.close()
        return found

    first, second = run_ranks(2, main)
    assert first[-1] == second[-1] == 1
    assert not set(first[:-1]) & set(second[:-1])


def test_an_end_that_waits_without_a_time_limit_is_seen(monkeypatch):
    """A dead peer owes a sum: the end's thread waits for the stream for ever, and aborts nothing."""

    def main(threads):
        comm = NcclCommunicator(threads.control)
        inner = comm._comm
        comm.all_reduce(filled(1)[0])
        threads.control.vote("all have connected", 1, list)
        if comm.rank == 1:
            comm.abort()
        threads.control.vote("rank 1 is gone", 1, list)
        if comm.rank == 1:
            return inner.aborted
        comm.all_reduce(filled(1)[0])
        end_all(2.0)
        return inner.aborted

    assert run_ranks(2, main) == [True, True]
    monkeypatch.setattr(device, "synchronize", lambda stream, poll=None: stream.synchronize())
    assert run_ranks(2, main) == [False, True]


# ----------------------------------------------------------------------------------------------- graphs


def replayed(edge):
    """What y has after each of eight replays of x = 2 in one branch, and y = x in another, with an edge or without."""
    a, b, event, join = device.new_stream(), device.new_stream(), cupy.cuda.Event(), cupy.cuda.Event()
    x, y, two = filled(1, 0, 2)
    with a:
        a.begin_capture()
        event.record(a)
        b.wait_event(event)
        device.copy(x, two)
        if edge:
            event.record(a)
            b.wait_event(event)
        with b:
            device.copy(y, x)
        join.record(b)
        a.wait_event(join)
        graph = a.end_capture()
    found = []
    for _ in range(8):
        device.copy(x, filled(1)[0])
        device.synchronize(device.current_stream())
        graph.launch(a)
        a.synchronize()
        found.append(elements(y))
    return found


def test_a_replay_without_an_edge_is_wrong_in_some_order():
    assert replayed(edge=True) == [{2.0}] * 8
    without = replayed(edge=False)
    assert {1.0} in without
    assert {2.0} in without


def test_a_missing_edge_of_a_captured_step_changes_the_result(monkeypatch):
    """Sums come after the gradients even if the communicator's stream is in the capture from its beginning."""
    own, capture, in_order = {}, device.Graph.capture, device.StreamEvent.__call__

    def main(comm):
        own[comm.gpu] = comm._stream
        captured, eager = (laws.train_captured(comm, captured=c, nonfinite="propagate")[0] for c in (True, False))
        return laws.digest(captured) == laws.digest(eager)

    @contextlib.contextmanager
    def forked(graph):
        with capture(graph):
            in_order(device.StreamEvent(), device.current_stream(), own[graph.gpu])
            yield

    def missing(event, first, then):
        if then not in own.values() or not then.is_capturing():
            in_order(event, first, then)

    monkeypatch.setattr(device.Graph, "capture", forked)
    assert on_gpus(2, main) == [True, True]
    monkeypatch.setattr(device.StreamEvent, "__call__", missing)
    assert on_gpus(2, main) == [False, False]


def test_a_capture_is_refused_what_cuda_refuses():
    a, b, event = device.new_stream(), device.new_stream(), cupy.cuda.Event()
    x, y = filled(1, 2)

    def captured(work):
        with a:
            a.begin_capture()
            try:
                work()
            finally:
                graph = a.end_capture()
        return graph

    def leaves_a_branch():
        event.record(a)
        b.wait_event(event)
        with b:
            device.copy(x, y)

    def waits_for_outside():
        a.wait_event(b.record())

    def waits_on_the_host():
        with contextlib.suppress(CudaError):
            device.host_copy(x)

    for work, text in (
        (leaves_a_branch, "cudaErrorStreamCaptureUnjoined"),
        (waits_for_outside, "cudaErrorStreamCaptureIsolation"),
        (waits_on_the_host, "cudaErrorStreamCaptureInvalidated"),
    ):
        with pytest.raises(CudaError, match=text):
            captured(work)
        assert not a.is_capturing()
        assert not b.is_capturing()
    for look in (lambda: event.done, lambda: b.wait_event(event)):
        captured(lambda: event.record(a))
        with pytest.raises(CudaError, match="cudaErrorCapturedEvent"):
            look()


def with_temporaries(comm):
    """Arrays that are made after the capture of a loss that has a temporary one, when the graph has been replayed."""
    n = 1003
    w, x = laws.to_device(comm, [np.zeros(n, np.float32), np.full(n, 3, np.float32)])
    opt = DistOpt(SGD(1.0), comm)
    param, [view] = Parameter("w", w), opt.gradient_views([Parameter("w", w)])

    def loss():
        temporary = device.empty(n, np.float32, like=x)
        device.copy(temporary, x)
        kernels.scale(temporary, 2.0)
        device.copy(view, temporary)
        return [(param, view)]

    step = opt.capture(loss)
    with step._stream:
        others = laws.to_device(comm, [np.full(n, k, np.float32) for k in range(8)])
    device.synchronize(step._stream)
    step()
    return [elements(other) for other in others] == [{float(k)} for k in range(8)]


def test_a_captured_loss_without_memory_of_its_own_writes_to_that_of_others(monkeypatch):
    assert on_gpus(2, with_temporaries) == [True, True]
    monkeypatch.setattr(cupy.cuda, "using_allocator", lambda malloc: contextlib.nullcontext())
    assert on_gpus(2, with_temporaries) == [False, False]


CALLS = {
    "matrix product": lambda x: x @ x,
    "dot": lambda x: np.dot(x, x),
    "tensordot": lambda x: cupy.tensordot(x, x, 1),
    "solver": lambda x: np.linalg.svd(x, compute_uv=False),
    "random numbers": lambda x: cupy.random.standard_normal((3, 3)),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_cudas_libraries_are_refused_in_a_capture(call, arithmetic):
    x, stream = gpu.array(np.eye(3)), device.new_stream()
    assert isinstance(CALLS[call](x), cupy.ndarray)
    with stream:
        stream.begin_capture()
        with pytest.raises(NotImplementedError, match=r"calling cu[A-Z]+ API during stream capture is currently unsup"):
            CALLS[call](x)
        x + x  # what needs no library is recorded
        assert [op.name for op, _ in stream.end_capture().nodes] == ["add"]


# ----------------------------------------------------------------------------------------------- GPUs and their streams


def test_streams_and_events_of_another_gpu_are_refused():
    there, event = device.new_stream(), cupy.cuda.Event()
    device.use_gpu(1)
    with pytest.raises(RuntimeError, match=r"created on \(0\) does not match with the current device \(1\)"):
        there.__enter__()
    with pytest.raises(CudaError, match="cudaErrorInvalidResourceHandle"):
        event.record(device.new_stream())
    x = filled(1)[0]
    device.synchronize(device.current_stream())
    with pytest.raises(CudaError, match="cudaErrorInvalidResourceHandle"):
        gpu.check_launch(there.ptr)
    there.record(event)  # which a stream of any GPU may wait for
    device.current_stream().wait_event(event)
    assert elements(x) == {1.0}


def test_a_kernel_in_a_stream_of_another_gpu_is_refused(monkeypatch):
    there = device.new_stream()
    device.use_gpu(1)
    x = filled(1)[0]
    kernels.scale(x, 2.0)
    monkeypatch.setattr(gpu, "current", lambda: [there])
    with pytest.raises(CudaError, match="cudaErrorInvalidResourceHandle"):
        kernels.scale(x, 2.0)


def test_an_empty_array_has_no_address():
    assert cupy.empty(0).data.ptr == 0
    assert cupy.empty(1).data.ptr != 0


def test_arrays_do_not_mix_with_those_of_numpy(arithmetic):
    x, y = filled(1)[0], np.ones(9, np.float32)
    for mix in (lambda: x + y, lambda: y + x, lambda: x @ y, lambda: x.__iadd__(y), lambda: np.where(y > 0, x, y)):
        with pytest.raises(TypeError, match="cupy does not mix with it"):
            mix()
    with pytest.raises(TypeError, match="cupy does not mix with it"):
        x[:] = y
    assert elements(x * np.float32(2) + 1) == {3.0}


# ----------------------------------------------------------------------------------------------- NCCL


def test_an_error_of_one_communicator_is_not_that_of_another():
    """Whoever looks at one of two must look at the other too."""

    def main(threads):
        one, other = (NcclCommunicator(threads.control) for _ in range(2))
        for comm in (one, other):
            comm.all_reduce(filled(1)[0])
        nccl.faults.asynchronous[threads.rank, other._comm.number] = (0, nccl.REMOTE_ERROR)
        one.check()
        with pytest.raises(RuntimeError, match="NCCL_ERROR_REMOTE_ERROR"):
            other.check()
        other.abort()
        one.abort()

    run_ranks(2, main)


@pytest.mark.parametrize("end", ["abort", "destroy"])
def test_a_rank_that_aborts_takes_from_a_peer_what_it_still_reads(end):
    """Rank 0's part is done, and rank 1's GPU lags behind."""
    there = threading.Barrier(2)

    def main(threads):
        comm = NcclCommunicator(threads.control, gpu=threads.rank)
        inner, [x] = comm._comm, filled(1 + threads.rank)
        comm.all_reduce(x)
        comm.wait()
        device.synchronize(device.current_stream())
        threads.control.vote("both have connected", 1, list)
        with gpu.lazily(min) if threads.rank else contextlib.nullcontext():
            comm.all_reduce(x)
            comm.wait()
            if not threads.rank:
                device.synchronize(comm._stream)
                ended = threading.Thread(target=getattr(inner, end))
                ended.start()
                if end == "abort":
                    ended.join()
                there.wait(10)
                ended.join()
                return True
            there.wait(10)
            right = elements(x) == {6.0}
        inner.destroy()
        return right

    assert run_ranks(2, main) == [True, end == "destroy"]


def test_the_end_of_a_communicator_waits_for_all_ranks():
    """So a rank that closes tells the others first, which would otherwise wait for its vote, and it for them."""
    times = [0.0, 0.0]

    def main(threads):
        comm = NcclCommunicator(threads.control, gpu=threads.rank)
        if threads.rank:
            time.sleep(0.3)
            times[1] = time.monotonic()
        comm.close()
        times[0] = times[0] or time.monotonic()

    run_ranks(2, main)
    assert times[0] >= times[1] > 0


def test_a_first_collective_that_not_all_ranks_come_to_blocks_the_host():
    """Nothing may be voted on between the first collectives of two ranks."""

    def main(threads):
        comm = NcclCommunicator(threads.control, gpu=threads.rank)
        nccl.faults.patience = 0.5
        if threads.rank == 0:
            with pytest.raises(RuntimeError, match=r"NCCL failed on GPU 0 in all_reduce.*REMOTE_ERROR"):
                comm.all_reduce(filled(1)[0])
        threads.control.vote("between", 1, list)
        comm.abort()

    run_ranks(2, main)


def test_a_host_waits_for_gpus_at_work_and_not_for_a_collective_that_never_comes():
    """However long operations take: a loaded machine is no deadlock."""

    def main(threads):
        comm = NcclCommunicator(threads.control, gpu=threads.rank)
        x, machine = filled(1)[0], gpu.machine()
        comm.all_reduce(x)
        machine.patience = 20
        for _ in range(comm.rank * 100):
            machine.enqueue("slow", lambda: time.sleep(0.002), comm._stream.ptr)
        comm.all_reduce(x)
        comm.wait()
        assert elements(x) == {4.0}
        threads.control.vote("between", 1, list)
        if comm.rank == 0:
            comm.all_reduce(x)
            comm.wait()
            with pytest.raises(AssertionError, match=r"a GPU waits for another one for ever: .*'allReduce'"):
                device.host_copy(x)
        threads.control.vote("behind", 1, list)
        comm.abort()

    run_ranks(2, main)


def test_a_collective_in_a_stream_of_another_gpu_is_refused():
    def main(threads):
        comm = NcclCommunicator(threads.control, gpu=0)
        device.use_gpu(1)
        elsewhere = device.new_stream()
        device.use_gpu(0)
        x = filled(1)[0]
        with pytest.raises(nccl.real.NcclError, match="UNHANDLED_CUDA_ERROR"):
            comm._comm.allReduce(x.data.ptr, x.data.ptr, 9, nccl.real.NCCL_FLOAT32, 0, elsewhere.ptr)
        comm.close()

    run_ranks(1, main)


# ----------------------------------------------------------------------------------------------- blocks


class Planted:
    """A library of launches, of which some are another one's."""

    def __init__(self, planted, plain):
        self.planted, self.plain = planted, plain

    def __getattr__(self, name):
        return getattr(self.planted if hasattr(self.planted, name) else self.plain, name)


def test_a_barrier_of_one_warp_is_too_little_for_a_block(monkeypatch, tmp_path):
    """Threads pack the codes that others have found; a block of one warp would not show it."""
    text, plain = tmp_path / "codec.cu", shim.library("float")
    text.write_text(f'#define __syncthreads() __syncwarp()\n#include "{NATIVE / "codec.cu"}"\n')
    planted = Planted(ctypes.CDLL(str(build(tmp_path, "float", texts=[text]))), plain)

    def same(library):
        monkeypatch.setattr(shim, "library", lambda real: library)
        for kernel in kernels.KERNELS.values():
            monkeypatch.setattr(kernel, "_functions", {})
        here, there = (laws.train(comm, mode="1bit")[0] for comm in (LocalCommunicator(), LocalCommunicator(gpu=0)))
        return laws.digest(here) == laws.digest(there)

    assert same(plain)
    assert not same(planted)
    monkeypatch.setattr(kernels.dispatch, "THREADS", 32)
    assert same(planted)


def test_gpus_tell_what_they_did_last_and_what_they_poisoned():
    x = gpu.array(np.ones(9, np.float32))
    at, order = hex(x.data.ptr), gpu.lagging(0)
    with gpu.lazily(order):
        stream = cupy.cuda.Stream()
        device.copy(cupy.empty_like(x), x)
        with stream:
            device.copy(cupy.empty_like(x), x)
        del x
    lines = [line.split() for line in gpu.told().splitlines()[1:]]
    steps = [(int(number), name) for number, name, *_ in lines if name in ("memcpy", "poison")]
    assert steps[0] == (stream.ptr, "memcpy"), "in the order in which they were done, not enqueued"
    assert ["0", "free", at, "36"] in lines
    assert ["0", "poison", at, "36"] in lines


def test_memory_that_another_thread_frees_is_not_poisoned_under_its_next_owner(monkeypatch):
    """The thread is held where it has to wait for the GPU, while its memory, if it is free, gets another owner."""
    with gpu.lazily(gpu.lagging()) as machine:
        freed, lock, comes = [cupy.empty(9, np.float32)], machine.lock, threading.Event()

        class Seen:
            def __enter__(self):
                comes.set()
                lock.acquire()

            def __exit__(self, *error):
                lock.release()

        thread = threading.Thread(target=freed.clear)
        with lock:
            with monkeypatch.context() as patch:
                patch.setattr(machine, "lock", Seen())
                thread.start()
                assert comes.wait(20)
            [x], [read] = filled(1), filled(0)
        thread.join()
        device.copy(read, x)
        del x  # free for the host, while the GPU has still to read it
        assert elements(read) == {1}
