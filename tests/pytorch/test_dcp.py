"""States of ``distopt.torch`` go through torch.distributed.checkpoint, and safetensors reads its files."""

import numpy as np
import pytest
from gloo_launch import run_torch

pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
import dcp_cases

import distopt.torch as dt
from distopt.compress import ErrorFeedback, TopK

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_torch(2, dcp_cases.resumed, tmp_path_factory.mktemp("r"), str(tmp_path_factory.mktemp("saved")))


@pytest.mark.parametrize("local", [False, True])
def test_each_rank_gets_its_own_residual_back(ranks, local):
    for rank in ranks:
        np.testing.assert_array_equal(rank[f"whole {local}"], rank[f"resumed {local}"])


def test_a_state_of_another_rank_is_refused():
    import torch

    sync = dt.synchronize(torch.nn.Linear(3, 2))
    state = sync.state_dict() | {"rank": 1, "ranks": 2}
    other = dt.RankState(type("Other", (), {"state_dict": lambda self: state})()).state_dict()
    assert list(other) == ["rank 1 of 2"]
    with pytest.raises(ValueError, match="must be that of rank 0 of 1, got that of rank 1 of 2"):
        dt.RankState(sync).load_state_dict(other)


def test_safetensors_reads_what_a_synchronizer_saves(tmp_path):
    import torch

    read = pytest.importorskip("safetensors.numpy", reason="safetensors is missing: pip install safetensors")
    model = torch.nn.Linear(30, 20)
    sync = dt.synchronize(model, ErrorFeedback(TopK(0.1)))
    model(torch.randn(4, 30)).square().sum().backward()
    place = sync.save(tmp_path, model, extra={"seen": torch.arange(3)})
    of_all, of_rank = (read.load_file(place / name) for name in ("all", "rank-0"))
    residuals = sync.state_dict()["state"]["states"]["residual"]
    for name, p in model.named_parameters():
        np.testing.assert_array_equal(of_all[f"/parameters/{name}"], p.detach().numpy())
        np.testing.assert_array_equal(of_rank[f"/states/residual/{name}"], residuals[name].numpy())
