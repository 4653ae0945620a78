"""Several ranks on one GPU, which only tests do: NCCL must take each for another host (GPU.md of NCCL: NCCL_HOSTID)."""

import os

RANK = next((os.environ[v] for v in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if v in os.environ), "0")
SEVERAL_ON_ONE = {
    "NCCL_HOSTID": f"rank{RANK}",  # read once, at NCCL's first call
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
os.environ.update(SEVERAL_ON_ONE)

import numpy as np  # noqa: E402

import laws  # noqa: E402
from distopt.comm import NcclCommunicator  # noqa: E402


def nccl(comm):
    """The same ranks on the GPU; ``comm`` is MPI's."""
    return NcclCommunicator.from_mpi()


def every_law(comm):
    """All laws; returns the digests that a host must give too."""
    return laws.all_of_them(nccl(comm))


def some_laws(comm):
    """What four processes that share a GPU have the time for."""
    there = nccl(comm)
    for mode in laws.MODES:
        laws.same_bits(there, mode)
    return {"digests": np.array(laws.independence(there))}


def captured(comm):
    """Replay is eager."""
    there = nccl(comm)
    for compressor in laws.CAPTURED:
        laws.capture_changes_no_bit(there, compressor)
