"""``distopt.torch.synchronize`` where ranks share hosts."""

import numpy as np
import pytest
from gloo_launch import run_torch

from distopt.comm import process_group
from distopt.compress import ErrorFeedback, Half, Int8, TopK, TwoBit

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
import distopt.torch as dt  # noqa: E402

pytestmark = pytest.mark.torch
SENT = {"dense": None, "by all": None, "half": Half(), "int8": Int8(), "int8 with memory": ErrorFeedback(Int8())}
# What is exchanged by nodes otherwise, or in two phases, which know all entries first.
GATHERED = "by all", "topk", "2bit"
SENT |= {"topk": ErrorFeedback(TopK(0.1)), "2bit": ErrorFeedback(TwoBit(0.01))}
# What is sent by nodes, and how far it is from means.
NODES = {"dense": 1e-6, "half": 1e-3, "int8": 0.02, "int8 with memory": 0.02}


def on_two_hosts(comm):
    """A communicator of the ranks, two of which are on each of two hosts."""
    patch = pytest.MonkeyPatch()
    patch.setattr(process_group.Board, "open", lambda *_: [])
    patch.setattr(process_group, "_machine", lambda: f"host {comm.rank // 2}")
    return process_group.ProcessGroupCommunicator()


def how(name):
    return "gather" if name in GATHERED else "auto"


def linears():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(150, 150) for _ in range(4)))


def batch(comm, step):
    return torch.randn(8, 150, generator=torch.Generator().manual_seed(10 * step + comm.rank))


def synchronized_on_two_hosts(comm):
    """The gradients of three passes, and the plan's last line."""
    there, found = on_two_hosts(comm), {}
    for name, compressor in SENT.items():
        for overlap in (False, True):
            model = linears()
            sync = dt.synchronize(model, compressor, group=there, threshold=20_000, overlap=overlap, exchange=how(name))
            gradients = []
            for step in range(3):
                model.zero_grad()
                (model(batch(comm, step)) ** 2).mean().backward()
                gradients += [p.grad.numpy().ravel() for p in model.parameters()]
            found[f"{name}, {overlap}"] = np.concatenate(gradients)
            found[f"{name}, {overlap}, plan"] = np.array(str(sync.plan).splitlines()[-1])
            sync.close()
    return found


def test_gradients_of_models_are_added_up_inside_of_hosts(tmp_path):
    """All ranks, and buckets that leave early, have the same bits; but for rounding they are the means over ranks."""
    first, *others = run_torch(4, synchronized_on_two_hosts, tmp_path)
    for name, x in first.items():
        for other in others:
            np.testing.assert_array_equal(other[name], x, name)
    for name in SENT:
        x = first[f"{name}, False"]
        np.testing.assert_array_equal(first[f"{name}, True"], x, name)
        assert ("2 nodes of 2 ranks" in str(first[f"{name}, True, plan"])) == (name in NODES)
        if name in NODES:
            assert np.linalg.norm(x - first["by all, False"]) <= NODES[name] * np.linalg.norm(x)


class Stumbles(torch.autograd.Function):
    """The identity, whose gradient raises on one rank."""

    @staticmethod
    def forward(ctx, x, raises):
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.raises:
            raise ValueError("no gradient")
        return gradient, None


def in_ddp_on_two_hosts(comm):
    """The gradients of passes of a DDP model."""
    there, found = on_two_hosts(comm), {}
    for name, compressor in SENT.items():
        for overlap in (False, True):
            model = torch.nn.parallel.DistributedDataParallel(linears(), bucket_cap_mb=0.1)
            exchange = dt.compress(
                model, compressor, group=there, threshold=20_000, overlap=overlap, exchange=how(name)
            )
            gradients, early = [], 0
            for step in range(5):
                model.zero_grad()
                (model(batch(comm, step)) ** 2).mean().backward()
                early += exchange.may_overlap
                gradients += [p.grad.numpy().ravel() for p in model.parameters()]
            assert bool(early) == overlap, (name, overlap, early)
            found[f"{name}, {overlap}"] = np.concatenate(gradients)
    return found


def test_gradients_of_ddp_leave_while_its_backward_pass_goes_on(tmp_path):
    """With the bits of all buckets at once, on all ranks."""
    first, *others = run_torch(4, in_ddp_on_two_hosts, tmp_path)
    for name in SENT:
        np.testing.assert_array_equal(first[f"{name}, True"], first[f"{name}, False"], name)
        for other in others:
            np.testing.assert_array_equal(other[f"{name}, True"], first[f"{name}, True"], name)


class Halves(torch.nn.Module):
    """A model whose backward pass may raise when half of its gradients are there."""

    def __init__(self):
        super().__init__()
        layers = linears()
        self.first, self.rest = layers[:2], layers[2:]

    def forward(self, x, raises=False):
        return self.rest(Stumbles.apply(self.first(x), raises))


def left_in_a_backward_pass(comm, kind):
    there, options = on_two_hosts(comm), {"threshold": 20_000, "overlap": True, "exchange": "gather"}
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(Halves(), bucket_cap_mb=0.1)
        exchange = dt.compress(model, ErrorFeedback(TopK(0.1)), group=there, **options)
    else:
        model = Halves()
        exchange = dt.synchronize(model, ErrorFeedback(TopK(0.1)), group=there, **options)
    for step in range(3):
        (model(batch(comm, step)) ** 2).mean().backward()
    assert exchange.may_overlap
    raises = comm.rank == 3  # whose script ends
    with pytest.raises(
        (ValueError, RuntimeError), match="no gradient" if raises else "rank 3: the process has ended in"
    ):
        (model(batch(comm, 3), raises) ** 2).mean().backward()


@pytest.mark.parametrize("kind", ["ddp", "synchronize"])
def test_a_process_that_ends_in_a_backward_pass_is_named(kind, tmp_path):
    """Buckets are on their way, and the others wait for the next ones."""
    run_torch(4, left_in_a_backward_pass, tmp_path, kind)
