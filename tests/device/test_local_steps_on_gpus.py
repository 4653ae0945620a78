"""Local steps of cupy arrays, on doubles of GPUs and NCCL: the bits of the host, whatever a GPU does first."""

import numpy as np
import pytest
from test_local_steps import COMPRESSORS, SHAPES, parameters

from distopt import LocalSteps, device, run_ranks
from distopt.optim import SGD, Adam
from doubles.ranks import on_gpus

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
gpu = pytest.importorskip("doubles.gpu")

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("doubles")]
STREAMS = {"windows": {}, "fragments": {"fragments": 2, "delay": 2, "alpha": 0.5}}


def gradients(rank, step):
    rng = np.random.default_rng((rank, step))
    return [rng.normal(size=shape) for shape in SHAPES.values()]


def train(comm, place, dtype=np.float32, make=lambda: Adam(0.01), **options):
    """Seven steps of parameters that ``place`` makes; what they are in the end, and the global ones."""
    params = parameters(dtype)
    for p in params:
        p.data = place(p.data)
    opt = LocalSteps(make(), comm, every=3, outer=SGD(0.7), deterministic=True, threshold=40, **options)
    for step in range(7):
        grads = gradients(comm.rank, step)
        opt([(p, place(np.asarray(g, dtype))) for p, g in zip(params, grads, strict=True)])
    found = [device.host_copy(p.data) for p in params] + [device.host_copy(x) for x in opt.global_parameters.values()]
    return [x.tobytes() for x in found]


def orders(comm):
    """Ways in which a GPU may go on: the communicator's stream behind, the caller's behind, and any."""
    return gpu.lagging(comm._stream.ptr), gpu.lagging(0), gpu.shuffled(1), gpu.shuffled(2)


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_local_steps_of_gpus_have_the_bits_of_the_host(name, streams):
    def options():
        return {"compressor": COMPRESSORS[name](), "exchange": "two_phase", **STREAMS[streams]}

    def main(comm):
        found = []
        for order in orders(comm):
            with gpu.lazily(order):
                found.append(train(comm, gpu.array, **options()))
        return found

    expected = run_ranks(2, lambda comm: train(comm, np.copy, **options()))
    for found, wanted in zip(on_gpus(2, main), expected, strict=True):
        assert [mine == wanted for mine in found] == [True] * len(found)


@pytest.mark.parametrize("multi_precision", [False, True])
def test_parameters_of_16_bits_have_the_bits_of_the_host(multi_precision):
    def make():
        return SGD(0.01, momentum=0.9, multi_precision=multi_precision)

    found = on_gpus(2, lambda comm: train(comm, gpu.array, np.float16, make))
    assert found == run_ranks(2, lambda comm: train(comm, np.copy, np.float16, make))
