"""Processes that a rank starts: they are no ranks, say so at once, and no pool starts them for ever."""

import sys
import sysconfig
from pathlib import Path

import pytest

from launch import distopt_run, find_launcher, finish, needs_mpi

pytestmark = pytest.mark.faults

UNGUARDED = """
import multiprocessing, sys
import distopt

world = distopt.world()

def square(x):
    return x * x

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print(pool.map(square, range(4)))
"""
GUARDED = """
import multiprocessing, sys
import distopt

def square(x):
    return x * x

if __name__ == "__main__":
    world = distopt.world()
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print(f"rank {world.rank}: {pool.map(square, range(4))}\\n", end="")
"""
CHILD = """
import subprocess, sys
import distopt

world = distopt.world()
if len(sys.argv) == 1:
    child = subprocess.run([sys.executable, __file__, "child"], capture_output=True, text=True)
    assert child.returncode == 1 and "RuntimeError: this process is no rank" in child.stderr, child.stderr
    world.barrier()
    print(f"rank {world.rank} is well\\n", end="")
"""
RANKS_OF_A_SCRIPT = """
import multiprocessing, os, socket, sys
import numpy as np
import distopt

def main():
    world, x = distopt.world(), np.ones(1)
    world.all_reduce(x)
    print(f"rank {world.rank}: {x[0]}\\n", end="")

if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        distopt.world()  # of this process alone
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [multiprocessing.get_context(sys.argv[1]).Process(target=main) for _ in range(2)]
    for number, rank in enumerate(ranks):
        os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        rank.start()
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
"""
LIMIT = {"DISTOPT_TIMEOUT": "60"}


@pytest.fixture
def start(tmp_path):
    """Start a script on two ranks by 'distopt run', 'mpiexec' or 'torchrun': (exit code, output)."""

    def start(by, text, *arguments):
        script = tmp_path / "script.py"
        script.write_text(text)
        environment = LIMIT | {"DISTOPT_FLIGHT": str(tmp_path)}
        if by == "distopt run":
            return distopt_run(2, script, *arguments, timeout=120, env=environment)
        if by == "mpiexec":
            launcher = find_launcher()
            command = [*launcher.command(2), sys.executable, str(script), *arguments]
            return finish(command, 120, env=launcher.environment(2) | environment)
        pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
        torchrun = str(Path(sysconfig.get_path("scripts")) / "torchrun")
        command = [torchrun, "--standalone", "--nproc-per-node", "2", str(script), *arguments]
        return finish(command, 120, env=environment | {"OMP_NUM_THREADS": "1"})

    return start


LAUNCHERS = [
    pytest.param("distopt run", marks=needs_mpi),
    pytest.param("mpiexec", marks=needs_mpi),
    pytest.param("torchrun", marks=pytest.mark.torch),
]


@pytest.mark.parametrize("by", LAUNCHERS)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_pool_whose_workers_import_a_script_that_calls_world_ends_with_a_remedy(start, by, method):
    code, output = start(by, UNGUARDED, method)
    assert code != 0, output
    assert 'put what only ranks do, distopt.world() too, behind `if __name__ == "__main__":`' in output
    assert "PMIU_write" not in output
    assert "[0, 1, 4, 9]" not in output


@pytest.mark.parametrize("by", LAUNCHERS)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_a_script_that_guards_its_main_part_work(start, by, method):
    code, output = start(by, GUARDED, method)
    assert code == 0, output
    assert "rank 0: [0, 1, 4, 9]" in output
    assert "rank 1: [0, 1, 4, 9]" in output


@pytest.mark.parametrize("by", LAUNCHERS)
def test_a_program_that_a_rank_starts_is_told_that_it_is_no_rank(start, by):
    code, output = start(by, CHILD)
    assert code == 0, output
    assert output.count("is well") == 2


@pytest.mark.torch
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_ranks_may_be_started_by_a_script_that_tells_them_who_they_are(method, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RANKS_OF_A_SCRIPT)
    code, output = finish([sys.executable, str(script), method], 120, env=LIMIT | {"LOCAL_RANK": None})
    assert code == 0, output
    assert "rank 0: 2.0" in output
    assert "rank 1: 2.0" in output


@needs_mpi
def test_a_job_that_a_rank_starts_has_ranks_of_its_own(start, tmp_path):
    inner = tmp_path / "inner.py"
    inner.write_text("import distopt\nworld = distopt.world()\nprint(f'inner {world.rank} of {world.size}\\n', end='')")
    launcher = find_launcher()
    command = [*launcher.command(2), sys.executable, str(inner)]
    outer = f"import subprocess, distopt\nif distopt.world().rank == 0:\n    subprocess.run({command}, check=True)\n"
    code, output = start("distopt run", outer)
    assert code == 0, output
    assert "inner 0 of 2" in output
    assert "inner 1 of 2" in output
