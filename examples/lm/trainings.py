"""A training: the model, its gradients by rank, and the loss on text that is held out."""

import contextlib

import text
import torch
from methods import BATCH, METHODS
from model import Transformer
from threadpoolctl import threadpool_limits

import distopt
from distopt.comm import Metered
from distopt.data import GlobalBatches

AS_THREADS = "sparta"  # whose ranks have parameters of their own: virtual ones share them
POINTS = 10  # at which a training is tested
SPREAD = 8  # of so many windows of the held-out text one is enough before the last point
BLOCK = 128  # windows of one pass without gradients


class Training:
    """A model in the arrays that ranks train, and the text.

    Args:
        run: what is trained.
        comm: the communicator of real ranks; None for virtual ones.
    """

    def __init__(self, run, comm=None):
        self.run, self.comm, self.model = run, comm, Transformer(run.size, run.seed)
        named = list(self.model.named_parameters())[::-1]
        self.tensors = [p for _, p in named]
        self.params = [distopt.Parameter(name, p.detach().numpy()) for name, p in named]  # the model's own memory
        self.windows = text.windows(text.read().training)
        self.batches = GlobalBatches(len(self.windows), BATCH, seed=run.seed, ranks=comm.size if comm else run.ranks)
        self.ranks = METHODS[run.method].begin(run, comm)
        self.held_out = text.windows(text.read().held_out)

    def gradients(self, rank, step):
        """The gradients of a rank's part of a batch, with their parameters, from the last to the first."""
        windows = self.windows[self.batches.ids(rank, step)]
        found = torch.autograd.grad(self.model.loss(windows), self.tensors)
        return [(p, g.numpy()) for p, g in zip(self.params, found, strict=True)]

    def train(self):
        """Train, and yield after every tenth: the steps so far, and the held-out loss."""
        steps = self.run.length()
        for step in range(steps):
            if self.comm:
                self.ranks.step(self.gradients(self.comm.rank, step))
            else:
                self.ranks.step(lambda rank, step=step: self.gradients(rank, step))
            if (step + 1) * POINTS // steps > step * POINTS // steps:
                yield step + 1, self.loss(1 if step + 1 == steps else SPREAD)

    def loss(self, spread):
        """The loss on the held-out text, of the parameters that all ranks have alike, in nats a byte."""
        tested, total = self.held_out[::spread], 0.0
        with self.holding(self.ranks.common(self.params)), torch.no_grad():
            for begin in range(0, len(tested), BLOCK):
                part = tested[begin : begin + BLOCK]
                total += len(part) * self.model.loss(part).item()
        return total / len(tested)

    @contextlib.contextmanager
    def holding(self, values):
        """The model with other values of the parameters that are named."""
        own = {p.name: p.data.copy() for p in self.params if p.name in values}
        for p in self.params:
            p.data[...] = values.get(p.name, p.data)
        yield
        for p in self.params:
            p.data[...] = own.get(p.name, p.data)


def on_one_core():
    """Leave the other cores to other trainings: threads cost more than they gain where matrices are this small."""
    torch.set_num_threads(1)
    threadpool_limits(1)


def train_here(run, tell):
    """Train with ranks of this process: virtual ones, or threads.

    Args:
        run: what is trained.
        tell: is called with the steps so far, the loss, and the bytes that rank 0 has sent.

    Returns:
        What rank 0 has exchanged, and the loss in the end.
    """
    if run.method == AS_THREADS:
        return distopt.run_ranks(run.ranks, lambda comm: train_rank(run, Metered(comm), tell))[0]
    return train_rank(run, None, tell)


def train_rank(run, comm, tell):
    """Train as one of real ranks, of which the first tells, or as all virtual ones."""
    training = Training(run, comm)
    ledger = (comm or training.ranks.opt).ledger
    for step, loss in training.train():
        if not (comm and comm.rank):
            tell(step, loss, ledger.total_of_steps()["sent"])
    return ledger.report(), loss
