"""Every kernel is compiled for this GPU and loaded, and a step runs: make test-gpu-load."""

import numpy as np
import pytest

import laws
from distopt import device
from distopt.comm import LocalCommunicator
from distopt.kernels import KERNELS

pytestmark = pytest.mark.gpu
NAMES = [name for name, kernel in KERNELS.items() if kernel.signature.source != "topk_host.cu"]


@pytest.mark.parametrize("real", ["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_compiles_and_loads(name, real):
    """The first one of a text compiles all of it."""
    assert KERNELS[name]._function(np.dtype(real), device.current_gpu()).kernel.ptr


def test_a_step_has_the_bits_of_the_host():
    host, gpu = (laws.train(comm, steps=1) for comm in (LocalCommunicator(), LocalCommunicator(gpu=0)))
    assert laws.digest(gpu[0]) == laws.digest(host[0])
