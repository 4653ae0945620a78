"""Run real MPI processes from a test: always with a time limit, results as one file per rank."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import distopt
from distopt.run.launcher import find_launcher
from distopt.run.processes import end

TESTS = Path(__file__).parent
PROJECT = TESTS.parent


def extend_path():
    """Let the modules of all folders of tests be imported by name, and ``benchmarks``."""
    sys.path.insert(0, str(TESTS))
    sys.path += [str(folder) for folder in (*sorted(TESTS.iterdir()), PROJECT) if folder.is_dir()]


def has_mpi():
    try:
        find_launcher()
    except RuntimeError:
        return False
    return importlib.util.find_spec("mpi4py") is not None


needs_mpi = pytest.mark.mpi  # skipped where MPI is missing: conftest.py


def finish(command, timeout, **options):
    """(exit code, output) of a command in a session of its own; the test fails if it does not end in time."""
    outer = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # lets print write its parts one by one
    environment = {k: v for k, v in (outer | options.pop("env", {})).items() if v is not None}
    job = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment,
        **options,
    )
    try:
        output, _ = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end([job], 5)  # with the ranks in sessions of their own, of which whoever is left would hold the pipe
        try:
            output, _ = job.communicate(timeout=5)
        except subprocess.TimeoutExpired as still_open:  # by a process that no longer has an ancestor among these
            output = (still_open.output or b"").decode()
        pytest.fail(f"{command} did not end within {timeout} s:\n{output}")
    return job.returncode, output


def distopt_run(ranks, *script, timeout=30, **options):
    """(exit code, output) of ``distopt run``."""
    return finish([sys.executable, "-m", "distopt", "run", "-n", str(ranks), *map(str, script)], timeout, **options)


def run_mpi(size, function, folder, *args, timeout=120, hosts=None):
    """Call ``function(comm, *args)`` on ``size`` MPI ranks; returns the ranks' dicts of arrays, in rank order.

    ``function`` is a module-level function of a module of the tests, ``args`` go through JSON.  ``hosts``: those of
    ``benchmarks.namespaces``, for as many ranks each, or one more on the first.
    """
    launcher = find_launcher()
    command, environment = [*launcher.command(size), sys.executable, __file__], launcher.environment(size)
    if hosts:
        on_hosts = [len(ranks) for ranks in np.array_split(range(size), len(hosts.names))]
        command, environment = (
            hosts.on(0, command),
            environment | hosts.environment(launcher.brand, on_hosts),
        )
    code, output = finish([*command, name_of(function), str(folder), json.dumps(args)], timeout, env=environment)
    assert code == 0, output
    return results(size, folder)


def name_of(function):
    """A function for the command of a script that calls ``answer``."""
    return f"{function.__module__}:{function.__name__}"


def results(size, folder):
    """What the function has returned on each rank."""
    found = []
    for rank in range(size):
        with np.load(Path(folder) / f"{rank}.npz") as saved:
            found.append(dict(saved))
    return found


def answer(comm):
    """Call the function that this process was started for, and leave what it returns in the folder."""
    name, folder, args = sys.argv[1:]
    module, function = name.split(":")
    found = getattr(importlib.import_module(module), function)(comm, *json.loads(args))
    np.savez(Path(folder) / f"{comm.rank}.npz", **(found or {}))


if __name__ == "__main__":
    extend_path()
    answer(distopt.world())
