"""What ``distopt.torch.local_steps`` must do, as functions that all ranks call."""

import io

import pytest
import torch
import torch.distributed as dist
from cases import Cases
from sync_cases import batch, net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distopt.torch as dt
from distopt.compress import ErrorFeedback, Packed, TopK
from distopt.optim import SGD

CASES = Cases()
case, case_of_two, case_with_four = CASES.case, CASES.case_of_two, CASES.case_with_four


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        x, y = batch(step)
        nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)), y).backward()
        optimizer.step()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def everywhere_alike(model):
    for name, p in model.named_parameters():
        everyone = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, p.detach().contiguous())
        assert all(torch.equal(p, x) for x in everyone), name


def alike(found, expected):
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@case
def test_it_is_diloco():
    """Beside a loop by hand over the collectives of torch."""
    model, other = net().double(), net().double()
    for p in [*model.parameters(), *model.buffers()]:
        dist.broadcast(p.data, 0)
    other.load_state_dict(model.state_dict())
    whole, momenta = values(other), [torch.zeros_like(p) for p in other.parameters()]
    optimizer, plain = (torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (model, other))
    dt.local_steps(model, optimizer, every=3)
    for window in range(2):
        train(model, optimizer, 3, 3 * window)
        train(other, plain, 3, 3 * window)
        for p, at, v in zip(other.parameters(), whole, momenta, strict=True):
            d = at - p.data
            dist.all_reduce(d)
            d /= dist.get_world_size()
            v.mul_(0.9).add_(d)
            at.sub_(0.7 * (d + 0.9 * v))
            p.data.copy_(at)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@case_of_two
def test_ranks_differ_inside_of_a_window_alone():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    windows = dt.local_steps(model, optimizer, every=2, compressor=ErrorFeedback(Packed(TopK(0.1))))
    for step in range(4):
        train(model, optimizer, 1, step)
        if step % 2:
            everywhere_alike(model)
            assert alike(values(model), [windows.global_parameters[n] for n, _ in model.named_parameters()])
        else:
            first = next(model.parameters()).detach().clone()
            dist.broadcast(first, 0)
            assert dist.get_rank() == 0 or not torch.equal(first, next(model.parameters()))


@case
def test_training_goes_on_in_the_middle_of_a_window():
    def make():
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        options = {"fragments": 2, "delay": 2, "alpha": 0.5, "compressor": ErrorFeedback(TopK(0.1))}
        return model, optimizer, dt.local_steps(model, optimizer, every=4, **options)

    expected, optimizer, _ = make()
    train(expected, optimizer, 11)
    for stop in range(1, 8):
        model, optimizer, windows = make()
        train(model, optimizer, stop)
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict(), windows.state_dict()], file)
        file.seek(0)
        again, optimizer, windows = make()
        for part, state in zip((again, optimizer, windows), torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(state)
        assert windows.step_counter == stop
        train(again, optimizer, 11 - stop, stop)
        assert alike(values(again), values(expected)), stop


@case
def test_a_step_that_a_scaler_leaves_out_counts():
    model = net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=4.0)
    windows = dt.local_steps(model, optimizer, every=3, scaler=scaler)
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss * (float("inf") if dist.get_rank() == step else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert windows.step_counter == step + 1
    everywhere_alike(model)
    windows.close()
    scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    assert windows.step_counter == 3


@case_of_two
def test_ranks_join():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    windows = dt.local_steps(model, optimizer, every=4, fragments=2, delay=1)
    train(model, optimizer, 3 + 3 * dist.get_rank())
    windows.join()
    everywhere_alike(model)


@case
def test_sixteen_bits_follow_global_parameters_of_32():
    model = net().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    windows = dt.local_steps(model, optimizer, every=2, outer=SGD(0.5))
    train(model, optimizer, 4)
    everywhere_alike(model)
    for name, p in model.named_parameters():
        whole = windows.global_parameters[name]
        assert whole.dtype == torch.float32
        assert torch.equal(p.data, whole.bfloat16())
    assert not torch.equal(windows.global_parameters["first.weight"].bfloat16().float(), whole)


@case_with_four
def test_shards_are_exchanged_with_their_replicas():
    """A model that is sharded over pairs of ranks, and trains apart from the other pairs."""
    size = dist.get_world_size()
    shards = min(2, size)
    mesh = init_device_mesh("cpu", (size // shards, shards), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    dt.local_steps(model, optimizer, every=2, group=mesh.get_group("replicate"))
    for step in range(4):
        g = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=g)).square().mean().backward()
        optimizer.step()
    for p in model.parameters():
        whole = p.full_tensor().detach()
        first = whole.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, whole)


@case
def test_another_models_optimizer_is_refused_on_all_ranks():
    stranger = torch.optim.SGD(net().parameters() if dist.get_rank() == 0 else [torch.zeros(3)], 0.1)
    with pytest.raises(ValueError, match="rank 0: optimizer must update parameters of the model"):
        dt.local_steps(net(), stranger, every=2)
    with pytest.raises(TypeError, match=r"optimizer must be one of torch\.optim, got a int"):
        dt.local_steps(net(), 3, every=2)


cases_of = CASES.of


def run_all(comm):
    """{case: what it raised, as text}."""
    return CASES.run(comm)
