"""``distopt.torch.local_steps`` on ranks of torchrun, beside loops by hand."""

import functools

import pytest
from gloo_launch import run_torch

from tiers import by_size

pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
import local_cases

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory):
    """Runs all cases, once for each number of ranks."""
    return functools.cache(lambda size: run_torch(size, local_cases.run_all, tmp_path_factory.mktemp("r"), timeout=300))


@pytest.mark.parametrize(("size", "name"), by_size(local_cases.cases_of, [1, 2, 3], full=[4]))
def test_local_steps(ranks_of, size, name):
    for rank in ranks_of(size):
        assert not str(rank[name]), str(rank[name])
