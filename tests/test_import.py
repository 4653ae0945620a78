"""What ``import distopt`` brings, and what it leaves for later."""

import subprocess
import sys

import pytest

import distopt


def test_every_public_name_is_there_and_no_other_is_listed():
    assert dir(distopt) == sorted(distopt.__all__)
    assert all(hasattr(distopt, name) for name in distopt.__all__)
    with pytest.raises(AttributeError, match="module 'distopt' has no attribute 'no_such_name'"):
        distopt.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", ["experiment", "fit", "monitor", "volume"])
def test_a_module_that_comes_later_is_the_module(name):
    assert getattr(distopt, name) is sys.modules[f"distopt.{name}"]


def test_names_that_come_later_are_those_of_their_modules():
    assert distopt.Trainer is sys.modules["distopt.trainer"].Trainer
    assert distopt.simulate is sys.modules["distopt.virtual_ranks"].simulate


@pytest.mark.thorough
def test_what_not_every_program_needs_is_not_imported_before_it_is_used():
    later = ["cupy", "mpi4py", "torch", "matplotlib", "asyncio", "subprocess"]
    later += [f"distopt.{name}" for name in ("experiment", "fit", "monitor", "volume", "trainer", "virtual_ranks")]
    script = f"import sys, distopt; print([name for name in {later} if name in sys.modules]); distopt.volume.advise"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
