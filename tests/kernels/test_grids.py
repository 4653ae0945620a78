"""A kernel gets as many blocks as its GPU runs at once, as the driver says, but no more than it has work for."""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
gpu = pytest.importorskip("doubles.gpu")

from distopt import device, kernels  # noqa: E402
from distopt.kernels.layout import CHUNK, BucketLayout  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("doubles")]
MULTIPROCESSORS = 2  # of the double


@pytest.fixture
def asked(monkeypatch):
    """What the driver is asked; 3 blocks of any kernel have room on a multiprocessor."""
    questions = []
    name = "occupancyMaxActiveBlocksPerMultiprocessor"
    monkeypatch.setattr(cupy.cuda.driver, name, lambda *question: questions.append(question) or 3)
    device.resident_blocks.cache_clear()
    yield questions
    device.resident_blocks.cache_clear()


def blocks_of(call):
    gpu.machine().log.clear()
    call()
    return [op.details[0][0] for op in gpu.machine().log if "_float" in op.name]


def test_a_kernel_gets_the_blocks_that_its_gpu_runs_at_once_and_no_more_than_it_has_work_for(asked):
    for chunks in (0, 1, 5, 6, 7, 100):
        x, y = (device.gpu_zeros(chunks * CHUNK, np.float32) for _ in "xy")
        assert blocks_of(lambda x=x, y=y: kernels.accumulate(x, y)) == [max(1, min(chunks, 3 * MULTIPROCESSORS))]


def test_a_kernel_with_a_block_for_each_member_gets_these(asked):
    sizes = [CHUNK] * 4
    table = BucketLayout("abcd", [(n,) for n in sizes], np.cumsum([0, *sizes[:-1]]).tolist(), "float32")
    partial, sums = device.gpu_zeros(4, np.float64), device.gpu_zeros(4, np.float64)
    assert blocks_of(lambda: kernels.fold_partials(table, partial, sums, 1)) == [4]


def test_the_driver_is_asked_once_for_each_kernel(asked):
    x, y = (device.gpu_zeros(10, np.float32) for _ in "xy")
    for _ in range(3):
        kernels.accumulate(x, y)
        kernels.scale(x, 2.0)
    assert len(asked) == 2
    assert len({function for function, *_ in asked}) == 2
    assert {(threads, shared) for _, threads, shared in asked} == {(kernels.dispatch.THREADS, 0)}
