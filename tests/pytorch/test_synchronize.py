"""``distopt.torch.synchronize`` beside DistributedDataParallel, on ranks of torchrun."""

import pytest
from gloo_launch import run_torch

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
import sync_cases  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request, tmp_path_factory):
    return run_torch(request.param, sync_cases.run_all, tmp_path_factory.mktemp("ranks"), timeout=300)


@pytest.mark.parametrize("name", sync_cases.CASES)
def test_synchronize(ranks, name):
    for rank in ranks:
        assert not str(rank[name]), str(rank[name])
