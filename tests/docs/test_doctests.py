"""Run the examples of docstrings, and check that what a page of the API shows has an example."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

from distopt import DistOpt

PACKAGES = [
    f"distopt.{name}"
    for name in (
        *"buckets checkpoint comm compress device engine exchange".split(),
        *"kernels lab optim resilience trainer".split(),
    )
]
EXPORTING = [
    "distopt.lab",
    "distopt.lab.cost",
    "distopt.lab.fit",
    "distopt.lab.observe",
    "distopt.lab.tape",
    "distopt.lab.experiment",
    "distopt.comm",
    "distopt.compress",
    "distopt.optim",
    "distopt.optim.schedules",
    "distopt.trainer",
]
# An example is asked for where a name is defined; these packages export names of other ones too.
LISTED = (*PACKAGES, "distopt.formatting")


OF_TORCH = (  # which import it
    *("distopt.comm.epoch_ranks", "distopt.comm.gloo"),
    *("distopt.comm.process_group", "distopt.device.tensors", "distopt.engine.torch_model"),
    *("distopt.optim.adapters.torch_optim", "distopt.torch", "distopt.torch.exchange", "distopt.torch.synchronize"),
)


LONG = ("distopt.lab", "distopt.lab.advice", "distopt.lab.break_even")  # they search for break-evens


def modules():
    for name in PACKAGES:
        package = importlib.import_module(name)
        for module in (name, *(found.name for found in pkgutil.walk_packages(package.__path__, f"{name}."))):
            if module not in OF_TORCH:
                yield pytest.param(module, marks=pytest.mark.thorough) if module in LONG else module
    yield from (pytest.param(name, marks=pytest.mark.torch) for name in OF_TORCH)


def exported():
    """(package, name) of each class and function, but for constants and type aliases."""
    for package in EXPORTING:
        module = importlib.import_module(package)
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                home = thing.__module__
                if home.startswith(LISTED):
                    yield package, name


@pytest.mark.parametrize(
    "name", [*modules(), "distopt.checks", "distopt.dist_opt", "distopt.formatting", "distopt.local_steps"]
)
def test_examples_of_docstrings_pass(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example may write a file
    module = importlib.import_module(name)
    report = []
    runner = doctest.DocTestRunner(verbose=False)
    for test in doctest.DocTestFinder().find(module, name):
        if test.examples:
            runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize(("package", "name"), list(exported()))
def test_every_exported_name_has_an_example(package, name):
    thing = getattr(importlib.import_module(package), name)
    assert ">>> " in (inspect.getdoc(thing) or ""), f"{thing.__module__}.{name}: the docstring has no Example: section"


@pytest.mark.parametrize("name", [n for n in vars(DistOpt) if not n.startswith("_") and n not in ("capture", "run")])
def test_every_method_of_dist_opt_has_an_example(name):
    method = vars(DistOpt)[name]
    assert not inspect.isfunction(method) or ">>> " in method.__doc__, f"DistOpt.{name} has no Example: section"
