"""Ranks of torch's process group, which real torchrun starts: the checks of all communicators, steps, and ends."""

import re
import sys
import textwrap

import comm_checks
import numpy as np
import pytest
from gloo_launch import run_torch

import launch
from distopt import DistOpt, Parameter, run_ranks
from distopt.compress import DeepGradientCompression, Dense, ErrorFeedback, Half, Int8, OneBit, Packed, TopK
from distopt.optim import SGD

pytestmark = pytest.mark.torch

MODES = {
    "dense": (Dense(), "auto"),
    "half": (Half(), "auto"),
    "gather": (ErrorFeedback(Packed(TopK(0.05))), "gather"),
    "two phases": (ErrorFeedback(TopK(0.05)), "two_phase"),
    "one bit": (ErrorFeedback(OneBit()), "two_phase"),
    "int8": (ErrorFeedback(Int8()), "two_phase"),
    "nodes": (ErrorFeedback(TopK(0.05)), "nodes"),
    "dgc": (DeepGradientCompression(TopK(0.05)), "two_phase"),
}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_group_communicators_pass_all_checks(size, tmp_path):
    run_torch(size, comm_checks.everything, tmp_path)


def trained(comm):
    """The parameters after some steps of each mode."""
    found = {}
    for name, (compressor, exchange) in MODES.items():
        params = [Parameter("w", np.zeros((300, 40), np.float32)), Parameter("b", np.zeros(40, np.float32))]
        opt = DistOpt(SGD(0.1), comm)
        for step in range(3):
            rng = np.random.default_rng([comm.rank, step])
            opt.step([(p, rng.standard_normal(p.data.shape, np.float32)) for p in params], compressor, True, exchange)
        found |= {f"{name} {p.name}": p.data for p in params}
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_steps_have_the_bits_of_threads(size, tmp_path):
    for one, other in zip(run_torch(size, trained, tmp_path), run_ranks(size, trained), strict=True):
        for name, x in other.items():
            np.testing.assert_array_equal(one[name], x, name)


# ----------------------------------------------------------------------------------------------------- whole scripts

HEAD = """
import os, signal, sys, time
import numpy as np, distopt
p, opt = distopt.Parameter("w", np.zeros(1000, np.float32)), distopt.DistOpt(distopt.optim.SGD(1.0))
rank = opt.global_rank

def step(g=1.0):
    opt.step([(p, np.full(1000, g, np.float32))])

for _ in range(3):
    step()
"""


@pytest.fixture
def run(tmp_path):
    """Start a script by torchrun; (exit code, output)."""

    def run(text, ranks=2, timeout=90, head=HEAD, **environment):
        script = tmp_path / "script.py"
        script.write_text(head + textwrap.dedent(text))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return launch.finish([*command, str(script)], timeout, env={"OMP_NUM_THREADS": "1"} | environment)

    return run


def test_world_says_that_torchrun_started_the_ranks(run):
    code, output = run("print(distopt.world())\nassert p.data[0] == -3")
    assert code == 0, output
    for rank in range(2):
        said = f"<ProcessGroupCommunicator, rank {rank} of 2, numpy: torch [^;]+, gloo; torchrun set RANK={rank}, WORLD"
        assert re.search(said, output), output
    assert output.count("one host, memory shared") == 2


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ("raise KeyError('broken here')", "KeyError: 'broken here'"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "PeerLeft: rank 1 has ended, before step 4"),
        ("sys.exit(0)", "PeerLeft: rank 1 left after step 3, before step 4"),
        (
            "import torch.distributed as d; d.destroy_process_group(); step()",
            "process group of torch.distributed was",
        ),
    ],
)
def test_a_rank_that_ends_is_named_and_nobody_waits(end, text, run):
    code, output = run(f"if rank == 1:\n    {end}\nstep()\nprint('went on')", ranks=3)
    assert code != 0
    assert text in output
    assert "went on" not in output


def test_a_rank_that_waits_for_too_long_says_where(run):
    code, output = run("if rank == 1: time.sleep(600)\nstep()", DISTOPT_TIMEOUT="5")
    assert code != 0
    assert "distopt: rank 0 waits since" in output
    assert "for the vote on step 4" in output


def test_ranks_that_end_together_say_nothing(run):
    code, output = run("")
    assert (code, output) == (0, "")


def test_an_error_of_one_rank_is_raised_by_all_and_training_goes_on(run):
    code, output = run(
        """
        try:
            step(np.nan if rank else 1.0)
        except FloatingPointError as error:
            print("caught", error)
        step()
        assert p.data[0] == -4
        """
    )
    assert code == 0, output
    assert output.count("caught gradients of step 4 are not finite: rank 1: w") == 2, output


def test_a_process_group_of_ones_own_is_used(run):
    head = """
import torch.distributed as dist, numpy as np, distopt
dist.init_process_group("gloo")
"""
    code, output = run("print(distopt.world().size)\ndist.destroy_process_group()", head=head)
    assert (code, output.split()) == (0, ["2", "2"]), output
