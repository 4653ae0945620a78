import sys
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]
sys.path.append(str(HERE.parent))  # benchmarks/, whose lists of models the tests use too

# The machine's speed says nothing about the code.
settings.register_profile("any-machine", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("any-machine")


@pytest.fixture
def doubles(monkeypatch):
    """A GPU for every rank, as it seems (tests/doubles): the double of cupy's runtime."""
    cupy = pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
    gpu, nccl = (pytest.importorskip(f"doubles.{name}") for name in ("gpu", "nccl"))
    gpu.install(monkeypatch.setattr)
    nccl.install(monkeypatch.setattr)
    monkeypatch.setattr("distopt.kernels.THREADS", 32)  # a fiber each
    yield gpu
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
