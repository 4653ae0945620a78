"""What cupy's driver module must load, say and refuse; ``test_driver.py`` runs it with ``-p ptx.driver``."""

import cupy
import numpy as np
import pytest
from cupy.cuda import driver, nvrtc
from test_kernels import REALS
from test_nvrtc import kernels_of

import ptx.driver
from benchmarks.gpu_sass import TEXTS
from distopt.kernels.dispatch import KERNELS
from doubles.gpu import argument_sizes

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("doubles")]
NAMES = [name for text in TEXTS for name in kernels_of(text)]


def function(name="sgd"):
    """A handle of the driver's."""
    return KERNELS[name]._function(np.dtype(np.float32), 0).kernel.ptr


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_is_a_function_that_takes_what_the_library_passes(name, dtype):
    found = KERNELS[name]._function(np.dtype(dtype), 0)
    assert found.sizes == argument_sizes(name)
    newest = max(nvrtc.getSupportedArchs())
    assert driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_PTX_VERSION, found.kernel.ptr) == newest
    assert 0 < driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, found.kernel.ptr) <= 1024
    assert driver.occupancyMaxActiveBlocksPerMultiprocessor(found.kernel.ptr, 256, 0) > 0


def launch(kernel, grid=(1, 1, 1), block=(32, 1, 1), shared=0, addresses=0):
    driver.launchKernel(kernel, *grid, *block, shared, 0, addresses, 0)


LAUNCHES = {
    "of no function": (lambda: launch(0), "INVALID_HANDLE"),
    "of an empty grid": (lambda: launch(function(), grid=(0, 1, 1)), "INVALID_VALUE"),
    "of a grid too deep": (lambda: launch(function(), grid=(1, 1, 65536)), "INVALID_VALUE"),
    "of a block larger than any": (lambda: launch(function(), block=(1025, 1, 1)), "INVALID_VALUE"),
    "of a block larger than was compiled for": (lambda: launch(function(), block=(257, 1, 1)), "INVALID_VALUE"),
    "with too much shared memory": (lambda: launch(function(), shared=(48 << 10) + 1), "INVALID_VALUE"),
    "without arguments": (lambda: launch(function()), "INVALID_VALUE"),
    "of what is not there": (lambda: ptx.driver.RawModule(path=ptx.driver.paths[0]).get_function("no"), "NOT_FOUND"),
    "of no file": (lambda: ptx.driver.RawModule(path="/nowhere"), "FILE_NOT_FOUND"),
    "of no PTX": (lambda: driver.moduleLoadData(b"int main() {}"), "INVALID_IMAGE"),
    "of machine code": (lambda: driver.moduleLoadData(b"\x7fELF and so on"), "NO_BINARY_FOR_GPU"),
}


@pytest.mark.parametrize("kind", LAUNCHES)
def test_a_wrong_launch_is_refused(kind):
    call, name = LAUNCHES[kind]
    with pytest.raises(driver.CUDADriverError, match=f"^CUDA_ERROR_{name}: "):
        call()


def test_a_block_that_is_too_large_is_refused_to_the_library(monkeypatch):
    """As a script would see it; nothing is written."""
    monkeypatch.setattr("distopt.kernels.dispatch.THREADS", 512)
    x, y = (cupy.empty(5, np.float32) for _ in range(2))
    with pytest.raises(driver.CUDADriverError, match="INVALID_VALUE"):
        KERNELS["accumulate"](x, y)


def test_arguments_that_are_too_few_or_of_another_size_are_refused():
    kernel = KERNELS["scale"]._function(np.dtype(np.float32), 0)
    given = [np.zeros(1, np.dtype((np.void, nbytes))) for nbytes in kernel.sizes]
    for wrong in (given[:-1], [*given[:-1], np.zeros(1, np.float16)]):
        with pytest.raises(AssertionError, match="scale_float"):
            kernel((1,), (32,), wrong)


def test_more_shared_memory_must_be_asked_for():
    kernel = function("clip")
    attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    before = driver.funcGetAttribute(attribute, kernel)
    driver.funcSetAttribute(kernel, attribute, 100 << 10)
    assert driver.funcGetAttribute(attribute, kernel) == 100 << 10
    with pytest.raises(driver.CUDADriverError, match="INVALID_VALUE"):
        driver.funcSetAttribute(kernel, attribute, 300 << 10)
    driver.funcSetAttribute(kernel, attribute, before)


def test_what_only_the_machine_code_says_is_not_invented():
    """cupy has -1 for what a driver does not know."""
    assert driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS, function()) == -1


def test_cudart_still_finds_no_gpu():
    """It is left to ask in vain: nothing is forged for it."""
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        cupy.cuda.function.Module().load(b"")
