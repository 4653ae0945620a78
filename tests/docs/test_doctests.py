"""Run the examples of docstrings, and check that what a page of the API shows has an example."""

import doctest
import importlib
import inspect

import pytest
from layers import PACKAGE, module_name

from distopt import DistOpt

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
LONG = ("distopt.lab", "distopt.lab.advice", "distopt.lab.break_even")  # they search for break-evens


def modules():
    """Those with an example."""
    for file in sorted(PACKAGE.rglob("*.py")):
        name, text = module_name(file), file.read_text()
        if ">>> " in text:
            torch = [pytest.mark.torch] if "import torch" in text or "import jax" in text else []
            yield pytest.param(name, marks=[pytest.mark.thorough] if name in LONG else torch)


def exported():
    """(package, name) of each class and function, but for constants and type aliases."""
    for package in EXPORTING:
        module = importlib.import_module(package)
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                yield package, name


@pytest.mark.parametrize("name", list(modules()))
def test_examples_of_docstrings_pass(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example may write a file
    if name.startswith("distopt.jax"):
        pytest.importorskip("jax", reason="jax is missing: pip install jax")
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
