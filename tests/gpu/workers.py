"""Several ranks on one GPU, which only tests do: NCCL must take each for another host (its NCCL_HOSTID)."""

import os

import pytest

from distopt.comm import NcclCommunicator
from distopt.comm.nccl_library import REGISTER

SIZES = [pytest.param(1, id="one_rank"), pytest.param(2, id="two_ranks"), pytest.param(4, id="four_ranks")]

SEVERAL_ON_ONE = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MAX_CTAS": "8",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
}


def a_host_of_its_own(rank):
    """For a process that has not called NCCL, which reads its variables once."""
    os.environ.update(SEVERAL_ON_ONE, NCCL_HOSTID=f"rank{rank}")


def with_registered_buckets(rank):
    """The same, and distopt registers its buckets."""
    a_host_of_its_own(rank)
    os.environ[REGISTER] = "1"


def over_mpi(comm):
    """The same ranks on the GPU; ``comm`` is MPI's."""
    import spawned

    a_host_of_its_own(comm.rank)
    there = NcclCommunicator.from_mpi()
    spawned.verbs(there)
    spawned.steps(there)
    there.close()
