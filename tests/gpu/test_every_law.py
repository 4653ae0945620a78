"""Every law over NCCL on a real GPU: make test-gpu-laws, test-gpu-modes and test-gpu-four."""

import functools

import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
import spawned
import workers

from distopt import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("loopback")]
TIMEOUT = 240.0


@pytest.mark.parametrize("size", workers.SIZES)
@pytest.mark.parametrize("part", spawned.LAWS)
def test_every_law_holds_over_nccl(part, size, tmp_path):
    """Some 10,000 collectives a rank, all parts together."""
    job = functools.partial(spawned.law, part=part)
    found = spawned.run(job, size, tmp_path, workers.begin, timeout=TIMEOUT)
    assert found == {str(rank): "done" for rank in range(size)}


@pytest.mark.parametrize("size", workers.SIZES)
def test_the_bits_are_those_of_the_host(size, tmp_path):
    found = spawned.run(spawned.digests, size, tmp_path, workers.begin, timeout=TIMEOUT)
    assert found == {str(rank): str(digests) for rank, digests in enumerate(run_ranks(size, spawned.digests))}
