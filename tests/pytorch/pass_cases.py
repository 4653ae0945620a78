"""What an exchange of ``distopt.torch`` is, of which passes, gradients and models, as functions that all ranks call.

On the ranks of torchrun and of MPI.
"""

import contextlib
import copy
import dataclasses
import io
import logging
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from cases import Cases
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import distopt
import distopt.torch as dt
from distopt.compress import ErrorFeedback, Half, TopK

CASES = Cases()
case = CASES.case_of_two


def rank():
    return distopt.world().rank


def size():
    return distopt.world().size


def mean(value):
    """The mean over ranks of what a function of the rank's number returns."""
    return sum(map(value, range(size()))) / size()


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def linear():
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def everyone(value):
    return distopt.world().control.gather(repr(value))


def everywhere_alike(model):
    assert len(set(everyone([p.tolist() for p in model.parameters()]))) == 1


@contextlib.contextmanager
def lines():
    """What distopt says meanwhile, through logging."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("distopt").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("distopt").removeHandler(handler)


@case
def derivatives_that_add_to_no_gradient_exchange_nothing():
    """On one rank alone: a map of saliency, with respect to the input or the parameters, and as a function."""
    model = linear()
    sync = dt.synchronize(model, ErrorFeedback(TopK(0.34)))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = torch.full((1, 2), 1.0 + rank())
    step(model, optimizer, x)
    waits = {n: a.clone() for n, a in sync.state_dict()["state"]["states"]["residual"].items()}
    if rank() == 1:
        x.requires_grad_(True)
        torch.autograd.grad(model(x).sum(), x)
        torch.autograd.grad(model(x).sum(), list(model.parameters()))
        (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        torch.autograd.grad(g.square().sum(), model.weight)
        model(x).sum().backward(inputs=[x])
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(dict(model.named_parameters()))
        with pytest.raises(KeyError):
            torch.autograd.grad(Fails.apply(model(x)).sum(), x)
        x = x.detach()
    for name, a in sync.state_dict()["state"]["states"]["residual"].items():
        assert torch.equal(a, waits[name])
    for _ in range(3):
        step(model, optimizer, x)
    assert sync.step_counter == 4


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("in backward")


class Breaks(nn.Linear):
    """Raises in a backward pass before this has come to a parameter, if asked to."""

    breaks = False

    def forward(self, x):
        y = super().forward(x)
        return Fails.apply(y) if self.breaks else y


@case
def a_pass_that_raises_before_it_comes_to_a_parameter_raises_on_all():
    for overlap in (False, True):
        model = Breaks(2, 1)
        sync = dt.synchronize(model, overlap=overlap)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step(model, optimizer, torch.ones(1, 2))
        model.breaks = rank() == 0
        with pytest.raises((KeyError, RuntimeError)) as caught:
            model(torch.ones(1, 2)).sum().backward()
        model.breaks = False
        if rank() == 0:
            model(torch.ones(1, 2))  # others hear of it now
        else:
            assert "rank 0: a backward pass has raised" in str(caught.value)
        step(model, optimizer, torch.ones(1, 2))
        assert sync.step_counter == 2
        everywhere_alike(model)


class Experts(nn.Module):
    """Two experts, of which a batch may use one, or none."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(50))

    def forward(self, x, experts):
        return sum((getattr(self, expert) * x).sum() for expert in experts) + x.sum() * 0.0


@case
def a_rank_without_tokens_calls_exchange():
    for overlap in (False, True):
        model = Experts()
        sync = dt.synchronize(model, overlap=overlap, threshold=1)
        for passes in range(3):
            model.zero_grad()
            if rank() == 0 and passes:
                model(torch.ones(1, requires_grad=True), "").backward()  # reaches none
                sync.exchange()
            else:
                model(torch.tensor(1.0 + rank()), "a").backward()
            wanted = mean(lambda r, first=passes == 0: 1.0 + r if r or first else 0.0)
            torch.testing.assert_close(model.a.grad, torch.full((40,), wanted))
            assert model.b.grad is None
        assert sync.step_counter == 3


@case
def gradients_that_the_script_has_written_are_exchanged_by_a_call():
    """As PCGrad and MAML write them; without the call it is said, once, that they are this rank's own."""
    for calls in (True, False):
        model = linear()
        sync = dt.synchronize(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with lines() as said:
            for _ in range(3):
                optimizer.zero_grad()
                loss = model(torch.full((4, 2), 1.0 + rank())).mean()
                for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                    p.grad = g
                if calls:
                    sync.exchange()
                    torch.testing.assert_close(model.weight.grad, torch.full((1, 2), mean(lambda r: 1.0 + r)))
                optimizer.step()
        if calls:
            everywhere_alike(model)
        wanted = f"rank {rank()}: SGD.step() takes gradients of this rank alone"
        assert [wanted in line for line in said if "first gradients" not in line] == [] if calls else [True]
    model = linear()
    sync = dt.synchronize(model)
    model.weight.register_hook(lambda g: sync.exchange())
    with pytest.raises(RuntimeError, match="exchange must be called outside of a backward pass"):
        model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2))


@case
def nothing_is_said_of_means_that_the_script_changes():
    """Clipped, scaled, taken twice, or by two optimizers."""
    model = linear()
    dt.synchronize(model)
    optimizers = [torch.optim.SGD([p], 0.1) for p in model.parameters()]
    with lines() as said:
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 2), 1.0 + rank())).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            model.weight.grad = model.weight.grad * 2
            for optimizer in optimizers:
                optimizer.step()
    assert not [line for line in said if "first gradients" not in line]
    everywhere_alike(model)


@case
def ranks_out_of_step_are_named_at_once():
    """By the steps of optimizers, since the n-th exchange of one always meets the n-th of another."""
    for overlap in (False, True):
        model = linear()
        sync = dt.synchronize(model, overlap=overlap)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step(model, optimizer, torch.ones(1, 2))
        if rank() == 1:  # a batch of its own, which nobody hears of
            with sync.no_sync():
                step(model, optimizer, torch.ones(1, 2))
        with pytest.raises(
            ValueError, match=r"rank 0 has made 1 optimizer step since .*, rank 1 has made 2 optimizer st"
        ):
            step(model, optimizer, torch.ones(1, 2))
        sync.close()
    other = torch.optim.SGD(linear().parameters(), 0.1)
    model = linear()
    dt.synchronize(model)
    if rank() == 0:
        other.step()  # of another model
    step(model, torch.optim.SGD(model.parameters(), 0.1), torch.ones(1, 2))


@dataclasses.dataclass
class Output:
    y: torch.Tensor


class Segments(nn.Module):
    """Segments that may be computed again, inside of each other, and an output that torch cannot look into."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x, segment):
        first, second, third, last = self.layers
        x = segment(first, x)
        x = segment(lambda z: segment(second, third(z)), x)
        return Output(segment(last, x))


@case
def a_pass_with_segments_in_it_is_one_exchange():
    """Activations that are computed again inside of the pass, each in a pass of its own."""
    found = []
    for segment in (lambda f, x: checkpoint(f, x, use_reentrant=True), lambda f, x: f(x)):
        model = Segments()
        sync = dt.synchronize(model, ErrorFeedback(TopK(0.1)))
        for number in range(3):
            x = torch.full((2, 5), 1.0 + rank() + number, requires_grad=True)
            model(x, segment).y.square().sum().backward()
        assert sync.step_counter == 3
        found.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@case
def several_passes_before_a_step_add_up():
    for retained in (False, True):
        model = linear()
        sync = dt.synchronize(model)
        x = torch.full((1, 2), 1.0 + rank())
        loss = model(x).sum()
        for passes in range(1, 4):
            if retained:
                loss.backward(retain_graph=passes < 3)
            else:
                model(x).sum().backward()
            torch.testing.assert_close(model.weight.grad, torch.full((1, 2), passes * mean(lambda r: 1.0 + r)))
        assert sync.step_counter == 3


@case
def a_graph_of_the_gradients_is_refused_by_name():
    for overlap in (False, True):
        model = linear()
        sync = dt.synchronize(model, overlap=overlap)
        for _ in range(2):
            model.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of a cycle
                with pytest.raises(ValueError, match=r"(weight|bias): a gradient must be without a graph, got one of"):
                    model(torch.ones(1, 2)).square().sum().backward(create_graph=True)
            model.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
        assert sync.step_counter == 2


@case
def gradients_under_no_sync_count_where_buckets_leave_early():
    """With and without overlap, for parameters of passes under ``no_sync`` alone, of the last pass, and of both."""
    found = []
    for overlap in (False, True):
        for compressor in (None, Half()):
            model = Experts()
            sync = dt.synchronize(model, compressor, overlap=overlap, threshold=1)
            grads = []
            for number in range(4):
                model.zero_grad(set_to_none=number % 2 == 0)
                with sync.no_sync():
                    model(torch.tensor(1.0 + rank()), "ab" if number != 2 else "b").backward()
                    model(torch.tensor(2.0), "b").backward()
                model(torch.tensor(3.0 * rank() + number), "a").backward()
                grads.append([None if p.grad is None else p.grad.tolist() for p in model.parameters()])
            found.append(grads)
            sync.close()
    assert found[:2] == found[2:]
    torch.testing.assert_close(torch.tensor(found[0][0][1]), torch.full((50,), mean(lambda r: 3.0 + r)))


@case
def an_update_inside_of_a_backward_pass_is_refused_by_name():
    model = linear()
    dt.synchronize(model)
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with pytest.raises(ValueError, match=r"(weight|bias): a parameter must not change before its gradient is the mean"):
        model(torch.full((1, 2), 1.0 + rank())).sum().backward()


@case
def undefined_gradients_are_none_and_kept_references_keep_their_values():
    model = linear()
    dt.synchronize(model)
    torch._C._functions.UndefinedGrad()(model(torch.ones(1, 2)).sum()).backward()
    assert model.weight.grad is None
    model = Experts()
    dt.synchronize(model)
    model(torch.tensor(1.0 + rank()), "ab").backward()
    kept = model.b.grad
    model(torch.tensor(1.0 + rank()), "a").backward()
    assert model.b.grad is kept
    torch.testing.assert_close(kept, torch.full((50,), mean(lambda r: 1.0 + r)))


@case
def a_copy_of_a_synchronized_model_is_a_plain_one():
    """Deep copies, moving averages and files: of one rank alone they are trained; it is said that they are copies."""
    model = linear()
    sync = dt.synchronize(model)
    x = torch.full((1, 2), 1.0 + rank())
    model(x).sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    average = AveragedModel(model)
    if rank() == 0:
        for copied in copies:
            copied.zero_grad()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(2):
                    copied(x).sum().backward()
                with torch.no_grad():
                    copied(x)
            assert copied.weight.grad.tolist() == [[2.0, 2.0]]
            said = ["this model is a copy of a synchronized one" in str(w.message) for w in caught]
            assert said == ([True] * 2 if copied is copies[0] else [])  # 'always', where torch's default is once
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        average(x), copies[0](x)
        again = copy.deepcopy(model)
        dt.synchronize(again)
        again(x).sum().backward()
    average.update_parameters(model)
    model.zero_grad()
    model(x).sum().backward()
    for m in (model, again):
        torch.testing.assert_close(m.weight.grad, torch.full((1, 2), mean(lambda r: 1.0 + r)))
    assert sync.step_counter == 2


@case
def a_file_of_a_synchronized_model_needs_no_distopt():
    model = linear()
    dt.synchronize(model)
    file = io.BytesIO()
    torch.save(model, file)
    read = (
        "import io, sys; sys.modules['distopt'] = None; import torch\n"
        "model = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=False)\n"
        "model(torch.ones(1, 2)).sum().backward(); print(model.weight.grad.tolist())"
    )
    if rank() == 0:
        done = subprocess.run([sys.executable, "-c", read], input=file.getvalue(), capture_output=True)
        assert done.stdout.split(b"\n")[0] == b"[[1.0, 1.0]]", done


@case
def learning_rates_that_differ_are_told():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dt.synchronize(model, optimizer=optimizer)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    step(model, optimizer, torch.ones(1, 2))
    schedule.step(1.0)
    step(model, optimizer, torch.ones(1, 2))
    schedule.step(1.0 if rank() else 0.5)
    with pytest.raises(ValueError, match=r"rank 0 has learning rate 0\.1 of group 0, rank 1 has learning rate 0\.05"):
        step(model, optimizer, torch.ones(1, 2))


def with_buffer(name, buffer):
    model = linear()
    model.register_buffer(name, buffer)
    return model


@case
def buffers_that_differ_are_told_by_name():
    for buffer, wanted in (
        (torch.zeros(3 + rank()), r"histogram of \(3,\), torch.float32, rank 1 has .* histogram of \(4,\)"),
        (torch.zeros(3, dtype=torch.int64 if rank() else torch.int32), r"histogram of \(3,\), torch.int32, rank 1 has"),
    ):
        with pytest.raises(ValueError, match="rank 0 has buffer or frozen parameter " + wanted):
            dt.synchronize(with_buffer("histogram", buffer))
    model = with_buffer("histogram", torch.zeros(3)) if rank() else linear()
    with pytest.raises(ValueError, match="rank 0 has nothing, rank 1 has buffer or frozen parameter histogram"):
        dt.synchronize(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="rank 0 has nothing, rank 1 has buffer or frozen parameter histogram"):
        dt.local_steps(model, optimizer, every=2)
    with pytest.raises(ValueError, match="rank 0 has nothing, rank 1 has buffer or frozen parameter histogram"):
        distopt.LocalSteps(distopt.optim.SGD(0.1), every=2, params=model)


@case
def buffers_of_any_dtype_and_stride_are_sent():
    """And what lies beside a view of a larger tensor stays."""
    mine = 1.0 + rank()
    table, whole = torch.full((4, 6), mine), torch.full((2, 3, 4, 4), mine).to(memory_format=torch.channels_last)
    buffers = {
        "sliced": table[::2, :3],
        "transposed": torch.full((3, 2), mine).t(),
        "expanded": torch.full((1, 3), mine).expand(5, 3),
        "last": whole,
        "part": whole[:, 1:],
        "scalar": torch.tensor(mine, dtype=torch.float64),
        "flags": torch.full((3,), rank() == 0),
        "complex": torch.full((3,), mine * 1j),
        "empty": torch.zeros(0, 3),
        **{f"{d}".split(".")[-1]: torch.full((3,), mine).to(d) for d in (torch.float8_e4m3fn, torch.float8_e5m2)},
    }
    for local in (False, True):
        model = linear()
        for name, buffer in buffers.items():
            model.register_buffer(name, buffer.clone() if local and name not in ("sliced", "expanded") else buffer)
        model.base = nn.Parameter(torch.full((4,), mine).to(torch.float8_e4m3fn), requires_grad=False)
        if local:
            dt.local_steps(model, torch.optim.SGD(model.parameters(), 0.1), every=2).close()
        else:
            dt.synchronize(model)
        for name, x in [*model.named_buffers(), ("base", model.base)]:
            x = x.bool() if name == "flags" else x.to(torch.complex64) if name == "complex" else x.float()
            assert (x == (1j if name == "complex" else 1)).all(), name
    assert table[1].eq(mine).all()
    assert whole[:, 0].eq(1).all()
    for wrong, got in (
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "the meta device"),
    ):
        with pytest.raises(TypeError, match=f"odd: a buffer or frozen parameter must be dense and .* got {got}"):
            dt.synchronize(with_buffer("odd", wrong if rank() == 1 else torch.zeros(2)))


@case
def what_is_no_model_with_memory_is_refused():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got a generator"):
        dt.synchronize(linear().parameters())
    with torch.device("meta"):
        model = nn.Linear(2, 1)
    with pytest.raises(TypeError, match=r"(weight|bias): a parameter must have memory, got one on the meta device"):
        dt.synchronize(model)


@case
def line_searches_see_the_loss_of_the_global_batch():
    """As one process on all data does; the closure's loss is this rank's own."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()

    def data(r):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(r)).double()
        return x, x.square().sum(1, keepdim=True)

    def train(model, x, y):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=5, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(4)]

    together, alone = make(), make()
    sync = dt.synchronize(together)
    losses = train(together, *data(rank()))
    passes = sync.step_counter
    everywhere_alike(together)
    assert len(set(everyone((losses, passes)))) == 1
    wanted = train(alone, *[torch.cat(parts) for parts in zip(*map(data, range(size())), strict=True)])
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    for a, b in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


cases_of = CASES.of


def run_all(comm):
    """{case: what it raised, as text}."""
    return CASES.run(comm)
