"""Threads that touch a GPU work on their rank's, and what CUDA refuses on one rank is heard by all."""

import ast
import threading

import numpy as np
import pytest

import distopt
from distopt import DistOpt, Parameter
from launch import PROJECT

TOUCH_NO_GPU = {
    "run": "the launcher and the command line",
    "comm/epoch_ranks.py": "gloo",
    "comm/listener.py": "votes between hosts",
    "comm/nccl.py": "NCCL's end, where each job chooses its GPU",
    "comm/threads.py": "ranks, which choose theirs by their communicator",
    "engine/background.py": "messages of the host; on a GPU there is no such thread",
    "resilience": "time limits and the line to the launcher",
}


def starts_a_thread(node):
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return name in ("Thread", "Timer", "ThreadPoolExecutor", "ThreadPool", "start_new_thread")


def test_threads_that_may_touch_a_gpu_are_started_in_one_place():
    """A new thread has GPU 0 and the null stream: ``device.in_thread`` gives it those of its starter."""
    found = set()
    for path in (PROJECT / "distopt").rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        if any(map(starts_a_thread, calls)):
            found.add(path.relative_to(PROJECT / "distopt").as_posix())
    allowed = {name for name in found for place in TOUCH_NO_GPU if name == place or name.startswith(f"{place}/")}
    assert found - allowed == {"device/threads.py"}


@pytest.mark.device
def test_a_thread_works_on_the_gpu_and_in_the_streams_of_its_starter(torch_doubles):
    torch, cupy = pytest.importorskip("torch"), pytest.importorskip("cupy")
    torch.cuda.set_device(2)
    mine, ours = torch.cuda.Stream(), cupy.cuda.Stream()

    def place():
        return cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr, torch.cuda.current_stream()

    from distopt import device

    with torch.cuda.stream(mine), ours:
        assert device.in_thread(place, gpu=2).result() == (2, ours.ptr, mine)
        torch.cuda.set_device(1)  # as a script may, behind distopt's back
        assert device.in_thread(place, gpu=2).result() == (2, ours.ptr, mine)


@pytest.mark.device
def test_a_thread_of_distopt_that_has_not_chosen_a_gpu_is_found(doubles):
    seen = []

    def touch():
        try:
            doubles.machine()
        except AssertionError as error:
            seen.append(str(error))

    start = {"__name__": "distopt.somewhere", "Thread": threading.Thread, "touch": touch}
    exec("thread = Thread(target=touch, name='x'); thread.start(); thread.join()", start)
    assert seen == ["the thread x is on GPU 0 by chance; see device.in_thread"]


@pytest.mark.device
def test_what_cuda_refuses_on_one_rank_before_a_vote_is_raised_on_all(doubles, monkeypatch):
    """The others would wait in the vote until that rank ends."""
    from doubles.ranks import on_gpus

    refused, real = threading.local(), doubles.Stream.wait_event

    def wait_event(stream, event):
        if getattr(refused, "now", False):
            doubles.refuse(doubles.INVALID)
        real(stream, event)

    monkeypatch.setattr(doubles.Stream, "wait_event", wait_event)

    def main(comm):
        p = Parameter("w", doubles.array(np.ones(4, np.float32)))
        opt, found = DistOpt(distopt.optim.SGD(0.5), comm), []
        for step in range(3):
            refused.now = step == 1 and comm.rank == 1
            gradient = doubles.array(np.ones(4, np.float32))
            try:
                opt.step([(p, gradient)])
            except Exception as error:
                found.append(f"{step}: {error}")
            refused.now = False
        comm.wait()
        doubles.machine().finish()
        return found, doubles.numpy_view(p.data).tolist()

    wanted = "1: rank 1: CUDARuntimeError: cudaErrorInvalidResourceHandle"
    assert [([text[: len(wanted)] for text in found], p) for found, p in on_gpus(2, main)] == [
        ([wanted], [0.0] * 4)
    ] * 2
