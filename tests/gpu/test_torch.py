"""Torch on a real GPU: make test-gpu-torch.  The same cases run in CI on CPUs (tests/pytorch/test_gpu_cases.py)."""

import functools

import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
import spawned
import torch
import torch_cases
import workers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("loopback"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU for torch: it has no CUDA, or finds no driver"),
]


@pytest.mark.parametrize("size", workers.SIZES[:2])
@pytest.mark.parametrize("name", torch_cases.CASES)
def test_ranks_have_the_gradients_of_one_process(name, size, tmp_path):
    found = tmp_path / "found"
    found.mkdir()
    job = functools.partial(torch_cases.on_gpu, name=name, folder=str(tmp_path))
    assert spawned.run(job, size, found, workers.begin, timeout=60.0) == {str(rank): "done" for rank in range(size)}
