"""Ranks of torch whose others do not come: the wait has a limit, and says where they were to come to."""

import socket
import sys
import sysconfig
from pathlib import Path

import pytest

from launch import finish

pytestmark = [pytest.mark.torch, pytest.mark.faults]

TORCHRUN = str(Path(sysconfig.get_path("scripts")) / "torchrun")


@pytest.fixture
def limits(tmp_path):
    return {"DISTOPT_TIMEOUT": "5", "DISTOPT_FLIGHT": str(tmp_path), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_others_says_where_it_waits_and_who_has_told_it(rank, limits):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", "import distopt; distopt.world()"]
    code, output = finish(command, 120, env=limits | told)
    assert code == 75, output
    assert f"rank {rank} waits since 5." in output
    assert f"RANK={rank}, WORLD_SIZE=2, MASTER_ADDR=127.0.0.1, MASTER_PORT={port}; unset RANK and WORLD_SIZE" in output


def test_a_rank_of_the_scripts_own_group_that_does_not_come_to_world_is_waited_for_with_a_limit(limits, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import time, torch.distributed as dist, distopt\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank(): time.sleep(600)\n"
        "distopt.world()\n"
    )
    code, output = finish([TORCHRUN, "--standalone", "--nproc-per-node", "2", str(script)], 120, env=limits)
    assert code != 0, output
    assert "rank 0 waits since 5." in output
    assert "s for the first meeting of a communicator's ranks; at script.py:4" in output
