"""Logical ranks of real processes that are killed in the middle of a step: what is learned stays the same."""

import importlib.util
import os
import re
import signal
import subprocess
import sys

import forks
import logical_job
import pytest

from distopt.resilience import job as marks
from tiers import every

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is missing: pip install torch"),
]


SYNCHRONIZED = ["torch, synchronized", "torch, DistOpt"]


@pytest.mark.parametrize("seed", every(9, range(9)))
@pytest.mark.parametrize("mode", every(3, [*logical_job.MODES, *logical_job.OTHERS], first=1))
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


@pytest.mark.parametrize("mode", every(3, [*logical_job.MODES, "local steps", *SYNCHRONIZED], first=2))
def test_three_of_four_are_killed_and_two_come_back(tmp_path, mode):
    script = tmp_path / "script.py"
    script.write_text(GROWS.format(path=[os.path.dirname(logical_job.__file__)], mode=mode))
    options = ["--logical", logical_job.V, "--elastic", "--over", "torch", "--restarts", 2]
    code, output = forks.distopt_run(4, *options, script, timeout=100)
    assert code == 0, output
    check_learned(output, mode, 3)
    assert output.count("; the others adopt its logical ranks; ") == 3, output


RESIZED = """
import sys, time
sys.path[:0] = {path!r}
import distopt, logical_job
training = logical_job.made(distopt.world(), {mode!r})
opt, world = training.opt, training.opt.communicator
training.rejoin()

def step_until(size):
    while world.size != size:
        while world.size < size and not world.joiner_waits():
            time.sleep(0.01)
        training.step()

for at, size in {sizes!r}:
    while opt.step_counter < at:
        training.step()
    if opt.step_counter == at:
        opt.resize(size) if {asks!r} else world.rank or print("wanted", size, flush=True)
        step_until(size)
while opt.step_counter < logical_job.STEPS:
    training.step()
learned, kept = training.digests()
print("learned", learned, world.size, *(f"{{rank}}:{{of}}" for rank, of in kept.items()), flush=True)
"""


def check_learned(output, mode, size):
    """Have so many processes learned what one does?"""
    lines = [line.split(" learned ")[1].split() for line in output.splitlines() if " learned " in line]
    learned, kept = logical_job.alone(mode)
    assert [line[:2] for line in lines] == [[learned, str(size)]] * size, output
    assert dict(pair.split(":") for line in lines for pair in line[2:]) == kept


@pytest.mark.parametrize("mode", ["packed top-K in two phases", "dgc", "local steps", "torch, synchronized"])
def test_a_script_changes_the_number_of_processes(tmp_path, mode):
    script, path = tmp_path / "script.py", [os.path.dirname(logical_job.__file__)]
    script.write_text(RESIZED.format(path=path, mode=mode, sizes=[(2, 2), (4, 4), (8, 3)], asks=True))
    options = ["--logical", logical_job.V, "--elastic", "--over", "torch"]
    code, output = forks.distopt_run(4, *options, script, timeout=100)
    assert code == 0, output
    check_learned(output, mode, 3)
    assert output.count("is started, as the ranks want to be more") == 2, output
    assert len(re.findall(r"rank \d has ended its script after ", output)) <= 3, output


def test_signals_to_the_launcher_change_the_number_of_processes(tmp_path):
    mode, script, path = "int8", tmp_path / "script.py", [os.path.dirname(logical_job.__file__)]
    script.write_text(RESIZED.format(path=path, mode=mode, sizes=[(2, 3), (6, 2)], asks=False))
    options = ["-n", "2", "--logical", str(logical_job.V), "--elastic", "--over", "torch", "--restarts", "1"]
    command = [sys.executable, "-m", "distopt", "run", *options, str(script)]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        for line in job.stdout:
            lines.append(line)
            if " wanted " in line:
                job.send_signal(signal.SIGUSR1 if line.split()[-1] == "3" else signal.SIGUSR2)
    output = "".join(lines)
    assert job.returncode == 0, output
    check_learned(output, mode, 2)
    assert "rank 2 is started, as SIGUSR1 asks for one more" in output, output
    assert re.search("rank 2 was ended .*, as SIGUSR2 asks for one less; the others adopt its", output), output
    assert "in the place of" not in output, output


@pytest.mark.parametrize("mode", every(5, [*logical_job.MODES, "local steps", *SYNCHRONIZED], first=2))
def test_a_random_history_of_kills_joins_and_resizes(tmp_path, mode):
    _, wrong, happened = logical_job.history(mode, 102, tmp_path)
    assert not wrong, wrong
    assert happened["resizes"], happened


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
    _, output = forks.distopt_run(2, "--elastic", "--over", "torch", script, timeout=60)
    (place,) = {line.split(" memory ")[1].split()[0] for line in output.splitlines() if " memory " in line}
    assert place.startswith(f"{marks.MEMORY}/distopt-")
    assert not os.path.exists(place)
