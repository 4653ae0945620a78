"""Logical ranks of real processes that are killed in the middle of a step: what is learned stays the same."""

import importlib.util
import os
import signal

import logical_job
import pytest

from distopt.resilience import job as marks
from launch import distopt_run
from tiers import every

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is missing: pip install torch"),
]


@pytest.mark.parametrize("seed", every(9, range(9)))
@pytest.mark.parametrize("mode", [*logical_job.MODES, *logical_job.TORCH])
def test_four_of_five_processes_are_killed(tmp_path, mode, seed):
    killed, wrong = logical_job.job(mode, seed, tmp_path)
    assert len(killed) == 4
    assert not wrong, wrong


GROWS = """
import sys, time
sys.path[:0] = {path!r}
import distopt, logical_job, os, signal
training = logical_job.made(distopt.world(), {mode!r})
opt, member = training.opt, int(os.environ["DISTOPT_MEMBER"])
training.rejoin()
while opt.step_counter < logical_job.STEPS:
    k = opt.step_counter
    if (k, member) in ((2, 1), (4, 0), (6, 2)):
        os.kill(os.getpid(), signal.SIGKILL)
    while k >= 8 and opt.communicator.size < 3 and not opt.communicator.joiner_waits():
        time.sleep(0.01)
    training.step()
learned, kept = training.digests()
print("learned", learned, opt.communicator.size, *(f"{{rank}}:{{of}}" for rank, of in kept.items()), flush=True)
"""


@pytest.mark.parametrize("mode", ["packed top-K in two phases", "dgc", "three batches", *logical_job.TORCH])
def test_three_of_four_are_killed_and_two_come_back(tmp_path, mode):
    script = tmp_path / "script.py"
    script.write_text(GROWS.format(path=[os.path.dirname(logical_job.__file__)], mode=mode))
    options = ["--logical", logical_job.V, "--elastic", "--over", "torch", "--restarts", 2]
    code, output = distopt_run(4, *options, script, timeout=100)
    assert code == 0, output
    lines = [line.split(" learned ")[1].split() for line in output.splitlines() if " learned " in line]
    learned, kept = logical_job.alone(mode)
    assert [line[:2] for line in lines] == [[learned, "3"]] * 3, output
    assert output.count("; the others adopt its logical ranks; ") == 3, output
    assert dict(pair.split(":") for line in lines for pair in line[2:]) == kept


def test_what_a_job_has_kept_in_memory_is_removed_with_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import distopt, os, sys\n"
        f"sys.path[:0] = {[os.path.dirname(logical_job.__file__)]!r}\n"
        "import logical_job\n"
        "training = logical_job.Training(distopt.world('cpu', logical=12), 'int8')\n"
        "training.step()\n"
        "from distopt.resilience import job\n"
        "print('memory', job.memory(), len(os.listdir(job.memory())), flush=True)\n"
        f"os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    )
    _, output = distopt_run(2, "--elastic", "--over", "torch", script, timeout=60)
    (place,) = {line.split(" memory ")[1].split()[0] for line in output.splitlines() if " memory " in line}
    assert place.startswith(f"{marks.MEMORY}/distopt-")
    assert not os.path.exists(place)
