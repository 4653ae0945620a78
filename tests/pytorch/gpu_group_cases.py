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


def gradients_of_ddp_on_gpus(comm):
    """A model in DistributedDataParallel with torch's and with distopt's exchange, in a stream of the script's."""
    nccl_checks.install(processes=True)
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import distopt.torch as dt
    from doubles import torch_cuda

    def model():
        torch.manual_seed(1)
        return DistributedDataParallel(nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 5)))

    def gradients(ddp):
        found = []
        for step in range(3):
            ddp.zero_grad()
            (ddp(torch.full((2, 6), 0.1 * (comm.rank + 1 + step))) ** 2).sum().backward()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            found += [p.grad.clone() for p in ddp.parameters()]
        return found

    wanted = gradients(model())
    torch_cuda.install()
    torch.cuda.set_device(comm.local_rank + 1)
    with torch.cuda.stream(torch.cuda.Stream()):
        ddp = model()
        dt.compress(ddp, group=torch.distributed.group.WORLD)
        for mine, theirs in zip(gradients(ddp), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    return {"done": np.array(comm.rank)}
