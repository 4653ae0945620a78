"""What ``distopt.torch.compress`` does to a DistributedDataParallel, as functions that all ranks of torchrun call."""

import copy
import io
import logging

import pytest
import torch
import torch.distributed as dist
from cases import Cases
from pass_cases import Experts, linear, mean, rank, size
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import distopt.torch as dt
from distopt.compress import ErrorFeedback, Int8, TopK

CASES = Cases()
case = CASES.case_of_two


@case
def one_exchange_per_gradient():
    """A model that is synchronized is in no DistributedDataParallel, whichever came first."""
    x = torch.full((1, 2), 1.0 + rank())
    for wraps_first in (False, True):
        model = linear()
        ddp = DistributedDataParallel(model) if wraps_first else None
        sync = dt.synchronize(model, ErrorFeedback(TopK(0.34)))
        ddp = ddp or DistributedDataParallel(model)
        with pytest.raises(
            RuntimeError, match=r"a synchronized model must not be in a DistributedDataParallel.*close\(\)"
        ):
            ddp(x)
        with pytest.raises(ValueError, match="the module in a DistributedDataParallel must not be synchronized"):
            dt.compress(ddp)
        model(x).sum().backward()
        assert sync.step_counter == 1
        sync.close()
        model.zero_grad()
        dt.compress(ddp)
        ddp(x).sum().backward()
        torch.testing.assert_close(model.weight.grad, torch.full((1, 2), mean(lambda r: 1.0 + r)))
    with pytest.raises(TypeError, match="model must not be a DistributedDataParallel"):
        dt.synchronize(nn.Sequential(DistributedDataParallel(linear())))


class Teaches(nn.Module):
    """A model with a synchronized one that it does not train."""

    def __init__(self, teacher):
        super().__init__()
        self.mine, self.teacher = linear(), [teacher]

    def forward(self, x):
        return self.mine(x) - self.teacher[0](x)


@case
def a_synchronized_model_beside_the_one_that_is_wrapped_is_none_of_its():
    teacher = linear()
    dt.synchronize(teacher)
    ddp = DistributedDataParallel(Teaches(teacher))
    ddp(torch.ones(1, 2)).sum().backward()
    assert teacher.weight.grad.tolist() == [[-1.0, -1.0]]


class Table(nn.Module):
    """A table of which each rank has a shard of its own, and a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.table, self.top = nn.Linear(4 + rank(), 4, bias=False), nn.Linear(4, 1)
        nn.init.constant_(self.table.weight, rank() + 1.0)
        self.register_buffer("counts", torch.full((2 + rank(),), float(rank())))

    def forward(self, x):
        return self.top(self.table(x))


@case
def what_is_to_be_ignored_stays_each_ranks_own():
    model = Table()
    ignored = ["table.weight", "counts"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(model)
    exchange = dt.compress(ddp, ErrorFeedback(Int8()))
    assert model.table.weight.eq(rank() + 1.0).all()
    assert model.counts.eq(rank()).all()
    x = torch.ones(1, 4 + rank())
    ddp(x).sum().backward()
    own = model.top.weight.detach().t() @ x
    torch.testing.assert_close(model.table.weight.grad, own)
    assert "table.weight" not in exchange.tensors


@case
def residuals_of_parameters_that_nobody_used_stay():
    """DistributedDataParallel leaves the gradients of such parameters alone."""
    ddp = DistributedDataParallel(Experts(), find_unused_parameters=True)
    exchange = dt.compress(ddp, ErrorFeedback(TopK(0.1)), threshold=1)
    x, arrived = torch.arange(1.0, 51.0) + rank(), torch.zeros(50)
    for number in range(12):
        ddp.zero_grad()
        if number == 3:
            with ddp.no_sync():
                ddp(x, "b").backward()
        ddp(x if number == 0 else x[:40], "b" if number == 0 else "a").backward()
        if number in (0, 3):
            arrived += ddp.module.b.grad
        else:
            assert ddp.module.b.grad is None
    waits = exchange.state_dict()["state"]["states"]["residual"]["b"].clone()
    dist.all_reduce(waits)
    torch.testing.assert_close(arrived + waits / size(), 2 * torch.arange(1.0, 51.0) + 2 * mean(lambda r: r))
    assert waits.count_nonzero() > 30


@case
def uneven_batches_are_divided_as_without_the_hook():
    for by_all in (True, False):
        found = []
        for hooked in (False, True):
            ddp = DistributedDataParallel(linear())
            if hooked:
                dt.compress(ddp)
            grads = []
            with ddp.join(divide_by_initial_world_size=by_all):
                for number in range(3 + 2 * rank()):
                    ddp.zero_grad()
                    ddp(torch.full((1, 2), 1.0 + rank() + number)).sum().backward()
                    grads.append(ddp.module.weight.grad.tolist())
            found.append(grads)
        torch.testing.assert_close(*map(torch.tensor, found))


@case
def a_copy_of_a_hooked_ddp_is_one_without_a_hook():
    x = torch.full((1, 2), 1.0 + rank())
    ddp = DistributedDataParallel(linear())
    exchange = dt.compress(ddp, ErrorFeedback(TopK(0.34)))
    ddp(x).sum().backward()
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    for copied in (copy.deepcopy(ddp), torch.load(file, weights_only=False)):
        copied.zero_grad()
        copied(x).sum().backward()
        torch.testing.assert_close(copied.module.weight.grad, torch.full((1, 2), mean(lambda r: 1.0 + r)))
    plain = [copy.deepcopy(ddp.module), AveragedModel(ddp.module)]
    if rank() == 0:
        for model in plain:
            model(x).sum().backward()
    ddp(x).sum().backward()
    assert exchange.step_counter == 2


@case
def learning_rates_that_differ_are_told_after_a_hook_too():
    ddp = DistributedDataParallel(linear())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    dt.compress(ddp, optimizer=optimizer)
    ddp(torch.ones(1, 2)).sum().backward()
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank())
    with pytest.raises(ValueError, match=r"rank 0 has learning rate 0\.1 of group 0, rank 1 has learning rate 0\.05"):
        ddp(torch.ones(1, 2)).sum().backward()


cases_of = CASES.of


def run_all(comm):
    """{case: what it raised, as text}."""
    logging.getLogger("distopt").setLevel(logging.ERROR)
    return CASES.run(comm)
