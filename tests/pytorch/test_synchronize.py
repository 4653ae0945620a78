"""``distopt.torch.synchronize`` beside DistributedDataParallel, on ranks of torchrun."""

import functools

import numpy as np
import pytest
from gloo_launch import run_torch

from tiers import by_size

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
import ddp_cases  # noqa: E402
import pass_cases  # noqa: E402
import sync_cases  # noqa: E402

import distopt.torch as dt  # noqa: E402
from distopt.compress import ErrorFeedback, Packed, TopK  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory):
    """Runs all cases, once for each number of ranks."""
    return functools.cache(lambda size: run_torch(size, sync_cases.run_all, tmp_path_factory.mktemp("r"), timeout=300))


@pytest.mark.parametrize(("size", "name"), by_size(sync_cases.cases_of, [1, 2, 3], full=[4]))
def test_synchronize(ranks_of, size, name):
    for rank in ranks_of(size):
        assert not str(rank[name]), str(rank[name])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Runs all cases of a module, once for each number of ranks."""
    return functools.cache(lambda size, of: run_torch(size, of.run_all, tmp_path_factory.mktemp("p"), timeout=300))


MORE = [
    pytest.param(of, size, name, marks=marks)
    for of, size, marks in [
        (pass_cases, 2, ()),
        (pass_cases, 3, pytest.mark.full),
        (ddp_cases, 2, pytest.mark.full),
        (ddp_cases, 3, ()),
    ]
    for name in of.cases_of(size)
]


@pytest.mark.parametrize(("of", "size", "name"), MORE)
def test_what_an_exchange_is(found, of, size, name):
    for rank in found(size, of):
        assert not str(rank[name]), str(rank[name])


def trained(model, sync, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        x, y = sync_cases.batch(step)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return sync.full_state_dict()


def waiting(comm, folder, before):
    """Train, and go on from the full state of another number of ranks, if there is one; {name: what waits}."""
    torch.manual_seed(0)
    model = sync_cases.Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    sync = dt.synchronize(model, ErrorFeedback(Packed(TopK(0.05))), optimizer=optimizer, exchange="two_phase")
    if before:
        sync.load_state_dict(torch.load(f"{folder}/{before}.pt"))
        loaded = sync.full_state_dict()
        trained(model, sync, optimizer, range(2))
        sync_cases.everywhere_alike(model)
    else:
        loaded = trained(model, sync, optimizer, range(3))
    if comm.rank == 0:
        torch.save(loaded, f"{folder}/{comm.size}.pt")
    states = loaded["state"]["states"]
    return {f"{kind} {name}": a.numpy() for kind, arrays in states.items() for name, a in arrays.items()}


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (2, 4)])
def test_a_full_state_goes_on_with_other_ranks(before, after, tmp_path):
    saved = run_torch(before, waiting, tmp_path, str(tmp_path), 0)[0]
    loaded = run_torch(after, waiting, tmp_path, str(tmp_path), before)[0]
    assert saved.keys() == loaded.keys()
    assert any(a.any() for a in saved.values())
    for name, a in saved.items():
        np.testing.assert_array_equal(loaded[name], a, name)
