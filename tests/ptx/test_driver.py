"""Training by cupy's own driver module, in a process of its own that has a ``libcuda.so.1`` (driver.py)."""

import sys

import pytest

import ptx
from launch import PROJECT, finish

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
pytestmark = [pytest.mark.device, *ptx.MARKS]
SOME = "driver_checks or agree_in_every_mode or every_optimizer or (16_bits and dense)"


@pytest.mark.parametrize("chosen", [SOME, pytest.param("", marks=pytest.mark.full)], ids=["some", "all"])
def test_kernels_are_loaded_and_launched_by_cupys_driver_module_with_the_hosts_bits(chosen):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "ptx.driver", "-p", "no:cacheprovider", "-k", chosen]
    command += ["-m", "device and not (mpi or full)", "tests/ptx/driver_checks.py", "tests/device/test_gpu.py"]
    env = {"PYTHONPATH": ":".join(str(PROJECT / folder) for folder in ("tests", "tests/kernels", "."))}
    code, output = finish(command, 900, env=env, cwd=PROJECT)
    assert code == 0, output[-4000:]
