"""Ranks that start at once: forks of one process that has imported torch, which takes a Python of its own seconds.

Beside that they are processes like any other: a script as their main module, an environment, and an end of their own.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

SLOW = "torch._dynamo", "torch.distributed.fsdp"  # the first one is imported with the first optimizer
FORKED_RUN = Path(__file__).with_name("forked_run.py")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as torchrun has it; torch reads it when it is imported


class Fork:
    """A process that runs a script, as ``python script.py ...`` does; its methods are those of ``Popen``.

    Args:
        command: the script, and its arguments.
        environment: all of its variables.
        output: a file for what it prints.
        folder: where it runs; None for here.
        pass_fds: what it has of this process's open files, under the same numbers.
        imported: modules that are imported too before it starts, once for all with the same ones.
    """

    def __init__(self, command, environment, output, folder=None, pass_fds=(), imported=()):
        self.args, self.returncode, self._line = list(map(str, command)), None, _line(*imported)
        about = {"command": self.args, "environment": environment, "folder": str(folder or Path.cwd())}
        with open(os.devnull) as nothing:
            self.pid = _ask(
                self._line, about | {"numbers": [0, 1, *pass_fds]}, [nothing.fileno(), output.fileno(), *pass_fds]
            )
        self._end = os.pidfd_open(self.pid)

    def poll(self):
        if self.returncode is None and select.select([self._end], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            os.close(self._end)
            self.returncode = os.waitstatus_to_exitcode(_ask(self._line, {"ended": self.pid}))
        return self.returncode

    def kill(self, how=signal.SIGKILL):
        if self.poll() is None:
            signal.pidfd_send_signal(self._end, how)

    def terminate(self):
        self.kill(signal.SIGTERM)


def launcher(options, environment, output):
    """A fork that is ``distopt run ...``, and whose first ranks are forks too (``forked_run.py``)."""
    return Fork([FORKED_RUN, "run", *options], environment | ONE_THREAD, output)


def distopt_run(ranks, *script, timeout=30, env=()):
    """(exit code, output) of ``distopt run``, as ``launch.distopt_run`` has it."""
    with tempfile.TemporaryFile() as output:
        job, code = launcher(["-n", ranks, *script], _outer() | dict(env), output), None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = job.wait(timeout)
        job.kill()  # its ranks end with it
        job.wait()
        output.seek(0)
        said = output.read().decode()
    if code is None:
        pytest.fail(f"{job.args} did not end within {timeout} s:\n{said}")
    return code, said


def run(variables, size, command, timeout, folder=None, env=(), imported=()):
    """Run a script on ranks with these variables, ``variables(rank, size)``; (exit code, output).

    As torchrun and srun do, it ends all when one has failed; the exit code is then that one's.
    """
    outer = _outer() | ONE_THREAD | dict(env)
    with tempfile.TemporaryFile() as output:
        ranks = [Fork(command, outer | variables(rank, size), output, folder, (), imported) for rank in range(size)]
        codes = _wait(ranks, timeout, lambda codes: None not in codes or any(codes))
        if any(codes):  # the others may say what they see
            _wait(ranks, 5, lambda codes: None not in codes)
        for rank in ranks:
            rank.kill()
            rank.wait()
        output.seek(0)
        said = output.read().decode()
    if not any(codes) and None in codes:
        pytest.fail(f"{command} did not end within {timeout} s:\n{said}")
    return next((code for code in codes if code), 0), said


def _outer():
    """This process's environment, without what lets print write its parts one by one."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}


def _wait(ranks, timeout, enough):
    """The exit codes of ranks once they are enough, or at the end of the time."""
    deadline = time.monotonic() + timeout
    while not enough(codes := [rank.poll() for rank in ranks]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return codes


def torchruns():
    """The variables of torchrun on one machine, as a function of a rank and the number of ranks."""
    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "none"}

    def variables(rank, size):
        mine = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        return at | {name: str(value) for name, value in mine.items()}

    return variables


def sruns():
    """The variables of tasks of ``srun -K --mpi=none``, on one node."""
    step = {
        "SLURM_JOB_ID": str(free_port()),  # of no other step that runs now
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": socket.gethostname(),
    }

    def variables(rank, size):
        sizes = dict.fromkeys(("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), str(size))
        return step | sizes | dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID"), str(rank))

    return variables


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


# ----------------------------------------------------------------------------------------- the process that is forked


@functools.cache
def _line(*modules):
    """A line to the process that is forked, with these modules a fork of the one without; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command, environment, fds = (
            [__file__, str(theirs.fileno()), *modules],
            os.environ | ONE_THREAD,
            [theirs.fileno()],
        )
        if modules:
            process = Fork(command, environment, sys.__stderr__, pass_fds=fds)
        else:
            process = subprocess.Popen([sys.executable, *command], env=environment, pass_fds=fds)
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours


def _ask(line, about, fds=()):
    socket.send_fds(line, [json.dumps(about).encode()], fds)
    return int(line.recv(100))


def take(numbers, fds):
    """Have these open files under these numbers, and the second one under 2 too."""
    for fd, number in zip(fds, numbers, strict=True):
        os.dup2(fd, number)
    os.dup2(1, 2)
    for fd in {*fds} - {*numbers}:
        os.close(fd)


def become(command, environment, folder):
    """Be a process that runs this script from its begin to its end."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")


def main():
    number, *modules = sys.argv[1:]
    for module in (*SLOW, *modules):
        importlib.import_module(module)
    line = socket.socket(fileno=int(number))
    while True:
        text, fds, _, _ = socket.recv_fds(line, 1 << 20, 16)
        if not text:
            return
        about = json.loads(text)
        if "ended" in about:
            answer = os.waitpid(about["ended"], 0)[1]
        elif (answer := os.fork()) == 0:
            line.close()
            take(about.pop("numbers"), fds)
            return become(**about)
        for fd in fds:
            os.close(fd)
        line.send(str(answer).encode())


if __name__ == "__main__":
    main()
