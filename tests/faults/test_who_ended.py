"""The rank that ``distopt run`` names, and what is left after a job: real processes, either MPI brand."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from distopt.resilience import job
from launch import distopt_run, find_launcher, finish, needs_mpi
from tiers import any_brand

pytestmark = [needs_mpi, pytest.mark.mpi, pytest.mark.faults]

HEAD = """
import os, signal, subprocess, sys, threading, time
import numpy as np, distopt
from distopt.comm import mpi_start
from distopt.resilience.timeouts import Limits
if "USUAL" in os.environ: mpi_start.limits = lambda: Limits(usual=float(os.environ["USUAL"]), first=60.0)
world = distopt.world()
opt, p = distopt.DistOpt(), distopt.Parameter("p", np.ones(4))


def step():
    opt([(p, np.ones(4))])


"""


@pytest.fixture
def run(tmp_path):
    def run(text, *options, ranks=2, timeout=60, **environment):
        script = tmp_path / "script.py"
        script.write_text(HEAD + text)
        return distopt_run(ranks, *options, script, timeout=timeout, env=environment)

    return run


def test_a_crash_in_a_forked_child_is_not_taken_for_its_ranks(run):
    code, output = run(
        "if world.rank == 0 and os.fork() == 0: os.kill(os.getpid(), signal.SIGSEGV)\n"
        "if world.rank == 0: os.wait()\n"
        "for k in range(3): step()\n"
        "if world.rank == 1: time.sleep(0.5), os.kill(os.getpid(), signal.SIGKILL)\n"
        "step()\n"
    )
    assert code == 137, output
    written = re.sub(r"\[0\] ?", "", output)  # the launcher may prefix every piece that faulthandler writes
    assert "Fatal Python error: Segmentation fault" in written, "the child's, on standard error"
    assert re.search("distopt run: rank 1 (was killed by SIGKILL|ended without a word) after step 3", output), output


def test_a_rank_killed_while_it_waits_for_others_is_named(run):
    """It has voted more often than the one it waits for, and is the culprit all the same."""
    code, output = run(
        "if world.rank == 1: threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()\n"
        "for k in range(20):\n"
        "    if world.rank == 0: time.sleep(0.5)\n"
        "    step()\n"
    )
    assert code == 137, output
    assert re.search("distopt run: rank 1 (was killed by SIGKILL|ended without a word) after", output), output


def test_a_rank_that_is_killed_after_another_one_has_ended(run):
    code, output = run(
        "for k in range(5): step()\nif world.rank == 0: time.sleep(1), os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert code == 137, output
    assert re.search("distopt run: rank 0 (was killed by SIGKILL|ended without a word) after step 5", output), output


@pytest.mark.parametrize("number", [signal.SIGTERM, *any_brand(signal.SIGABRT)])
def test_exit_codes_are_those_of_a_shell(run, number):
    code, output = run(f"step()\nif world.rank: time.sleep(0.5), os.kill(os.getpid(), {int(number)})\nstep()\n")
    exact = "was killed by" in output  # the kernel has told
    assert code == 128 + number if exact else code > 128, output
    assert exact <= (f"rank 1 was killed by {number.name} after step 1" in output)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, *any_brand(signal.SIGQUIT, signal.SIGUSR1)])
def test_ranks_end_with_their_launcher(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(HEAD + "print('pid', os.getpid(), flush=True)\ntime.sleep(120)\n")
    command = [sys.executable, "-m", "distopt", "run", "-n", "2", str(script)]
    ignored = signal.SIGHUP, signal.SIGQUIT  # by what nohup starts, and by what a shell starts with &
    before = [signal.signal(n, signal.SIG_DFL) for n in ignored]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for n, handler in zip(ignored, before, strict=True):
        signal.signal(n, handler)
    with running.stdout:
        lines = [running.stdout.readline() for _ in range(2)]
        pids = [int(pid) for pid in re.findall(r"pid (\d+)", "".join(lines))]
        assert len(pids) == 2, lines
        running.send_signal(number)
        running.stdout.read()
    assert running.wait(20) != 0
    deadline = time.monotonic() + 10
    while any(job.state(pid) not in "ZX" for pid in pids):
        assert time.monotonic() < deadline, "ranks have outlived their launcher"
        time.sleep(0.1)


def test_ended_ranks_name_the_one_that_does_not_answer_and_wait_on(run, tmp_path):
    """They wait as long as it needs; but nobody waits without knowing for whom."""
    code, output = run(
        "for k in range(3): step()\n"
        "if world.rank == 1:\n"
        "    subprocess.Popen(['sh', '-c', f'sleep 5; kill -CONT {os.getpid()}'])\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n",
        USUAL="1.5",
        DISTOPT_FLIGHT=str(tmp_path),
    )
    assert code == 0, output
    assert re.search(r"distopt: rank 0 waits since \d\.\d s for the end of the others after the vote on step 3", output)
    assert "  rank 1: no answer (stopped, dead, or holding the interpreter lock)" in output
    assert "waits for them without a limit; who gives no answer may never come" in output


@pytest.mark.any_brand
def test_a_slow_rank_that_answers_is_not_reported(run):
    code, output = run("step()\nif world.rank == 1: time.sleep(4)\n", USUAL="1")
    assert code == 0, output
    assert "waits since" not in output


def test_a_script_that_finalizes_mpi_itself_may_go_on(run, tmp_path):
    text = "for k in range(3): step()\nfrom mpi4py import MPI\nMPI.Finalize(); time.sleep(1.5); print('saved')\n"
    launcher = find_launcher()
    under_run = run(text)
    command = [*launcher.command(2), sys.executable, str(tmp_path / "script.py")]
    for code, output in (under_run, finish(command, 60, env=launcher.environment(2))):
        assert (code, output.count("saved")) == (0, 2), output
        assert "no time limits any more" not in output


@pytest.mark.parametrize(
    ("end", "expected"), [("sys.exit(3)", 3), *any_brand(("1 / 0", 1), ("os._exit(4)", 4), ("", 0))]
)
def test_a_forked_child_is_no_rank(run, end, expected):
    """Its exit code is its own: it neither ends the job nor waits in MPI's end."""
    code, output = run(
        "step()\nchild = os.fork()\nif not child:\n    " + (end or "sys.exit()") + "\n"
        "status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\nstep()\nprint('child', status)\n"
    )
    assert (code, output.count(f"child {expected}")) == (0, 2), output
    assert "distopt run:" not in output


def test_nothing_of_a_failed_job_is_left_in_shared_memory(run):
    before = set(os.listdir("/dev/shm"))
    code, output = run(
        "step()\n"
        "print('maps', *{line.split('/')[-1] for line in open('/proc/self/maps').read().split('\\n') "
        "if '/dev/shm/mpich' in line}, flush=True)\n"
        "time.sleep(0.5)\nif world.rank: os.kill(os.getpid(), signal.SIGKILL)\nstep()\n"
    )
    assert code == 137, output
    mine = {name for line in re.findall(r"maps (.*)", output) for name in line.split()}
    assert bool(mine) == (find_launcher().brand == "MPICH"), output
    assert not mine & set(os.listdir("/dev/shm")) - before


def test_ranks_and_launcher_listen_on_the_loopback_interface_only(run):
    """Sockets that a script binds itself may listen anywhere."""
    code, output = run(
        "import socket, subprocess\n"
        "def links(pid):\n"
        "    for fd in os.listdir(f'/proc/{pid}/fd'):\n"
        "        try: yield os.readlink(f'/proc/{pid}/fd/{fd}')\n"
        "        except OSError: pass\n"
        "def parents(pid):\n"
        "    while pid > 1 and '-m\\0distopt\\0' not in open(f'/proc/{pid}/cmdline').read():\n"
        "        yield pid\n"
        "        pid = int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])\n"
        "step()\n"
        "job = {link for pid in parents(os.getpid()) for link in links(pid)}\n"
        "for line in open('/proc/net/tcp').readlines()[1:] + open('/proc/net/tcp6').readlines()[1:]:\n"
        "    words = line.split()\n"
        "    if words[3] == '0A' and f'socket:[{words[9]}]' in job: print('listens', words[1])\n"
        "print('script', socket.create_server(('', 0)).getsockname()[0], os.environ.get('LD_PRELOAD'))\n"
        "world.barrier()\n"
    )
    assert code == 0, output
    found = re.findall("listens (.*)", output)
    assert found, output
    assert all(address.startswith(("0100007F", "0" * 24 + "01000000")) for address in found), output
    assert "script 0.0.0.0 None" in output


HOOKED = """
def other(kind, error, trace):
    print("the other hook has", kind.__name__, flush=True)
    old(kind, error, trace)
old, sys.excepthook = sys.excepthook, other
"""


@pytest.mark.parametrize("when", ["before", *any_brand("before import", "after")])
def test_a_hook_for_exceptions_of_another_library_is_called_too(tmp_path, when):
    script = tmp_path / "script.py"
    parts = ["import sys", "import distopt", "world = distopt.world()", "if world.rank: 1 / 0\nworld.barrier()"]
    parts.insert({"before import": 1, "before": 2, "after": 3}[when], HOOKED)
    script.write_text("\n".join(parts))
    code, output = distopt_run(2, script, timeout=60)
    assert code == 1, output
    assert output.count("the other hook has ZeroDivisionError") == 1
    assert "rank 1: Traceback" in output
    launcher = find_launcher()
    code, output = finish([*launcher.command(2), sys.executable, str(script)], 60, env=launcher.environment(2))
    assert code != 0, output
    assert output.count("the other hook has ZeroDivisionError") == 1
    assert "rank 1: Traceback" in output


@pytest.mark.any_brand
def test_a_traceback_is_seen_where_standard_error_was_replaced(run):
    """As torch's own hook does while it calls the one before it."""
    code, output = run(
        "import contextlib, io\nold = sys.excepthook\n"
        "def hook(*error):\n    with contextlib.redirect_stderr(io.StringIO()): old(*error)\n"
        "sys.excepthook = hook\nif world.rank: {}['lost']\nworld.barrier()\n"
    )
    assert code == 1, output
    assert "KeyError: 'lost'" in output


@pytest.mark.torch
def test_a_traceback_is_seen_beside_torch_distributed(run):
    pytest.importorskip("torch", reason="torch is missing: pip install torch")
    code, output = run(
        "os.environ |= dict(MASTER_ADDR='127.0.0.1', MASTER_PORT='0', GLOO_SOCKET_IFNAME='lo')\n"
        "import tempfile, torch.distributed as dist\n"
        "file = world.control.gather(tempfile.mktemp())[0]\n"
        "dist.init_process_group('gloo', init_method=f'file://{file}', rank=world.rank, world_size=2)\n"
        "if world.rank: {}['lost']\nworld.barrier()\n",
        timeout=120,
    )
    assert code == 1, output
    assert "KeyError: 'lost'" in output


@pytest.mark.any_brand
def test_python_m_distopt_prints_its_version():
    code, output = finish([sys.executable, "-m", "distopt", "--version"], 60)
    assert (code, output.split()[0]) == (0, "distopt")
