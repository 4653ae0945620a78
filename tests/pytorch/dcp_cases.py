"""What ranks of torchrun save and load by torch.distributed.checkpoint, as a function that all ranks call."""

import torch
import torch.distributed.checkpoint as dcp

import distopt.torch as dt
from distopt.compress import ErrorFeedback, TopK


def make(comm, local):
    """A model, its optimizer, and what exchanges."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 10), torch.nn.Tanh(), torch.nn.Linear(10, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    top = ErrorFeedback(TopK(0.05))
    if local:
        return model, optimizer, dt.local_steps(model, optimizer, 3, compressor=top, group=comm)
    return model, optimizer, dt.synchronize(model, top, optimizer=optimizer, group=comm)


def train(comm, model, optimizer, steps):
    for step in steps:
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + comm.rank))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy()


def resumed(comm, folder):
    """Parameters after ten steps, at once and with a save after the fifth, of both kinds of training."""
    found = {}
    for local in (False, True):
        model, optimizer, part = make(comm, local)
        train(comm, model, optimizer, range(5))
        place = f"{folder}/{local}"
        mine = f"optimizer of rank {comm.rank}" if local else "optimizer"
        model_key = f"model of rank {comm.rank}" if local else "model"
        dcp.save({model_key: model, mine: optimizer, "sync": dt.RankState(part)}, checkpoint_id=place)
        train(comm, model, optimizer, range(5, 10))
        found[f"whole {local}"] = flat(model)
        part.close()
        model, optimizer, part = make(comm, local)
        states = {model_key: model.state_dict(), mine: zero_state(optimizer), "sync": dt.RankState(part)}
        dcp.load(states, checkpoint_id=place)
        model.load_state_dict(states[model_key])
        optimizer.load_state_dict(states[mine])
        train(comm, model, optimizer, range(5, 10))
        found[f"resumed {local}"] = flat(model)
        part.close()
    return found


def zero_state(optimizer):
    """The state of an optimizer that has made no step, with places for what is loaded."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = optimizer.state_dict()
    state["state"] = {
        k: {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        for k, p in enumerate(parameters)
    }
    return state
