"""What ``import distopt`` brings, and what it leaves for later."""

import importlib
import subprocess
import sys

import pytest

import distopt


def test_every_public_name_is_there_and_no_other_is_listed():
    assert dir(distopt) == sorted(distopt.__all__)
    assert all(hasattr(distopt, name) for name in distopt.__all__)
    with pytest.raises(AttributeError, match="module 'distopt' has no attribute 'no_such_name'"):
        distopt.no_such_name  # noqa: B018


MODULES = {name: f"volume.{name}" for name in ("cost", "experiment", "fit")} | {
    "monitor": "volume.experiment.callbacks",
    "volume": "volume",
}


@pytest.mark.parametrize(("name", "module"), MODULES.items())
def test_a_lazily_imported_name_is_the_module_itself(name, module):
    assert getattr(distopt, name) is sys.modules[f"distopt.{module}"]
    assert importlib.import_module(f"distopt.{name}") is sys.modules[f"distopt.{module}"]
    assert sys.modules[f"distopt.{module}"].__spec__.name == f"distopt.{module}"


def test_lazily_imported_classes_are_those_of_their_modules():
    assert distopt.Trainer is sys.modules["distopt.trainer.trainer"].Trainer
    assert distopt.simulate is sys.modules["distopt.volume.simulate"].simulate


@pytest.mark.thorough
def test_what_not_every_program_needs_is_not_imported_before_it_is_used():
    later = ["cupy", "mpi4py", "torch", "matplotlib", "asyncio", "subprocess"]
    later += ["distopt.volume", "distopt.trainer"]
    script = f"import sys, distopt; print([name for name in {later} if name in sys.modules]); distopt.volume.advise"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
