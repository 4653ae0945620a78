"""DistOpt around torch's optimizers, and distopt's around torch's parameters; ranks are threads."""

import threading
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
from torch import nn  # noqa: E402

import distopt  # noqa: E402
from distopt import DistOpt, run_ranks  # noqa: E402
from distopt.compress import DeepGradientCompression, ErrorFeedback, TopK  # noqa: E402

pytestmark = pytest.mark.torch

SEEDED = threading.Lock()
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "groups": lambda p: torch.optim.SGD([{"params": p[:2]}, {"params": p[2:], "lr": 0.01}], 0.1),
}


def network(seed=0):
    with SEEDED:  # threads have one generator
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))


def batch(rank, step):
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 20, generator=g), torch.randint(0, 5, (8,), generator=g)


def loss_of(model, rank, step):
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x), y)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_step_with_a_loss_is_that_of_the_optimizer_with_the_mean_gradient(name, size):
    def main(comm):
        model = network(comm.rank)
        opt = DistOpt(OPTIMIZERS[name](list(model.parameters())), comm)
        for step in range(4):
            assert opt(loss_of(model, comm.rank, step))
        return [p.detach().numpy() for p in model.parameters()]

    model = network()
    alone = OPTIMIZERS[name](list(model.parameters()))
    for step in range(4):
        alone.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(size)) / size).backward()
        alone.step()
    ranks = run_ranks(size, main)
    for found in ranks:
        for x, first, p in zip(found, ranks[0], model.parameters(), strict=True):
            assert x.tobytes() == first.tobytes()
            np.testing.assert_allclose(x, p.detach().numpy(), rtol=1e-4, atol=1e-5)


METHODS = {
    "plain": lambda opt, loss: opt(loss),
    "callable": lambda opt, loss: opt(lambda: loss),
    "update": lambda opt, loss: opt.backward_and_update(loss),
    "half": lambda opt, loss: opt.backward_and_update_half(loss),
    "partial": lambda opt, loss: opt.backward_and_partial_update(loss),
    "sparse": lambda opt, loss: opt.backward_and_sparse_update(loss, topK=True, spars=0.2),
    "dgc": lambda opt, loss: opt.step(loss, DeepGradientCompression(TopK(0.2))),
    "top-K": lambda opt, loss: opt.step(loss, ErrorFeedback(TopK(0.2)), exchange="two_phase"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["torch", "distopt"])
def test_every_method_takes_a_torch_loss(method, kind):
    """The loss falls, and but for partial steps ranks stay alike."""

    def main(comm):
        model = network(comm.rank)
        if kind == "torch":
            opt = DistOpt(torch.optim.SGD(model.parameters(), 0.2), comm)
        else:
            opt = DistOpt(distopt.optim.SGD(0.2), comm, params=model)
        losses = []
        for _ in range(12):
            loss = loss_of(model, comm.rank, 0)
            losses.append(loss.item())
            METHODS[method](opt, loss)
        assert losses[-1] < losses[0]
        return b"".join(p.detach().numpy().tobytes() for p in model.parameters())

    ranks = run_ranks(3, main)
    assert len(set(ranks)) == 1 or method == "partial"


def test_distopts_kernels_update_torchs_memory_as_they_do_arrays():
    model, same = network(), network()
    opt = DistOpt(distopt.optim.LAMB(0.01), params=model)
    params = [distopt.Parameter(n, p.detach().numpy()) for n, p in same.named_parameters()]
    reference = DistOpt(distopt.optim.LAMB(0.01))
    for step in range(3):
        opt(loss_of(model, 0, step))
        same.zero_grad()
        loss_of(same, 0, step).backward()
        reference([(q, p.grad.numpy()) for q, p in reversed(list(zip(params, same.parameters(), strict=True)))])
    for p, q in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(p, q)


def test_pairs_may_be_tensors_and_channels_last():
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    before = conv.weight.detach().clone()
    opt = DistOpt(distopt.optim.SGD(1.0), params=conv)
    gradient = torch.arange(conv.weight.numel(), dtype=torch.float32).reshape(conv.weight.shape)
    opt([(conv.bias, torch.zeros(4)), (conv.weight, gradient)])
    assert torch.equal(conv.weight, before - gradient)


def test_a_checkpoint_has_torchs_optimizer(tmp_path):
    def train(steps, folder=None, model=None):
        model = model or network()
        opt = DistOpt(torch.optim.AdamW(model.parameters(), 0.01))
        if folder:
            opt.load(folder, None)
        for step in steps:
            opt.step(loss_of(model, 0, step), ErrorFeedback(TopK(0.2)))
        return opt, model

    _, straight = train(range(6))
    opt, model = train(range(3))
    opt.save(tmp_path)
    _, resumed = train(range(3, 6), tmp_path, model)
    for p, q in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


class Plain:
    """An optimizer of somebody's own, for tensors."""

    def update(self, param, grad):
        assert isinstance(grad, torch.Tensor)
        assert grad.shape == param.shape
        with torch.no_grad():
            param -= 0.5 * grad


@pytest.mark.parametrize("kind", ["tensors", "Parameter", "another's optimizer"])
def test_tensors_are_taken_wherever_arrays_are(kind):
    """Pairs of tensors or of named tensors, without params; the verbs by hand; and a checkpoint."""

    def main(comm):
        conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        before = [p.detach().clone() for p in conv.parameters()]
        opt = DistOpt(Plain() if kind == "another's optimizer" else distopt.optim.SGD(0.5), comm, broadcast=False)
        params = list(conv.parameters())
        given = [distopt.Parameter(f"p{k}", p) for k, p in enumerate(params)] if kind == "Parameter" else params
        for _ in range(2):
            opt([(q, torch.full_like(p, 1.0 + comm.rank)) for p, q in zip(params, given, strict=True)])
        for p, old in zip(params, before, strict=True):
            torch.testing.assert_close(p, old - 2 * 0.5 * 1.5)
        x = torch.ones(3) * comm.rank
        opt.all_reduce(x)
        opt.fused_all_reduce([x])
        assert x.tolist() == [2.0] * 3
        opt.broadcast(given)
        opt.update(given[0], torch.ones_like(params[0]))
        return params[0].detach().numpy().tobytes()

    first, second = run_ranks(2, main)
    assert first == second


def test_parameters_may_live_in_memory_that_all_ranks_share():
    """One copy of the model, of which each rank updates a share; the same bits as without."""

    def main(comm, shares):
        model = network(comm.rank)
        opt = DistOpt(distopt.optim.AdamW(0.01), comm, params=model)
        if shares:
            views = opt.parameter_views(model)
            assert {id(v) for v in views} == {id(p) for p in model.parameters()}
        for step in range(3):
            opt(loss_of(model, comm.rank, step))
            comm.barrier()
        pointers = [p.data_ptr() for p in model.parameters()]
        return b"".join(p.detach().numpy().tobytes() for p in model.parameters()), pointers

    alone, shared = (run_ranks(2, partial(main, shares=shares)) for shares in (False, True))
    assert {bits for bits, _ in alone} == {bits for bits, _ in shared}
    assert shared[0][1] == shared[1][1]
    assert not set(alone[0][1]) & set(alone[1][1])


def test_a_parameter_may_move():
    model, same = network(), network()
    opts = [DistOpt(distopt.optim.SGD(0.1), params=m) for m in (model, same)]
    for step in range(3):
        for p in model.parameters():
            p.data = p.data.clone()
        for m, opt in zip((model, same), opts, strict=True):
            opt(loss_of(m, 0, step))
    for p, q in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(p, q)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("in backward")


def test_buckets_leave_while_the_backward_pass_goes_on():
    """The same bits as without overlap; an error in it is raised on all ranks, and training goes on."""

    def main(comm, overlap):
        model = network(comm.rank)
        opt = DistOpt(distopt.optim.SGD(0.1), comm, params=model, overlap=overlap, threshold=100)
        for step in range(4):
            opt(loss_of(model, comm.rank, step))
        x, y = batch(comm.rank, 9)
        hidden = model[1](model[0](x))
        with pytest.raises((KeyError, RuntimeError), match="in backward"):
            opt(nn.functional.cross_entropy(model[2](Fails.apply(hidden) if comm.rank == 1 else hidden), y))
        opt.step(loss_of(model, comm.rank, 5), ErrorFeedback(TopK(0.2)))
        opt(loss_of(model, comm.rank, 6))
        return b"".join(p.detach().numpy().tobytes() for p in model.parameters())

    ranks = [bits for overlap in (False, True) for bits in run_ranks(2, partial(main, overlap=overlap))]
    assert len(set(ranks)) == 1


def test_bad_input_is_named():
    model = network()
    with pytest.raises(TypeError, match=r"params must be a torch.nn.Module, or an iterable .* got int"):
        DistOpt(distopt.optim.SGD(0.1), params=3)
    with pytest.raises(TypeError, match="got one of str"):
        DistOpt(distopt.optim.SGD(0.1), params=["w"])
    with pytest.raises(ValueError, match="a tensor that requires a gradient, got none"):
        DistOpt(distopt.optim.SGD(0.1), params=[torch.zeros(3)])
    opt = DistOpt(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    with pytest.raises(ValueError, match="must be without momentum, as DeepGradientCompression"):
        opt.step(loss_of(model, 0, 0), DeepGradientCompression(TopK(0.1)))
    embedding = nn.Embedding(5, 2, sparse=True)
    with pytest.raises(TypeError, match="weight: a gradient must be dense"):
        DistOpt(distopt.optim.SGD(0.1), params=embedding)(embedding(torch.tensor([1])).sum())


def test_ranks_with_other_learning_rates_are_told_so():
    def main(comm):
        model = network()
        opt = DistOpt(torch.optim.SGD(model.parameters(), 0.1 + comm.rank), comm)
        opt(loss_of(model, comm.rank, 0))

    with pytest.raises(ValueError, match=r"rank 0 has learning rate 0.1 of group 0, rank 1 has learning rate 1.1"):
        run_ranks(2, main)
