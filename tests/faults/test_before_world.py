"""Ranks that end, stop or sleep before they have met the others in ``distopt.world()``: real processes."""

import re
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from launch import distopt_run, find_launcher, finish, needs_mpi
from tiers import any_brand

pytestmark = [needs_mpi, pytest.mark.mpi, pytest.mark.faults]

SCRIPT = """
import os, signal, sys, time

what, rank = sys.argv[1], os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
if "early" in sys.argv:
    import distopt
if rank == "1":
    match what:
        case "raise": open("/no/such/shard-1.npz")
        case "import": import no_such_module
        case "exit 0": sys.exit(0)
        case "exit 3": sys.exit(3)
        case "exit text": sys.exit("enough")
        case "os._exit": os._exit(0)
        case "kill": time.sleep(0.5), os.kill(os.getpid(), signal.SIGKILL)
        case "crash": time.sleep(0.5), os.kill(os.getpid(), signal.SIGSEGV)
        case "stop": os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep": time.sleep(600)
if what != "nobody joins":
    import distopt
    distopt.world()
print("done")
"""
BEFORE = "before distopt.world()"


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return file


@pytest.mark.parametrize(
    ("what", "expected", "told"),
    [
        ("raise", 1, "FileNotFoundError: .* '/no/such/shard-1.npz'"),
        ("exit 0", 1, f"distopt run: rank 1 ended {re.escape(BEFORE)}, where rank"),
        ("exit 3", 3, f"distopt run: rank 1 ended by exit code 3 {re.escape(BEFORE)}"),
        ("os._exit", 1, f"distopt run: rank 1 ended by {re.escape('os._exit(0)')} {re.escape(BEFORE)}"),
        ("kill", 137, f"distopt run: rank 1 (was killed by SIGKILL|ended without a word) {re.escape(BEFORE)}"),
        ("crash", 139, f"distopt run: rank 1 crashed {re.escape(BEFORE)}"),
        *any_brand(
            ("import", 1, "ModuleNotFoundError: No module named 'no_such_module'"),
            ("exit text", 1, f"distopt run: rank 1 ended by exit code 1 {re.escape(BEFORE)}"),
        ),
    ],
)
def test_distopt_run_ends_the_job_and_names_the_rank(script, what, expected, told):
    code, output = distopt_run(3, script, what, timeout=60)
    assert code == expected, output
    assert re.search(told, output), output
    assert "rank.py" not in output, "the traceback is the script's"
    assert "done" not in output


@pytest.mark.parametrize(("what", "state"), [("stop", "stopped"), ("sleep", "it runs")])
def test_a_rank_that_waits_for_mpis_start_names_the_missing_rank_and_its_own_line(script, what, state, tmp_path):
    environment = {"DISTOPT_TIMEOUT": "5", "DISTOPT_FLIGHT": str(tmp_path)}
    code, output = distopt_run(2, script, what, timeout=60, env=environment)
    assert code == 75, output
    at = next(k for k, line in enumerate(SCRIPT.splitlines(), 1) if "distopt.world()" in line)
    waits = f"rank 0 waits since 5.[0-9] s for MPI's start, to which all ranks must come; at script.py:{at} in <module>"
    assert re.search(waits, output), output
    assert f"  rank 1: has not come to it ({state})" in output
    assert "the limit is 5 s (DISTOPT_TIMEOUT)" in output


def test_the_first_meeting_after_mpis_start_has_a_time_limit(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import time, distopt\nfrom mpi4py import MPI\nif MPI.COMM_WORLD.rank: time.sleep(600)\ndistopt.world()\n"
    )
    environment = {"DISTOPT_TIMEOUT": "5", "DISTOPT_FLIGHT": str(tmp_path)}
    code, output = distopt_run(2, script, timeout=60, env=environment)
    assert code == 75, output
    assert re.search("rank 0 waits since 5.* s for the first meeting of a communicator's ranks; at script.py:4", output)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("raise", "rank 1: Traceback"),
        ("exit 0", "ended before distopt.world|process rank 1"),
        ("exit 3", "ended before distopt.world|process rank 1|1,1"),
        ("stop", "rank 0 waits since 5.* for MPI's start"),
        *any_brand(("import", "rank 1: Traceback")),
    ],
)
def test_a_rank_that_ends_before_world_ends_the_job_under_a_bare_launcher(script, what, told, tmp_path):
    """From ``import distopt`` on."""
    launcher = find_launcher()
    command = [*launcher.command(2), sys.executable, str(script), what, "early"]
    environment = launcher.environment(2) | {"DISTOPT_TIMEOUT": "5", "DISTOPT_FLIGHT": str(tmp_path)}
    code, output = finish(command, 60, env=environment)
    assert code != 0, output
    assert re.search(told, output), output
    assert "done" not in output
    assert "left by os._exit" not in output, output


@pytest.mark.parametrize("early", [["early"], *any_brand([])])
def test_a_job_whose_ranks_all_end_before_world_succeeds(script, early):
    launcher = find_launcher()
    command = [*launcher.command(2), sys.executable, str(script), "nobody joins", *early]
    code, output = finish(command, 60, env=launcher.environment(2))
    assert (code, output.count("done")) == (0, 2), output
    code, output = distopt_run(2, script, "nobody joins", *early, timeout=60)
    assert (code, output.count("done")) == (0, 2), output


def test_a_process_that_a_rank_starts_is_no_rank(tmp_path):
    """It may end as it likes, and leaves no marks; nor does a launcher that it starts."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, sys, distopt\n"
        "child = 'import os, sys, distopt; assert \"DISTOPT_JOB\" not in os.environ; sys.exit(5)'\n"
        "assert subprocess.run([sys.executable, '-c', child]).returncode == 5\n"
        "child = 'import distopt; 1 / 0'\n"
        "assert subprocess.run([sys.executable, '-c', child], stderr=subprocess.DEVNULL).returncode == 1\n"
        "distopt.world().barrier()\n"
        "print('done')\n"
    )
    code, output = distopt_run(2, script, timeout=60)
    assert (code, output.count("done")) == (0, 2), output
    launcher = find_launcher()
    command = [*launcher.command(2), sys.executable, str(script)]
    code, output = finish(command, 60, env=launcher.environment(2))
    assert (code, output.count("done")) == (0, 2), output


@pytest.mark.any_brand
def test_distopt_run_imports_nothing_from_the_current_folder(tmp_path):
    (tmp_path / "mpi4py.py").write_text("print('not this one')")
    (tmp_path / "job.py").write_text("print('nor this one')")
    elsewhere = tmp_path / "scripts"
    elsewhere.mkdir()
    (elsewhere / "helper.py").write_text("answer = 42")
    (elsewhere / "script.py").write_text("import distopt, helper; print(distopt.world().size, helper.answer)")
    command = [str(Path(sysconfig.get_path("scripts")) / "distopt"), "run", "-n", "2", str(elsewhere / "script.py")]
    code, output = finish(command, 60, cwd=tmp_path, env={"PYTHONSAFEPATH": None})
    assert code == 0, output
    assert output.count("2 42") == 2
    assert "this one" not in output


@pytest.mark.any_brand
def test_run_starts_a_module_and_passes_arguments_that_look_like_flags(tmp_path):
    (tmp_path / "tool.py").write_text("import sys; print(__name__, sys.argv[1:])")
    code, output = distopt_run(2, "-m", "tool", "-x", timeout=60, cwd=tmp_path, env={"PYTHONSAFEPATH": None})
    assert (code, output.count("__main__ ['-x']")) == (0, 2), output
    code, output = distopt_run(2, "--", tmp_path / "tool.py", "-n", "--", timeout=60)
    assert (code, output.count("__main__ ['-n', '--']")) == (0, 2), output


TEXT = "import sys, distopt; print(f'{__name__} {sys.argv[1:]} {distopt.world().size}\\n', end='')"


def test_run_starts_a_text_of_its_command_line_or_standard_input():
    code, output = distopt_run(2, "-c", TEXT, "-x", "a b", timeout=60)
    assert (code, output.count("__main__ ['-x', 'a b'] 2")) == (0, 2), output
    command = [sys.executable, "-m", "distopt", "run", "-n", "2", "-", "-x"]
    done = subprocess.run(command, input=TEXT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.count("__main__ ['-x'] 2")) == (0, 2), done
    code, output = distopt_run(2, "-c", "1 / 0", timeout=60)
    assert code == 1, output
    assert "ZeroDivisionError" in output
    assert "rank.py" not in output, "the traceback is the script's"


STUCK_LAUNCHER = """
import ctypes, os, sys, time

name, told = sys.argv[1].encode(), sys.argv[2]
ctypes.CDLL(None).prctl(15, name)  # PR_SET_NAME
if os.fork():
    os.wait()
    print("its rank has ended", flush=True)
    time.sleep(60 if name == b"prterun" else 1)
    sys.exit(open(told).read())

import signal
from distopt.comm import mpi_start

def refuse(*_):
    raise PermissionError

def leave(code, end=os._exit):
    print(code, file=open(told, "a"))
    end(code)

os._exit = leave
if name == b"prted":
    signal.pidfd_send_signal = refuse
mpi_start.CONNECT = mpi_start.STUCK = 0.5
mpi_start.abort(3)
"""


@pytest.mark.any_brand
@pytest.mark.skipif(sys.platform != "linux", reason="pidfds are Linux's")
@pytest.mark.parametrize(
    ("name", "code", "left"),
    [
        ("prterun", -9, ""),
        ("prted", 1, "3\n0\n\n"),  # what may not kill it ends all the same, and as no rank
        ("slurmstepd", 1, "3\n\n"),  # has time limits of its own
    ],
)
def test_a_launcher_that_hangs_after_its_ranks_have_ended_is_killed(name, code, left, tmp_path):
    found = finish([sys.executable, "-c", STUCK_LAUNCHER, name, str(tmp_path / "left")], 30)
    assert found == (code, f"its rank has ended\n{left}")


DEAF_LAUNCHER = """
import os, signal
import distopt

world = distopt.world()
if world.rank == 0:
    os.kill(os.getppid(), signal.SIGSTOP)
    raise ZeroDivisionError("boom")
while True:
    world.all_reduce([1.0])
"""


def test_a_launcher_that_does_not_hear_of_an_abort_is_killed(tmp_path):
    launcher = find_launcher()
    if launcher.brand == "MPICH":
        pytest.skip("MPICH's ranks tell a proxy, of whose end their launcher hears")
    script = tmp_path / "deaf.py"
    script.write_text(DEAF_LAUNCHER)
    code, output = finish([*launcher.command(2), sys.executable, str(script)], 30, env=launcher.environment(2))
    assert code == -9, output


LEFTOVERS = {
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    "MPICH": {"PMI_SIZE": "1", "PMI_RANK": "0", "PMI_FD": "99", "MPI_LOCALRANKID": "0"},
    "PMIx": {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-gone-1@1", "PMIX_SERVER_URI41": "prterun-gone-1@0;tcp4://1"},
}


@pytest.mark.parametrize("of", LEFTOVERS)
@pytest.mark.parametrize("bare", [False, True])
def test_ranks_are_who_their_own_launcher_says_whatever_another_one_has_left(of, bare, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import distopt\nworld = distopt.world()\nprint(f'rank {world.rank} of {world.size}\\n', end='')")
    launcher = find_launcher()
    if bare and of == launcher.brand:
        pytest.skip("its launcher sets these variables anew")
    if bare:
        command = [*launcher.command(2), sys.executable, str(script)]
        code, output = finish(command, 60, env=launcher.environment(2) | LEFTOVERS[of] | {"DISTOPT_TIMEOUT": "30"})
    else:
        code, output = distopt_run(2, script, timeout=60, env=LEFTOVERS[of] | {"DISTOPT_TIMEOUT": "30"})
    assert code == 0, output
    assert "rank 0 of 2" in output
    assert "rank 1 of 2" in output


def test_a_rank_whose_python_fails_at_its_start_is_named(tmp_path):
    """It leaves no mark, and MPICH's launcher lets the others wait for it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif '1' in (os.environ.get('PMI_RANK'), os.environ.get('OMPI_COMM_WORLD_RANK')): os._exit(3)\n"
    )
    (tmp_path / "script.py").write_text("import distopt; distopt.world()")
    environment = {"PYTHONPATH": str(tmp_path), "DISTOPT_TIMEOUT": "5", "DISTOPT_FLIGHT": str(tmp_path)}
    code, output = distopt_run(2, tmp_path / "script.py", timeout=60, env=environment)
    if "prterun" in output or "PMIX ERROR" in output:
        # Where rank 0 is still connecting to it, Open MPI's prterun ends with 3, with 137 of rank 0, which it kills, or
        # with the code of a crash of its own; only the first names the rank.
        assert code in (3, *(128 + end for end in (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV))), output
        return
    assert code == 75, output
    assert "  rank 1: has not come to it (it has not begun its script)" in output


def test_ranks_that_serve_a_pool_are_not_waited_for(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import distopt; distopt.world()")
    launcher = find_launcher()
    command = [*launcher.command(2), sys.executable, "-m", "mpi4py.futures", str(script)]
    code, output = finish(command, 60, env=launcher.environment(2))
    assert code != 0, output
    assert "python -m mpi4py.futures runs the script on rank 0 alone" in output
