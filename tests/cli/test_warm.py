"""Processes that start as forks of one that has imported torch: they are ranks like any other."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import sys
import time

import pytest

from distopt.resilience import job
from distopt.resilience.environment import JOINS, LINE, MEMBER, WARM
from distopt.run.job_folder import job_folder
from distopt.run.processes import RANK
from distopt.run.warm import WarmProcess
from launch import distopt_run

pytestmark = pytest.mark.faults

SCRIPT = """
import json, os, socket, sys
imported = sorted({"numpy", "distopt"} & sys.modules.keys())
import numpy as np
own = socket.socket(fileno=int(os.environ[%r]))
own.send(b"here")
said = {"imported": imported, "numbers": np.random.random(3).tolist(), "argv": sys.argv, "path": sys.path[0],
        "environment": dict(os.environ), "main": __name__, "session": os.getsid(0) == os.getpid()}
print(json.dumps(said), flush=True)
print("an error", file=sys.stderr)
what = own.recv(10)
if what == b"wait":
    own.recv(10)
sys.exit(int(what))
"""


@pytest.fixture
def warm(tmp_path):
    """A process that is forked, which runs SCRIPT, when it is ready."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT % LINE)
    with job_folder() as folder:
        env = os.environ | {job.FOLDER: str(folder), "SHARED": "1"}
        made = WarmProcess([sys.executable, str(RANK), str(script), "a", "b"], env)
        assert made.fork({MEMBER: "3"}, 0) is None  # it has not imported anything yet
        deadline = time.monotonic() + 60
        while not made.is_ready and time.monotonic() < deadline:
            time.sleep(0.01)
        yield made
        made.close()


@pytest.fixture
def forked(warm):
    """Makes a fork, and returns it with the other end of its line."""
    with contextlib.ExitStack() as ends:

        def fork(member):
            own, theirs = map(ends.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            made = warm.fork({MEMBER: str(member), JOINS: "1"}, theirs.fileno())
            theirs.close()
            for pipe in (made.stdout, made.stderr):
                ends.enter_context(pipe)
            own.settimeout(30)
            assert own.recv(10) == b"here"
            return made, own

        yield fork


def test_a_fork_is_a_process_of_its_own(forked, tmp_path):
    (first, line), (second, another) = forked(3), forked(4)
    assert first.poll() is None
    said = [json.loads(fork.stdout.readline()) for fork in (first, second)]
    for number, of in enumerate(said, 3):
        assert of["imported"] == ["distopt", "numpy"]
        assert (of["argv"], of["path"]) == ([str(tmp_path / "script.py"), "a", "b"], str(tmp_path))
        assert (of["main"], of["session"]) == ("__main__", True)
        assert of["environment"][MEMBER] == str(number)
        assert of["environment"]["SHARED"] == of["environment"][JOINS] == "1"
        assert WARM not in of["environment"]
    assert said[0]["numbers"] != said[1]["numbers"]
    line.send(b"7")
    another.send(b"0")
    assert [first.wait(30), second.wait(30), first.poll()] == [7, 0, 7]
    assert first.stderr.read() == b"an error\n"


def test_how_forks_were_ended_is_known(forked):
    (killed, _), (asked, _) = forked(3), forked(4)
    killed.kill()
    assert killed.wait(30) == -signal.SIGKILL
    killed.kill()  # nobody
    asked.terminate()
    assert asked.wait(30) == -signal.SIGTERM


def test_if_the_process_is_killed_there_are_no_more_forks(warm, forked):
    fork, _ = forked(3)
    os.kill(warm._process.pid, signal.SIGKILL)
    assert fork.wait(30) == -signal.SIGKILL  # it ends with the one that has started it
    assert warm.is_ready  # nobody waits for it
    assert warm.fork({MEMBER: "5"}, 0) is None


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is missing: pip install torch")
def test_who_takes_the_place_of_a_lost_rank_is_a_fork(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "imported = 'torch' in sys.modules\n"
        "import numpy as np, distopt\n"
        "world, p = distopt.world('cpu'), distopt.Parameter('w', np.ones(3, np.float32))\n"
        "opt = distopt.DistOpt(None, world)\n"
        "opt.rejoin([p])\n"
        "print('begins', opt.step_counter, imported, flush=True)\n"
        "while opt.step_counter < 310:\n"
        "    time.sleep(0.02)\n"
        "    while world.size == 1 and not world.joiner_waits():\n"
        "        time.sleep(0.01)\n"
        "    opt.step([(p, np.ones(3, np.float32))])\n"
        "    if world.rank == 1 and opt.step_counter == 299:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    options = ["--elastic", "--over", "torch", "--restarts", "1"]
    code, output = distopt_run(2, *options, script, timeout=100)
    assert code == 0, output
    assert output.count("begins 0 False") == 2, output
    assert len(re.findall(r"begins 3\d\d True", output)) == 1, output
