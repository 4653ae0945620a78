import gc
import importlib
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # ranks are threads here, and would start BLAS's each

sys.path.insert(0, str(Path(__file__).parent))

import installation

if flaw := installation.flaw():
    pytest.exit(flaw, returncode=pytest.ExitCode.USAGE_ERROR)

import tiers
from launch import extend_path, has_mpi

extend_path()

# The machine's speed says nothing about the code.  The second one is for --hypothesis-profile.
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=10)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=40)
settings.load_profile("quick")


def pytest_configure(config):
    tiers.install(config)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    tiers.keep_samples(items)
    no_mpi = [] if has_mpi() else [pytest.mark.skip(reason="mpi4py or mpiexec is missing: pip install 'distopt[mpi]'")]
    for item in items:
        if "doubles" in item.fixturenames:
            item.add_marker(pytest.mark.device)
        if tiers.RANKS & tiers.tiers_of(item):
            for mark in no_mpi:
                item.add_marker(mark)


def pytest_collection():
    gc.disable()  # thousands of tests stay until the end, and need not be looked at again and again


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed and "doubles" in item.fixturenames:
        report.sections.append(("what the doubles of GPUs did last", sys.modules["doubles.gpu"].told()))
    return report


@pytest.fixture
def doubles(monkeypatch):
    """A GPU for every rank, as it seems (tests/doubles): the double of cupy's runtime."""
    cupy = pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
    gpu, nccl = (pytest.importorskip(f"doubles.{name}") for name in ("gpu", "nccl"))
    gpu.install(monkeypatch.setattr)
    nccl.install(monkeypatch.setattr)
    for name, nbytes in (("MESSAGE", 1120), ("GROUP", 1100)):  # bounds between different buckets of the laws' model
        monkeypatch.setattr(f"distopt.engine.bucket_store.{name}", nbytes)
    yield gpu
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)


@pytest.fixture
def torch_doubles(doubles, monkeypatch):
    """torch's side of these GPUs."""
    pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
    double = importlib.import_module("doubles.torch_cuda")
    double.install(monkeypatch.setattr)
    return double


@pytest.fixture
def one_warp(monkeypatch):
    """Blocks of one warp: a thread is a fiber here, and thousands of steps would take twice as long with eight."""
    monkeypatch.setattr("distopt.kernels.dispatch.THREADS", 32)


@pytest.fixture
def arithmetic(doubles, monkeypatch):
    """Arrays on the doubles of GPUs calculate too."""
    importlib.import_module("doubles.arithmetic").install(monkeypatch.setattr)
