"""A rank that ends early: how the others end, and what ``distopt run`` reports: real processes, either MPI brand."""

import re
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from distopt.run.exit_watch import Fault
from distopt.run.supervisor import Supervisor
from launch import distopt_run, find_launcher, finish
from tiers import any_brand

pytestmark = pytest.mark.faults

SCRIPT = """
import os, signal, sys, threading, time
import numpy as np, distopt

what, world = sys.argv[1], distopt.world()
w = distopt.Parameter("w", np.zeros(1000, "f4"))
opt = distopt.DistOpt(distopt.optim.SGD(0.1), world)
started = int(os.environ["DISTOPT_RESTART"])


def end():
    match what:
        case "leave": os._exit(0)
        case "leave 5": os._exit(5)
        case "kill": os.kill(os.getpid(), signal.SIGKILL)
        case "crash": os.kill(os.getpid(), signal.SIGSEGV)
        case "raise": raise KeyError("lost")
        case "busy launcher":
            launcher = os.getppid()
            os.system(f"(kill -STOP {launcher}; sleep 1; kill -CONT {launcher}) > /dev/null 2>&1 &")
            time.sleep(0.3)
            raise KeyError("lost")
        case "thread": threading.Thread(target=lambda: {}["lost"]).start()
        case "exit 3": sys.exit(3)
        case "exit 0": sys.exit(0)
        case "exit text": sys.exit("enough")
        case "once" if started == 0: os._exit(1)
        case "always": raise KeyError("lost")


def grads(step):
    yield w, np.ones(1000, "f4")
    if what == "in backward" and step == 8 and world.rank == 1:
        raise KeyError("lost")


for step in range(1, 1000 if what == "thread" else 21):
    opt(grads(step))
    if step == 8 and world.rank == 1:
        time.sleep(0.2)  # the others come to their next vote; who is ended before cannot be told from who ended
        end()
print(f"done, started {started} times before")
"""


@pytest.fixture
def run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(what, *options, ranks=3):
        started = time.monotonic()
        code, output = distopt_run(ranks, *options, script, what, timeout=30)
        assert time.monotonic() - started < 25, output
        return code, output

    return run


@pytest.mark.parametrize(
    ("what", "expected", "end"),
    [
        ("leave", 1, "ended by os._exit(0)"),
        ("kill", 137, "was killed by SIGKILL"),
        ("crash", 139, "crashed"),
        *any_brand(("leave 5", 5, "ended by os._exit(5)")),
    ],
)
def test_a_rank_that_ends_without_an_error_is_named_by_distopt_run(run, what, expected, end):
    code, output = run(what)
    assert code == expected, output
    end = f"({re.escape(end)}|ended without a word)" if what == "kill" else re.escape(end)
    assert re.search(f"distopt run: rank 1 {end} after step 8", output), output
    assert "done" not in output
    assert ("in end\n" in output) == (what == "crash"), output  # its traceback


def test_a_rank_that_ends_without_an_error_is_named_under_a_bare_launcher(tmp_path):
    """Both brands' launchers end the other ranks; MPICH's alone would print nothing, and often succeed."""
    launcher, script = find_launcher(), tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [*launcher.command(3), sys.executable, str(script), "leave"]
    code, output = finish(command, 30, env=launcher.environment(3) | {"DISTOPT_RESTART": "0"})
    assert code != 0, output
    assert "rank 1: left by os._exit(0) after step 8" in output
    assert "done" not in output


@pytest.mark.any_brand
def test_an_early_end_of_a_single_rank_is_reported_with_its_exit_code(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(
        "import os, sys, distopt; distopt.world(); os._exit(5) if sys.argv[1] == 'leave' else sys.exit(3)"
    )
    code, output = distopt_run(1, script, "leave", timeout=30)
    assert code == 5, output
    assert "rank 0 ended by os._exit(5) after the start" in output
    code, output = distopt_run(1, script, "exit", timeout=30)
    assert code == 3, output
    assert "without a word" not in output


@pytest.mark.parametrize("ranks", [3, *any_brand(1)])
def test_a_job_that_all_ranks_leave_by_os_exit_0_succeeds(ranks, tmp_path):
    """The script meant it; one rank alone that leaves so is a fault."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time, distopt\nworld = distopt.world()\nworld.barrier()\ntime.sleep(world.rank / 4)\nos._exit(0)"
    )
    code, output = distopt_run(ranks, script, timeout=60)
    assert code == 0, output
    assert "distopt run:" not in output


@pytest.mark.parametrize("what", ["raise", "busy launcher", *any_brand("thread", "in backward")])
def test_an_exception_ends_all_with_one_cause(run, what):
    code, output = run(what)
    assert code == 1, output
    assert "KeyError: 'lost'" in output
    assert len({line.partition("]")[0] for line in output.splitlines() if "Traceback (most" in line}) == 1, output
    assert "without a word" not in output


@pytest.mark.parametrize(("what", "expected"), [("exit 3", 3), ("exit 0", 1), *any_brand(("exit text", 1))])
def test_a_rank_that_leaves_early_is_named(run, what, expected):
    code, output = run(what)
    assert code == expected, output
    assert "rank 1 left after step 8, before step 9" in output or code == 3
    assert "without a word" not in output
    assert "done" not in output


def test_a_job_that_failed_is_started_again(run):
    code, output = run("once", "--restarts", 2)
    assert code == 0, output
    assert "restart 1 of 2" in output
    assert "restart 2" not in output
    assert output.count("done, started 1 times before") == 3


@pytest.mark.any_brand
def test_a_job_is_restarted_no_more_often_than_restarts(run):
    code, output = run("always", "--restarts", 2, ranks=2)
    assert code == 1, output
    assert output.count("KeyError: 'lost'") == 3
    assert "exit code 1; restart 2 of 2" in output


@pytest.mark.any_brand
def test_a_job_that_succeeded_or_ran_out_of_time_is_not_restarted(run, tmp_path):
    code, output = run("nothing", "--restarts", 2)
    assert (code, output.count("done, started 0")) == (0, 3), output
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text("import time, distopt; distopt.world(); time.sleep(60)")
    code, output = distopt_run(2, "--timeout", 2, "--restarts", 2, sleeper, timeout=30)
    assert code == 124, output
    assert "restart" not in output


def test_a_launcher_that_crashes_is_not_blamed_for_a_ranks_exception(tmp_path, capfd):
    """Open MPI's has crashed at an abort: the exit code is that of the exception."""

    def code(fault, status):
        started = SimpleNamespace(marks=list, processes=[SimpleNamespace(returncode=status)])
        supervisor = Supervisor(started, size=2, elastic=False)
        supervisor._fault = fault
        return supervisor._code_of_all()

    assert code(Fault("", 1), -signal.SIGSEGV) == 1
    assert capfd.readouterr().err == ""
    fault = Fault("rank 0 ended without a word", 0)  # and the kernel does not tell how
    assert code(fault, -signal.SIGSEGV) == 128 + signal.SIGSEGV
    assert code(fault, signal.SIGKILL) == 128 + signal.SIGKILL  # as MPICH's launcher has it
    assert code(fault, 0) == 1
    assert "distopt run: rank 0 ended without a word" in capfd.readouterr().err
