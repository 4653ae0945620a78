"""The examples with --device cuda: on cupy's arrays, which do not mix with numpy's, and doubles of GPUs."""

import importlib
import re
import sys
import threading

import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")

import cupy

import distopt
from distopt import Parameter, run_ranks
from doubles.ranks import on_gpus
from launch import PROJECT

EXAMPLES = PROJECT / "examples"
pytestmark = [pytest.mark.device, pytest.mark.usefixtures("arithmetic")]
here = threading.local()


@pytest.fixture
def said(monkeypatch, capsys):
    """What two ranks of an example print, on the host or on GPUs."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def train(name, options, device):
        script = importlib.import_module(name)
        monkeypatch.setattr(sys, "argv", [name, *options.split(), "--device", device])

        def world(asked):
            assert asked == device
            return here.comm

        def main(comm):
            here.comm = comm
            script.main()

        monkeypatch.setattr(distopt, "world", world)
        {"cuda": on_gpus, "cpu": run_ranks}[device](2, main)
        return capsys.readouterr().out

    return train


SCRIPTS = [
    ("digits", "--epochs 2"),
    ("digits", "--epochs 1 --mode topk"),
    ("digits", "--epochs 1 --mode partial"),
    ("digits", "--epochs 1 --batch 256 --model cnn"),
    ("dgc", "--max_epochs 2 --model_name mlp --learning_rate_strategy 2:0.1"),
    ("large_batch", "--num-epochs 2 --warmup-epochs 1 --macrobatch-size 128 --seeds 1"),
    ("muon", "--updates 4 --seeds 1 --network mlp"),
]


@pytest.mark.parametrize(("name", "options"), SCRIPTS, ids=[" ".join(script) for script in SCRIPTS])
def test_an_example_trains_on_gpus_as_on_the_host(name, options, said):
    """The sums of two ranks have one order, so that all that is printed is the same, but for the last digit or so."""
    cuda, cpu = said(name, options, "cuda"), said(name, options, "cpu")
    number = re.compile(r"\d+\.\d+")
    assert number.sub("x", cuda) == number.sub("x", cpu)
    assert len(number.findall(cuda)) > 1
    for one, other in zip(number.findall(cuda), number.findall(cpu), strict=True):
        assert abs(float(one) - float(other)) <= 0.011 * max(1, float(other)), (cuda, cpu)


@pytest.mark.parametrize(("name", "options"), [SCRIPTS[0], *SCRIPTS[4:]], ids=["digits", "dgc", "large_batch", "muon"])
def test_an_example_whose_parameters_stay_on_the_host_fails(name, options, said, monkeypatch):
    """So the test above sees an array that was forgotten there."""
    monkeypatch.setattr(distopt, "Parameter", lambda name, data: Parameter(name, cupy.asnumpy(data)))
    with pytest.raises(TypeError, match="cupy does not mix with it"):
        said(name, options, "cuda")
