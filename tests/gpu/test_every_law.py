"""Every law over NCCL on a real GPU: make test-gpu-laws."""

import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
import spawned
import workers

import laws
from distopt import run_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [1, 2])
def test_every_law_holds_over_nccl_with_the_bits_of_the_host(size, tmp_path, monkeypatch):
    """Some 11,000 collectives a rank."""
    for name, value in workers.SEVERAL_ON_ONE.items():
        monkeypatch.setenv(name, value)
    found = spawned.run(spawned.every_law, size, tmp_path, workers.a_host_of_its_own, timeout=480.0)
    expected = run_ranks(size, laws.independence)
    assert found == {str(rank): str(digests) for rank, digests in enumerate(expected)}
