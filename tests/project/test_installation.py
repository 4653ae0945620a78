"""Sources without a built library: a warning beside an installed distopt, an error of a step and of the tests."""

import shutil
import sys
from pathlib import Path

import pytest

from distopt.kernels.signatures import NATIVE, library
from launch import TESTS, finish

pytestmark = pytest.mark.thorough
NOT_EDITABLE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose sources are not built."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in (Path(sys.modules["distopt"].__file__).parent, NATIVE, TESTS):
        shutil.copytree(folder, tmp_path / "checkout" / folder.name, ignore=ignored, dirs_exist_ok=True)
    shutil.copy(TESTS.parent / "pyproject.toml", tmp_path / "checkout")
    return tmp_path / "checkout"


@pytest.fixture
def installed(checkout):
    """A folder like site-packages, with the same sources and their library."""
    package = shutil.copytree(checkout / "distopt", checkout.parent / "installed" / "distopt")
    shutil.copytree(NATIVE, package / "native", dirs_exist_ok=True)
    for built in Path(library()._name).parent.glob("libdistopt*.so"):
        shutil.copy(built, package)
    return package.parent


def run_python(folder, script, *packages, **environment):
    """(exit code, output) of a script in a folder; with ``packages`` before this environment's."""
    paths = ":".join(map(str, packages))
    environment = {"PYTHONPATH": paths, "PYTHONSAFEPATH": None} | environment
    return finish([sys.executable, "-c", NOT_EDITABLE + script], 60, cwd=folder, env=environment)


TRAIN = """
import numpy as np
p = distopt.Parameter("w", np.ones(2, np.float32))
distopt.DistOpt()([(p, np.ones(2, np.float32))])
"""


def test_an_import_warns_that_sources_hide_the_installed_package(checkout, installed):
    code, output = run_python(checkout, "import distopt; print(distopt.__version__)", installed)
    assert code == 0
    assert f"RuntimeWarning: the sources in {checkout} are not built: pip install -e {checkout}" in output
    assert f"they hide the distopt that is installed in {installed}" in output
    assert "set PYTHONSAFEPATH=1" in output
    code, output = run_python(checkout, "import distopt; print(distopt.__file__)", installed, PYTHONSAFEPATH="1")
    assert (code, output) == (0, f"{installed}/distopt/__init__.py\n")


def test_a_step_of_sources_that_are_not_built_says_what_to_do(checkout):
    code, output = run_python(checkout, "import distopt" + TRAIN)
    assert code == 1
    assert f"ImportError: the sources in {checkout} are not built: pip install -e {checkout}" in output


def test_tests_stop_before_they_are_collected_without_a_library(checkout, installed):
    run_pytest = "import pytest; sys.exit(pytest.main(['-q', 'tests/test_checks.py']))"
    code, output = run_python(checkout, run_pytest, installed)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "there is no distopt to test: the sources in" in output


def test_tests_stop_if_their_processes_would_import_another_distopt(checkout, installed):
    run_pytest = f"sys.path.insert(0, {str(installed)!r}); import pytest; sys.exit(pytest.main(['-q', 'tests']))"
    code, output = run_python(checkout, run_pytest)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert f"the tests would try {installed}/distopt, but the processes that they start here would import" in output
    assert "set PYTHONSAFEPATH=1" in output
