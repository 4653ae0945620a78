"""Local steps of real processes, of which one goes wrong, or ends with an exchange in flight."""

import re

import pytest

from launch import distopt_run

pytestmark = pytest.mark.faults

SCRIPT = """
import sys, time
import numpy as np
import distopt

world, what = distopt.world(), sys.argv[1]
p = distopt.Parameter("w", np.zeros(300_000, np.float32))
opt = distopt.LocalSteps(distopt.optim.SGD(0.1), world, every=4, delay=2 * (what == "in flight"))
for step in range(8):
    g = np.ones(300_000, np.float32)
    if world.rank == 1 and step == 5 and what == "nan":
        g[3] = np.nan
    if world.rank == 1 and step == 5 and what == "raise":
        raise ZeroDivisionError("boom")
    if world.rank == 1 and step == 5 and what == "leave":
        sys.exit()
    if world.rank == 1 and step == 7 and what == "in flight":
        time.sleep(0.5)
    opt([(p, g)])
print(f"rank {world.rank} is done")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_ranks_end_with_an_exchange_in_flight(script):
    for _ in range(3):  # the first one that ends must not leave the others' exchange
        code, output = distopt_run(2, script, "in flight")
        assert code == 0, output
        assert len(re.findall("rank . is done", output)) == 2


FAULTS = {
    "nan": "FloatingPointError: gradients of step 6 are not finite: rank 1: w (1 of 300000 entries)",
    "raise": "ZeroDivisionError: boom",
    "leave": "PeerLeft: rank 1 left after exchange 1, before exchange 2",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_goes_wrong_in_a_local_step_ends_the_job(fault, script):
    code, output = distopt_run(3, script, fault)
    assert code != 0
    assert FAULTS[fault] in output, output
    assert "rank 0 is done" not in output
