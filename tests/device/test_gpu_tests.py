"""The tests of real GPUs, as they are, on the doubles: what they name must exist before somebody has a GPU."""

import sys

import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
from launch import PROJECT, finish

pytestmark = pytest.mark.device
CASES = {
    "test_load.py": "test",
    "test_real.py": "not (1000003 or 25000000 or matrix)",  # millions take long here, and cuBLAS has no double
}


@pytest.mark.parametrize("name", CASES)
def test_tests_of_real_gpus_pass_on_the_doubles(name):
    command = [sys.executable, "-m", "pytest", "-p", "doubles.plugin", "-p", "no:cacheprovider", "-q", "-x", "-m", ""]
    command += [f"tests/gpu/{name}", "-k", CASES[name]]
    code, output = finish(command, 300, env={"PYTHONPATH": str(PROJECT / "tests")}, cwd=PROJECT)
    assert code == 0, output
    assert "skipped" not in output
