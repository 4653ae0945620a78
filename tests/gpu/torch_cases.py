"""What a torch script does with distopt, as functions of the ranks and the device, which all ranks call.

The reference is one process: it takes the batch of every rank through a copy of the model, and means in float64.
"""

import contextlib
import copy
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distopt
import distopt.torch as dt
from distopt.compress import ErrorFeedback, Half, Packed, TopK

CASES = {}
STEPS = 4


def case(function):
    CASES[function.__name__] = function
    return function


def network(device):
    torch.manual_seed(5)
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 300), nn.Tanh(), nn.Linear(300, 10)]
    return nn.Sequential(*layers).to(device)


def batch(rank, step, like):
    """What a rank has in a step, as one of its model's parameters is."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 3, 8, 8, generator=g).to(like), torch.randint(0, 10, (8,), generator=g).to(like.device)


def loss_of(model, rank, step):
    x, labels = batch(rank, step, next(model.parameters()))
    return nn.functional.cross_entropy(model(x).float(), labels)


def gradients(model, rank, step):
    """Of a copy that nobody knows."""
    mine = copy.deepcopy(model)
    parameters = list(mine.parameters())
    return [g.double().cpu().numpy() for g in torch.autograd.grad(loss_of(mine, rank, step), parameters)]


def unknown(model):
    """A model with the same values, which has no hooks."""
    other = network(next(model.parameters()).device).to(next(model.parameters()).dtype)
    other.load_state_dict(model.state_dict())
    return other


def means(model, comm, step):
    """The gradients of one process that has every rank's batch."""
    other = unknown(model)
    return [np.mean(of, axis=0) for of in zip(*(gradients(other, r, step) for r in range(comm.size)), strict=True)]


def near(found, wanted, tolerance=1e-4):
    for x, y in zip(found, wanted, strict=True):
        scale = np.abs(y).max() + 1e-6
        np.testing.assert_allclose(x.detach().double().cpu().numpy(), y, rtol=0, atol=tolerance * scale)


def trains(comm, device, compressor=None, change=lambda model: model, tolerance=1e-4, **options):
    """``backward`` leaves the mean over ranks, and every rank takes the same steps."""
    model = change(network(device))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sync = dt.synchronize(model, compressor, optimizer=optimizer, group=comm, **options)
    for step in range(STEPS):
        wanted = means(model, comm, step)
        optimizer.zero_grad()
        loss_of(model, comm.rank, step).backward()
        near([p.grad for p in model.parameters()], wanted, tolerance)
        optimizer.step()
    assert sync.step_counter == STEPS
    same_everywhere(comm, model)
    sync.close()


def same_everywhere(comm, model):
    values = [p.detach().double().cpu().numpy().tobytes().hex() for p in model.parameters()]
    assert len(set(comm.control.gather("".join(values)))) == 1


# ------------------------------------------------------------------------------------------------- dt.synchronize


@case
def dense_gradients_leave_early(comm, device):
    trains(comm, device, threshold=1000, overlap=True)


@case
def dense_gradients_leave_at_the_end(comm, device):
    trains(comm, device, overlap=False)


@case
def halves(comm, device):
    trains(comm, device, Half(), tolerance=5e-3)


@case
def entries_with_a_residual(comm, device):
    """All of them, so that nothing is late."""
    trains(comm, device, ErrorFeedback(TopK(1.0)), threshold=1000)


@case
def what_is_late_comes_later(comm, device):
    """Means of all steps and what waits are the sum of gradients, where no parameter moves."""
    model = network(device)
    sync = dt.synchronize(model, ErrorFeedback(Packed(TopK(0.1))), group=comm, exchange="gather")
    wanted = [STEPS * g for g in means(model, comm, 0)]
    came = [np.zeros(p.shape) for p in model.parameters()]
    for _ in range(STEPS):
        model.zero_grad()
        loss_of(model, comm.rank, 0).backward()
        for total, p in zip(came, model.parameters(), strict=True):
            total += p.grad.double().cpu().numpy()
    last = [np.abs(t - w).max() / np.abs(w).max() for t, w in zip(came, wanted, strict=True)]
    assert max(last) < 1.0, "more waits than was ever there"
    assert min(last) < 0.9, "nothing came"
    same_everywhere(comm, model)
    sync.close()


@case
def sixteen_bits(comm, device):
    trains(comm, device, change=lambda model: model.to(torch.bfloat16), tolerance=2e-2)


@case
def channels_last(comm, device):
    trains(comm, device, change=lambda model: model.to(memory_format=torch.channels_last), threshold=1000)


# ------------------------------------------------------------------------------------------------- streams


def late(device):
    """Let the current stream of a GPU be behind its host."""
    if device.type == "cuda":
        torch.cuda._sleep(50_000_000)


@contextlib.contextmanager
def stream_of_its_own(device):
    """As torch's documentation has it; on a CPU there is none."""
    if device.type != "cuda":
        yield
        return
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream(device).wait_stream(side)


def steps_in_a_stream(comm, device, model, **options):
    """Gradients come when the host has gone on long ago; nothing but streams keeps the order."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sync = dt.synchronize(model, optimizer=optimizer, group=comm, **options)
    found, wanted = [], []
    with stream_of_its_own(device):
        for step in range(STEPS):
            wanted.append(means(model, comm, step))
            optimizer.zero_grad()
            loss = loss_of(model, comm.rank, step)
            late(device)
            loss.backward()
            found.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
    for mine, theirs in zip(found, wanted, strict=True):
        near(mine, theirs)
    same_everywhere(comm, model)
    return sync


@case
def a_side_stream(comm, device):
    for overlap in (False, True):
        steps_in_a_stream(comm, device, network(device), threshold=1000, overlap=overlap).close()


@case
def warm_up_and_graphs_of_torch(comm, device):
    """Steps in a side stream, and then forward and backward pass as graphs, whose hooks the exchange has."""
    model = network(device)
    sync = steps_in_a_stream(comm, device, model)
    sync.close()
    if device.type == "cuda":
        x, _ = batch(0, 0, next(model.parameters()))
        torch.cuda.make_graphed_callables(model, (x,))
    sync = dt.synchronize(model, group=comm)
    for step in range(STEPS):
        wanted = means(model, comm, step)
        model.zero_grad()
        loss_of(model, comm.rank, step).backward()
        near([p.grad for p in model.parameters()], wanted)
    sync.close()


# ------------------------------------------------------------------------------------------------- the other ways in


@case
def a_scaler(comm, device):
    """Its scale is none of the means', and what one rank cannot hold all leave out."""
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=1000)
    sync = dt.synchronize(model, ErrorFeedback(TopK(1.0)), optimizer=optimizer, scaler=scaler, group=comm)
    for step in range(STEPS):
        before, wanted = [p.detach().clone() for p in model.parameters()], means(model, comm, step)
        optimizer.zero_grad()
        too_much = step == 1 and comm.rank == comm.size - 1
        scaler.scale(loss_of(model, comm.rank, step) * (float("inf") if too_much else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = [(b - p) / 0.1 for b, p in zip(before, model.parameters(), strict=True)]
        near(moved, [0 * w for w in wanted] if step == 1 else wanted, 1e-3)
    assert scaler.get_scale() == 512.0
    same_everywhere(comm, model)
    sync.close()


@case
def a_distributed_data_parallel(comm, device):
    for compressor in (None, ErrorFeedback(TopK(1.0))):
        model = network(device)
        ddp = DistributedDataParallel(model)
        exchange = dt.compress(ddp, compressor, group=comm)
        for step in range(STEPS):
            wanted = means(model, comm, step)
            model.zero_grad()
            loss_of(ddp, comm.rank, step).backward()
            near([p.grad for p in model.parameters()], wanted)
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        same_everywhere(comm, model)
        exchange.close()


@case
def local_steps(comm, device):
    """Ranks that average every two steps are where one process is that does it for all of them."""
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    windows = dt.local_steps(model, optimizer, every=2, outer=distopt.optim.SGD(1.0), group=comm)
    others = [unknown(model) for _ in range(comm.size)]
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, comm.rank, step).backward()
        optimizer.step()
        for rank, other in enumerate(others):
            for p, g in zip(other.parameters(), gradients(other, rank, step), strict=True):
                p.data -= 0.1 * torch.from_numpy(g).to(p)
        if step % 2:
            for same in zip(*(other.parameters() for other in others), strict=True):
                mean = torch.stack([p.data for p in same]).mean(0)
                for p in same:
                    p.data = mean.clone()
            near(model.parameters(), [p.detach().double().cpu().numpy() for p in others[0].parameters()])
    same_everywhere(comm, model)
    windows.close()


def losses(comm, device, make):
    """``opt(loss)`` with a loss that is a tensor."""
    model, other = network(device), network(device)
    opt = make(model)
    for step in range(STEPS):
        for p, g in zip(other.parameters(), means(other, comm, step), strict=True):
            p.data -= 0.1 * torch.from_numpy(g).to(p)
        opt(loss_of(model, comm.rank, step))
    opt.wait()
    near(model.parameters(), [p.detach().double().cpu().numpy() for p in other.parameters()])
    same_everywhere(comm, model)


@case
def losses_that_distopt_minimizes_by_its_own_optimizer(comm, device):
    losses(comm, device, lambda model: distopt.DistOpt(distopt.optim.SGD(0.1), comm, params=model, threshold=1000))


@case
def losses_that_distopt_minimizes_by_one_of_torch(comm, device):
    losses(comm, device, lambda model: distopt.DistOpt(torch.optim.SGD(model.parameters(), 0.1), comm, threshold=1000))


# ------------------------------------------------------------------------------------------------- on a GPU, or not


def join(comm, folder):
    """What DistributedDataParallel needs, and nobody else."""
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        place = f"file://{folder}/of_torch"
        dist.init_process_group("gloo", init_method=place, rank=comm.rank, world_size=comm.size)


def on_gpu(comm, name, folder):
    """One case, on this rank's GPU."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.cuda.set_device(comm.gpu)
    join(comm, folder)
    CASES[name](comm, torch.device("cuda", comm.gpu))
    comm.barrier()
    dist.destroy_process_group()
    return "done"


def on_cpu(comm):
    """All of them, on ranks of torchrun."""
    for name, function in CASES.items():
        try:
            function(comm, torch.device("cpu"))
        except BaseException as error:
            error.add_note(f"in {name}")
            raise
