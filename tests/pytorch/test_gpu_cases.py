"""The cases of tests/gpu/test_torch.py on CPUs: what they ask for is what torch does there too."""

import pytest

pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
import torch_cases
from gloo_launch import run_torch

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_have_the_gradients_of_one_process(size, tmp_path):
    run_torch(size, torch_cases.on_cpu, tmp_path)
