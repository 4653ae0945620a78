"""One real GPU: make test-gpu-kernels.  The same laws run in CI on doubles (tests/device/test_gpu.py)."""

import numpy as np
import pytest

import laws
from distopt import device
from distopt.comm import LocalCommunicator
from distopt.compress import BucketContext, ErrorFeedback, ExchangeContext, Threshold, TopK

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu():
    return LocalCommunicator(gpu=0)


@pytest.mark.parametrize("dtype", laws.TOLERANCE)
@pytest.mark.parametrize("mode", laws.MODES)
def test_host_and_device_agree_in_every_mode(gpu, mode, dtype):
    host = laws.digest(laws.train(LocalCommunicator(), mode=mode, dtype=dtype)[0])
    assert laws.digest(laws.train(gpu, mode=mode, dtype=dtype)[0]) == host


@pytest.mark.parametrize("name", [n for n in (*laws.OPTIMIZERS, *laws.WRAPPERS) if n not in laws.OF_BLAS])
def test_host_and_device_agree_with_every_optimizer(gpu, name):
    make = (laws.OPTIMIZERS | laws.WRAPPERS)[name]
    host = laws.digest(laws.train(LocalCommunicator(), make=make, shapes=[(100_003,), (7, 3)])[0])
    assert laws.digest(laws.train(gpu, make=make, shapes=[(100_003,), (7, 3)])[0]) == host


def test_host_and_device_are_near_each_other_with_matrix_products(gpu):
    """Whose last bits are those of cuBLAS."""
    shapes = [(300, 500), (500, 300), (64, 16, 3, 3), (100,)]
    for name in laws.OF_BLAS:
        runs = [laws.train(comm, make=laws.OPTIMIZERS[name], shapes=shapes)[0] for comm in (LocalCommunicator(), gpu)]
        for host, there in zip(*runs, strict=True):
            np.testing.assert_allclose(host.data, device.host_copy(there.data), rtol=0, atol=1e-3)


@pytest.mark.parametrize("n", [1, 4095, 4096, 4097, 1_000_003, 25_000_000])
@pytest.mark.parametrize("compressor", [TopK(0.001), TopK(0.5), Threshold(3.0), Threshold(0.0)], ids=repr)
def test_selection_of_every_size(gpu, compressor, n):
    x, residual = np.random.default_rng(n).standard_normal((2, n), np.float32)
    found = []
    for comm in (LocalCommunicator(), gpu):
        add, kept = laws.to_device(comm, [x.copy(), residual.copy()])
        total = laws.to_device(comm, [np.zeros(n, np.float32)])[0]
        chosen, state = ErrorFeedback(compressor), {"residual": kept}
        context = ExchangeContext(
            bucket=BucketContext(scratch=lambda name, nbytes, like=add: device.zeros(nbytes, np.uint8, like))
        )
        payload = chosen.compress(add, state, context)
        chosen.decompress(payload, total, context)
        found.append([device.host_copy(a).tobytes() for a in (total, state["residual"])])
    assert found[0] == found[1]


@pytest.mark.parametrize("compressor", laws.CAPTURED, ids=repr)
def test_a_replay_of_a_captured_step_has_the_bits_of_the_step(gpu, compressor):
    laws.capture_changes_no_bit(gpu, compressor)
    laws.capture_changes_no_bit(gpu, compressor, make=laws.OPTIMIZERS["adam"], nonfinite="skip", nan_at=(2, 4))
