"""Ranks on real GPUs: several on one, which only tests do, where there are fewer than four GPUs."""

import os

import pytest

from distopt import device
from distopt.comm import NcclCommunicator
from distopt.comm.nccl_library import REGISTER

SIZES = [pytest.param(1, id="one_rank"), pytest.param(2, id="two_ranks"), pytest.param(4, id="four_ranks")]

SEVERAL_ON_ONE = {  # data goes through sockets, in few blocks
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


def environment(rank):
    """NCCL's variables: where ranks share a GPU, it must take each for another host."""
    enough = device.gpu_state() == "ok" and device.gpu_count() >= 4
    return {} if enough else SEVERAL_ON_ONE | {"NCCL_HOSTID": f"rank{rank}"}


def begin(rank):
    """For a process that has not called NCCL, which reads its variables once."""
    os.environ.update(environment(rank))


def with_registered_buckets(rank):
    """The same, and distopt registers its buckets."""
    begin(rank)
    os.environ[REGISTER] = "1"


def over_mpi(comm):
    """The same ranks on the GPU; ``comm`` is MPI's."""
    import spawned

    begin(comm.rank)
    there = NcclCommunicator.from_mpi()
    spawned.verbs(there)
    spawned.steps(there)
    there.close()
