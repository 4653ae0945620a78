"""What ranks of MPI do with torch, as functions that all ranks call; some of them on ranks of torchrun too."""

import numpy as np
import sync_cases
import torch
import torch.distributed as dist
from torch import nn

import distopt
import distopt.torch as dt
from distopt import DistOpt
from distopt.comm import MpiCommunicator
from distopt.compress import DeepGradientCompression, ErrorFeedback, Half, Int8, TopK


def cases(comm, store):
    """All cases of ``synchronize``.  The process group is there for DistributedDataParallel, the reference."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.size)
    assert isinstance(distopt.world(), MpiCommunicator)
    assert isinstance(distopt.world("cpu"), MpiCommunicator)  # chosen beside the script's process group
    found = sync_cases.run_all(comm)
    dist.destroy_process_group()
    return found


MODES = {
    "dense": None,
    "half": Half(),
    "top-K": ErrorFeedback(TopK(0.1)),
    "int8": ErrorFeedback(Int8()),
    "dgc": DeepGradientCompression(TopK(0.1), momentum=0.9),
}
TRAINERS = {
    "torch SGD": lambda model, comm: DistOpt(torch.optim.SGD(model.parameters(), 0.1), comm),
    "torch AdamW": lambda model, comm: DistOpt(torch.optim.AdamW(model.parameters(), 0.01), comm),
    "SGD": lambda model, comm: DistOpt(distopt.optim.SGD(0.1), comm, params=model),
    "LAMB": lambda model, comm: DistOpt(distopt.optim.LAMB(0.01), comm, params=model),
}


def network(rank):
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))


def loss_of(model, rank, step):
    g = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(8, 20, generator=g), torch.randint(0, 5, (8,), generator=g)
    return nn.functional.cross_entropy(model(x), y)


def trained(comm):
    """{what trained: the parameters after some steps}, without any use of torch.distributed."""
    found = {}
    for name, compressor in MODES.items():
        for trainer in TRAINERS if name != "dgc" else ("torch SGD", "SGD"):  # which have no momentum
            model = network(comm.rank)
            opt = TRAINERS[trainer](model, comm)
            for step in range(3):
                opt.step(loss_of(model, comm.rank, step), compressor)
            found[f"{name}, {trainer}"] = flat(model)
        model = network(comm.rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sync = dt.synchronize(model, compressor, optimizer=optimizer, group=comm)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, comm.rank, step).backward()
            optimizer.step()
        assert sync.step_counter == 3
        found[f"{name}, synchronize"] = flat(model)
    return found


def changing(comm):
    """The parameters after steps in which a layer is thawed and frozen again, and what is said if one rank does so."""
    model = network(comm.rank)
    model[0].requires_grad_(False)
    opt = DistOpt(torch.optim.AdamW(model.parameters(), 0.01), comm, allow_missing=True)
    for step in range(6):
        model[0].requires_grad_(2 <= step < 4)
        opt.step(loss_of(model, comm.rank, step), ErrorFeedback(TopK(0.1)))
    opt.close()
    model[0].requires_grad_(False)
    opt = DistOpt(torch.optim.SGD(model.named_parameters(), 0.1), comm)
    model[0].requires_grad_(comm.rank == 1)
    try:
        opt(loss_of(model, comm.rank, 6))
    except ValueError as error:
        return {"parameters": flat(model), "text": np.array(str(error))}
    return {}


def flat(model):
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])
