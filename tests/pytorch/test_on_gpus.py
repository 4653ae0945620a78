"""Tensors on GPUs, as far as doubles go: torch's memory is that of a double of a GPU (tests/doubles).

Not done here: torch's own kernels, its streams and its DLPack; the tensors are on the CPU, and are said to be on a GPU.
"""

import contextlib

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
from torch import nn  # noqa: E402

import distopt  # noqa: E402
import distopt.torch as dt  # noqa: E402
from distopt import DistOpt, run_ranks  # noqa: E402
from distopt.compress import DeepGradientCompression, ErrorFeedback, Half, Int8, Packed, TopK  # noqa: E402
from distopt.device import tensors  # noqa: E402

doubled = pytest.importorskip("doubles.gpu")
import gpu_group_cases  # noqa: E402
from gloo_launch import run_torch  # noqa: E402

on_gpus = pytest.importorskip("doubles.ranks").on_gpus
pytestmark = [pytest.mark.torch, pytest.mark.device, pytest.mark.usefixtures("doubles")]

COMPRESSORS = {
    "dense": lambda: None,
    "half": Half,
    "int8": lambda: ErrorFeedback(Int8()),
    "top-K": lambda: ErrorFeedback(Packed(TopK(0.2))),
    "dgc": lambda: DeepGradientCompression(TopK(0.2)),
}


@pytest.fixture
def torch_on_gpus(monkeypatch):
    """Let every tensor be on the GPU of its rank, where a comm is one of GPUs."""
    streams = []

    @contextlib.contextmanager
    def stream(t):
        streams.append(t)
        yield

    def number(t):
        doubled.allocations[next(doubled.owners)] = t.data_ptr(), t.nbytes
        return doubled.machine().number

    def finished(x):
        doubled.machine().finish()
        return torch.from_numpy(doubled.numpy_view(x))

    def install():
        monkeypatch.setattr(tensors, "on_gpu", lambda t: True)
        monkeypatch.setattr("distopt.torch.exchange.on_gpu", lambda t: True)
        monkeypatch.setattr("distopt.engine.torch_model.torchs_stream", stream)
        monkeypatch.setattr(tensors, "torchs_place", lambda t: contextlib.nullcontext())
        monkeypatch.setattr(tensors, "gpu_number", number)
        monkeypatch.setattr(tensors, "gpu_tensor", finished)
        return streams

    return install


def network(dtype=torch.float32):
    layers = [nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 5)]
    for k, layer in enumerate(layers[::2]):
        for p in layer.parameters():
            p.data = torch.linspace(-0.3, 0.4, p.numel()).reshape(p.shape).roll(k)
    return nn.Sequential(*layers).to(dtype)


def gradients(model, rank, step):
    """Pairs: a double does not compute while a backward pass would read parameters."""
    return [
        (p, torch.cos(torch.arange(p.numel()) * (1.0 + rank + step)).reshape(p.shape).to(p.dtype))
        for p in reversed(list(model.parameters()))
    ]


def bits(model):
    return [p.detach().double().tolist() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", COMPRESSORS)
def test_distopts_kernels_update_tensors_on_gpus_as_those_of_the_host(torch_on_gpus, mode, dtype):
    def main(comm):
        model = network(dtype)
        momentum = 0.0 if mode == "dgc" else 0.9
        opt = DistOpt(distopt.optim.SGD(0.1, momentum=momentum), comm, params=model, deterministic=True)
        for step in range(3):
            opt.step(gradients(model, comm.rank, step), COMPRESSORS[mode](), exchange="gather")
        if comm.gpu is not None:
            opt.wait()
            doubled.machine().finish()
        return bits(model)

    wanted = run_ranks(2, main)
    streams = torch_on_gpus()
    assert on_gpus(2, main) == wanted
    assert len(streams) == 2 * 4  # of two ranks, the start and three steps


@pytest.mark.parametrize("mode", COMPRESSORS)
def test_means_of_gradients_on_gpus_are_those_of_the_host(torch_on_gpus, mode):
    def main(comm):
        model = network()
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        exchange = dt.GradientExchange(model, COMPRESSORS[mode](), optimizer=sgd, group=comm, exchange="gather")
        found = []
        for step in range(3):
            of = dict(gradients(model, comm.rank, step))
            named = {name: of[p] for name, p in exchange.tensors.items()}
            exchange.exchange_gradients(named, named)
            if comm.gpu is not None:
                doubled.machine().finish()
            found.append([view.tolist() for view in exchange.views.values()])
        return found

    wanted = run_ranks(2, main)
    torch_on_gpus()
    assert on_gpus(2, main) == wanted


def test_gradients_that_leave_early_do_so_on_the_gpu_of_their_rank(torch_on_gpus):
    """A new thread has GPU 0."""

    def main(comm):
        model = network()
        sync = dt.synchronize(model, group=comm, overlap=True)
        for step in range(3):
            for p, g in gradients(model, comm.rank, step):
                p.grad = g
            assert sync.may_overlap or step == 0
            sync.exchange()
            if comm.gpu is not None:
                doubled.machine().finish()
        return [p.grad.tolist() for p in model.parameters()]

    wanted = run_ranks(2, main)
    torch_on_gpus()
    assert on_gpus(2, main) == wanted


def test_a_backward_pass_in_a_thread_has_the_gpu_of_its_rank(torch_on_gpus):
    def main(comm):
        model, seen = network(), []
        opt = DistOpt(torch.optim.SGD(model.parameters(), 0.1), comm, overlap=True)
        for step in range(2):
            loss = sum((p * g).sum() for p, g in gradients(model, comm.rank, step))
            if comm.gpu is not None:
                loss.register_hook(lambda g: seen.append(doubled.machine().number))
            opt(loss)
        return bits(model), seen == [comm.gpu] * len(seen)

    wanted = run_ranks(2, main)
    torch_on_gpus()
    assert on_gpus(2, main) == wanted


def test_ranks_of_torchrun_join_nccl(tmp_path, doubles):
    ranks = run_torch(2, gpu_group_cases.nccl_between_ranks_of_a_process_group, tmp_path)
    assert [int(rank["done"]) for rank in ranks] == [0, 1]
