"""What ``distopt.torch`` makes is gone when nobody refers to the model any more, without ``close()``."""

import gc
import os
import sysconfig
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")

import distopt.torch as dt  # noqa: E402
from distopt import DistOpt, run_ranks  # noqa: E402
from distopt.compress import DeepGradientCompression, ErrorFeedback, TopK  # noqa: E402
from launch import finish  # noqa: E402

pytestmark = pytest.mark.torch


def used(comm, **options):
    """A weak reference to what has synchronized a model that is gone."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sync = dt.synchronize(model, optimizer=optimizer, group=comm, **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((1, 3), 1.0 + comm.rank)).sum().backward()
        optimizer.step()
    return weakref.ref(sync)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True},
        {"compressor": ErrorFeedback(TopK(0.5))},
        {"compressor": DeepGradientCompression(TopK(0.5))},
    ],
)
def test_synchronizers_go_with_their_models(options):
    found = run_ranks(2, lambda comm: used(comm, **options))
    gc.collect()
    assert [reference() for reference in found] == [None, None]


def test_a_synchronizer_stays_as_long_as_the_parameters():
    """The module that was given may be gone, and nobody may hold what was returned."""

    def main(comm):
        layer = torch.nn.Linear(2, 1)
        dt.synchronize(torch.nn.ModuleList([layer]), group=comm)
        gc.collect()
        layer(torch.full((1, 2), float(comm.rank))).sum().backward()
        return layer.weight.grad.tolist()

    assert run_ranks(2, main) == [[[0.5, 0.5]]] * 2


def test_a_layer_may_be_removed():
    """Its gradients are none from then on."""

    def main(comm):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        sync = dt.synchronize(model, ErrorFeedback(TopK(0.5)), group=comm)
        model(torch.ones(1, 2)).sum().backward()
        del model[1]
        gc.collect()
        model.zero_grad()
        model(torch.full((1, 2), float(comm.rank))).sum().backward()
        return sync.step_counter

    assert run_ranks(2, main) == [2, 2]


def test_many_trials_leave_no_descriptors():
    def trials(number):
        for _ in range(number):
            run_ranks(2, used)
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = trials(3)
    assert trials(30) <= before + 3


@pytest.mark.parametrize("overlap", [False, True])
def test_a_dist_opt_goes_when_it_is_dropped_and_keeps_its_parameters(overlap):
    def main(comm):
        model = torch.nn.Linear(3, 1)
        opt = DistOpt(torch.optim.SGD(model.parameters(), 0.1), comm, overlap=overlap)
        opt(model(torch.ones(1, 3)).sum())
        first = weakref.ref(opt)
        del opt
        gc.collect()
        x = torch.ones(2)
        other = DistOpt(communicator=comm, params=[x.requires_grad_(True)])
        del x
        gc.collect()
        return first() is None, [p.tensor.tolist() for p in other._model.parameters]

    assert run_ranks(2, main) == [(True, [[1.0, 1.0]])] * 2


TRIALS = """
import gc, os
import numpy as np
from distopt import LocalSteps, Parameter, optim, world

def trial():
    w = Parameter("w", np.zeros(100))
    opt = LocalSteps(optim.SGD(1.0), every=2, delay=1, outer=optim.SGD(1.0))
    for _ in range(3):
        opt([(w, np.full(100, 1.0 + world().rank))])

def descriptors(trials):
    for _ in range(trials):
        trial()
    gc.collect()
    return len(os.listdir("/proc/self/fd"))

first = descriptors(2)
assert descriptors(8) <= first + 4
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted where Linux lists them")
def test_trials_of_local_steps_in_flight_leave_no_descriptors(tmp_path):
    """They have a communicator of their own, which over torch is sockets and shared memory."""
    script = tmp_path / "script.py"
    script.write_text(TRIALS)
    torchrun = str(Path(sysconfig.get_path("scripts")) / "torchrun")
    command = [torchrun, "--standalone", "--nproc-per-node", "2", str(script)]
    code, output = finish(command, 120, env={"DISTOPT_TIMEOUT": "60", "OMP_NUM_THREADS": "1"})
    assert code == 0, output
