"""Tensors on GPUs, as far as doubles go: torch's memory is that of a double of a GPU (tests/doubles/torch_cuda.py).

torch's own kernels are those of the CPU.
"""

import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
from torch import nn  # noqa: E402

import distopt  # noqa: E402
import distopt.torch as dt  # noqa: E402
from distopt import DistOpt, run_ranks  # noqa: E402
from distopt.compress import DeepGradientCompression, ErrorFeedback, Half, Int8, Packed, TopK  # noqa: E402

doubled = pytest.importorskip("doubles.gpu")
import gpu_group_cases  # noqa: E402
from gloo_launch import run_torch  # noqa: E402

gpu_ranks = pytest.importorskip("doubles.ranks").on_gpus
pytestmark = [pytest.mark.torch, pytest.mark.device, pytest.mark.usefixtures("torch_doubles")]

COMPRESSORS = {
    "dense": lambda: None,
    "half": Half,
    "int8": lambda: ErrorFeedback(Int8()),
    "top-K": lambda: ErrorFeedback(Packed(TopK(0.2))),
    "dgc": lambda: DeepGradientCompression(TopK(0.2)),
}


def on_gpus(size, main):
    """Ranks on GPUs none of which is number 0, on which a new thread is."""

    def rank(comm):
        torch.cuda.set_device(comm.gpu)
        return main(comm)

    return gpu_ranks(size, rank, first=1)


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
def test_distopts_kernels_update_tensors_on_gpus_as_those_of_the_host(mode, dtype):
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

    assert on_gpus(2, main) == run_ranks(2, main)


@pytest.mark.parametrize("mode", COMPRESSORS)
def test_means_of_gradients_on_gpus_are_those_of_the_host(mode):
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

    assert on_gpus(2, main) == run_ranks(2, main)


def test_gradients_that_leave_early_do_so_on_the_gpu_of_their_rank():
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

    assert on_gpus(2, main) == run_ranks(2, main)


def test_a_backward_pass_in_a_thread_has_the_gpu_of_its_rank():
    def main(comm):
        model, seen = network(), []
        opt = DistOpt(torch.optim.SGD(model.parameters(), 0.1), comm, overlap=True)
        for step in range(2):
            loss = sum((p * g).sum() for p, g in gradients(model, comm.rank, step))
            if comm.gpu is not None:
                loss.register_hook(lambda g: seen.append(doubled.machine().number))
            opt(loss)
        return bits(model), seen == [comm.gpu] * len(seen)

    assert on_gpus(2, main) == run_ranks(2, main)


def in_a_stream_of_its_own(comm, train):
    """Train in a stream of the script's, as ``with torch.cuda.stream(s)`` does, on a GPU."""
    if comm.gpu is None:
        return train(comm, None)
    mine = torch.cuda.Stream()
    with torch.cuda.stream(mine):
        return train(comm, mine)


@pytest.mark.parametrize(
    "last", ["the script's", "the null stream", "NCCL's", "the first layer's", "where it begins", "any"]
)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_script_may_train_in_a_stream_of_its_own(torch_doubles, overlap, last):
    """Gradients are written, means read, and memory is used again, in streams of which one lags behind all others.

    A backward pass begins in another stream than the script's, and the gradients of the first layer come in a third.
    """

    at_the_end = torch.autograd.Variable._execution_engine.queue_callback

    def train(comm, mine):
        model, found, came = network(), [], {}
        begins, other = (torch.cuda.Stream(), torch.cuda.Stream()) if mine else (None, None)
        first = set(model[0].parameters())

        def computed(p):
            """What autograd has just done it has done in the stream of the layer."""
            if mine:
                torch.cuda.set_stream(other if p in first else mine)
                torch_doubles.late(p.grad)
                came[p] = p.grad

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(computed)
        sync = dt.synchronize(model, group=comm, overlap=overlap)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: torch.cuda.set_stream(mine))
        gpu = doubled.machine()
        streams = {"the script's": mine, "the first layer's": other, "where it begins": begins} if mine else {}
        stream = streams[last].cuda_stream if last in streams else comm._stream.ptr if last == "NCCL's" and mine else 0
        for step in range(4):
            model.zero_grad()
            if mine:
                torch.cuda.synchronize()
                gpu.order = doubled.shuffled(step) if last == "any" else doubled.lagging(stream)
            loss = (model(torch.full((2, 6), 0.1 * (comm.rank + 1 + step))) ** 2).sum()
            if mine:  # autograd's own end of a pass is before other callbacks
                loss.register_hook(lambda _: at_the_end(lambda: mine.wait_stream(other)))
                loss.register_hook(lambda _: torch.cuda.set_stream(begins))
            loss.backward()
            means = [p.grad for p in model.parameters()]
            if mine:
                for p, gradient in came.items():  # a script lets the streams of its next pass wait for this one
                    with torch.cuda.stream(other if p in first and overlap else mine):
                        torch_doubles.free(gradient)
                found.append([torch_doubles.read(g) for g in means])
                torch.cuda.synchronize()
                gpu.order = None
            else:
                found.append([g.tolist() for g in means])
        sync.close()
        return found

    def main(comm):
        return in_a_stream_of_its_own(comm, train)

    assert on_gpus(2, main) == run_ranks(2, main)


def test_a_backward_pass_does_not_wait_for_the_gpu(torch_doubles):
    """The host asks for the outcome of an exchange in the next one; infinities are written where the GPU finds them."""

    def train(comm, mine):
        model, found = network(), []
        sync = dt.synchronize(model, ErrorFeedback(TopK(0.2)), group=comm)
        for step in range(5):
            model.zero_grad()
            loss = sum((p * g).sum() for p, g in gradients(model, comm.rank, step))
            if step == 2 and comm.rank == 1:
                loss = loss * float("inf")
            if mine:
                torch.cuda.synchronize()
                doubled.machine().order = doubled.lagging(0)
            loss.backward()
            if mine:
                assert any(doubled.machine().queues.values()), "the host has waited"
                doubled.machine().order = None
                torch.cuda.synchronize()
            found.append([p.grad.tolist() for p in model.parameters()])
        assert all(x == float("inf") for x in torch.tensor(found[2][1]))
        state = sync.state_dict()
        found.append(state["state"]["step_counter"] if "step_counter" in state["state"] else sorted(state["state"]))
        sync.close()
        return found

    assert on_gpus(2, lambda comm: train(comm, True)) == run_ranks(2, lambda comm: train(comm, False))


def test_a_scale_is_read_once_and_before_the_backward_pass():
    """On a GPU the host waits for it."""
    passing = threading.local()

    class Scaler(torch.amp.GradScaler):
        reads = 0

        def get_scale(self):
            assert not passing.now, "the host waits for the GPU in a backward pass"
            if self._scale is not None:
                self.reads += 1
            return super().get_scale()

    def main(comm):
        model, found = network(), []
        sgd, scaler = torch.optim.SGD(model.parameters(), 0.1), Scaler("cpu", 4.0, growth_interval=2)
        sync = dt.synchronize(model, optimizer=sgd, scaler=scaler, group=comm)
        scaler.scale(torch.ones(1))  # the first time a scaler makes its tensor
        for step in range(6):
            sgd.zero_grad()
            loss = scaler.scale((model(torch.full((2, 6), 0.1 * (comm.rank + 1 + step))) ** 2).sum())
            passing.now = True
            loss.backward()
            passing.now = False
            found.append([(p.grad / scaler._scale).tolist() for p in model.parameters()])
            scaler.step(sgd)
            scaler.update()
        assert scaler.reads == 6
        sync.close()
        return found

    def wanted(comm):
        model, found = network(), []
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        sync = dt.synchronize(model, group=comm)
        for step in range(6):
            sgd.zero_grad()
            (model(torch.full((2, 6), 0.1 * (comm.rank + 1 + step))) ** 2).sum().backward()
            found.append([p.grad.tolist() for p in model.parameters()])
            sgd.step()
        sync.close()
        return found

    def with_threads_of_their_own(comm):
        passing.now = False
        return main(comm)

    assert run_ranks(2, with_threads_of_their_own) == run_ranks(2, wanted)


def test_gradients_of_ddp_on_gpus_are_those_of_torch(tmp_path, doubles):
    ranks = run_torch(2, gpu_group_cases.gradients_of_ddp_on_gpus, tmp_path)
    assert [int(rank["done"]) for rank in ranks] == [0, 1]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("last", ["the script's", "the null stream", "NCCL's", "any"])
def test_losses_of_a_dist_opt_may_be_made_in_a_stream_of_the_scripts(torch_doubles, overlap, last):
    def train(comm, mine):
        model = network()
        for p in model.parameters() if mine else ():
            p.register_post_accumulate_grad_hook(lambda p: torch_doubles.late(p.grad))
        opt = DistOpt(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), comm, overlap=overlap)
        for step in range(4):
            loss = (model(torch.full((2, 6), 0.1 * (comm.rank + 1 + step))) ** 2).sum()
            if mine:
                stream = {"the script's": mine.cuda_stream, "NCCL's": comm._stream.ptr}.get(last, 0)
                doubled.machine().order = doubled.shuffled(step) if last == "any" else doubled.lagging(stream)
            opt(loss)
            if mine:
                torch.cuda.synchronize()
                doubled.machine().order = None
        return bits(model)

    def main(comm):
        return in_a_stream_of_its_own(comm, train)

    assert on_gpus(2, main) == run_ranks(2, main)


@pytest.mark.parametrize("delay", [0, 1])
def test_local_steps_on_gpus_are_those_of_the_host(delay):
    def train(comm, mine):
        model = network()
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        windows = dt.local_steps(model, sgd, every=2, delay=delay, group=comm)
        for step in range(6):
            if mine:
                torch.cuda.synchronize()
            sgd.zero_grad()
            (model(torch.full((2, 6), 0.1 * (comm.rank + 1 + step))) ** 2).sum().backward()
            sgd.step()
        windows.close()
        if mine:
            torch.cuda.synchronize()
        return bits(model)

    def main(comm):
        return in_a_stream_of_its_own(comm, train)

    assert on_gpus(2, main) == run_ranks(2, main)


@pytest.mark.parametrize("form", ["bfloat16", "channels last"])
def test_means_of_models_in_other_forms_on_gpus_are_those_of_the_host(form):
    def train(comm, mine):
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(16, 2))
        for k, p in enumerate(model.parameters()):
            p.data = torch.linspace(-0.3, 0.4, p.numel()).reshape(p.shape).roll(k)
        model = model.bfloat16() if form == "bfloat16" else model.to(memory_format=torch.channels_last)
        sync, found = dt.synchronize(model, group=comm), []
        for step in range(3):
            model.zero_grad()
            x = torch.full((2, 3, 3, 3), 0.1 * (comm.rank + 1 + step), dtype=next(model.parameters()).dtype)
            (model(x) ** 2).sum().backward()
            if mine:
                torch.cuda.synchronize()
            found.append([p.grad.double().tolist() for p in model.parameters()])
        sync.close()
        return found

    def main(comm):
        return in_a_stream_of_its_own(comm, train)

    assert on_gpus(2, main) == run_ranks(2, main)


def test_ranks_of_torchrun_join_nccl(tmp_path, doubles):
    ranks = run_torch(2, gpu_group_cases.nccl_between_ranks_of_a_process_group, tmp_path)
    assert [int(rank["done"]) for rank in ranks] == [0, 1]
