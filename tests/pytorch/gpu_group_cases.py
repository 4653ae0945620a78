"""What ranks of torchrun do on doubles of GPUs, as functions that all ranks call."""

import nccl_checks
import numpy as np

import distopt
from distopt.comm import NcclCommunicator


def nccl_between_ranks_of_a_process_group(comm):
    """NCCL's ranks vote over gloo; ``world`` finds them; every mode has the same bits on all ranks."""
    nccl_checks.install(processes=True)
    import laws

    there = distopt.world("cuda")
    assert isinstance(there, NcclCommunicator)
    assert (there.rank, there.size, there.gpu) == (comm.rank, comm.size, comm.local_rank)
    assert "votes over gloo, one host" in repr(there)
    nccl_checks.everything(there, pieces=False)
    for mode in ("dense", "topk", "dgc"):
        laws.same_bits(there, mode)
    return {"done": np.array(there.gpu)}
