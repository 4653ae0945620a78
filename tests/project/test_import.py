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


MODULES = {name: f"lab.{name}" for name in ("cost", "experiment", "fit")} | {
    "monitor": "lab.experiment.callbacks",
    "volume": "lab",
}


@pytest.mark.parametrize(("name", "module"), MODULES.items())
def test_a_public_name_of_the_laboratory_has_all_of_its_module(name, module):
    public, module = getattr(distopt, name), importlib.import_module(f"distopt.{module}")
    assert public is importlib.import_module(f"distopt.{name}")
    assert {x: getattr(public, x) for x in public.__all__} == {x: getattr(module, x) for x in module.__all__}


def test_lazily_imported_classes_are_those_of_their_modules():
    assert distopt.Trainer is sys.modules["distopt.trainer.trainer"].Trainer
    assert distopt.simulate is sys.modules["distopt.lab.simulate"].simulate


@pytest.mark.thorough
def test_what_not_every_program_needs_is_not_imported_before_it_is_used():
    later = ["cupy", "mpi4py", "torch", "jax", "matplotlib", "asyncio", "subprocess"]
    later += ["distopt.lab", "distopt.trainer"]
    script = f"import sys, distopt; print([name for name in {later} if name in sys.modules]); distopt.lab.advise"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
