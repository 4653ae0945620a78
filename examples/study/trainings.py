"""What the study trains: digits, on a network of 1.1 million parameters, in ten modes.

A mode's name is the one that ``distopt advise --modes`` knows it by, so that measured and predicted are the same thing.
"""

import functools
import itertools

import numpy as np
import volume
from digits import Dense, Relu, digits

import distopt
from distopt.compress import Chunks, ErrorFeedback, Packed, TopK
from distopt.lab import mode
from distopt.optim import SGD

RANKS, WIDTH = 2, 1024
NETWORK = f"64-{WIDTH}-{WIDTH}-10"
SHARE = volume.BATCH // RANKS  # samples of a rank's step
EPOCHS = 60  # of 11 steps
SPARSE_LOCO = "local=50+chunks=64/4096+packed:2bit"
MODES = {  # as advise has them: as tables and pictures do
    "dense": "dense",
    "half": "float16",
    "int8": "int8",
    "2bit=0.05": "2 bits",
    "topk=0.01": "top-K 1 %",
    "topk=0.001+packed": "top-K 0.1 %, packed",
    "dgc=0.001+packed+1d": "DGC 0.1 %, packed",
    "local=10": "local steps, H = 10",
    "local=50": "local steps, H = 50",
    SPARSE_LOCO: "SparseLoCo, H = 50",
}


def network(seed):
    rng = np.random.default_rng(seed)
    return [
        *(Dense("hidden1", 64, WIDTH, rng, np), Relu()),
        *(Dense("hidden2", WIDTH, WIDTH, rng, np), Relu()),
        Dense("out", WIDTH, 10, rng, np),
    ]


def shapes():
    """(name, shape) of all parameters, from the last layer to the first."""
    return [(p.name, p.data.shape) for layer in reversed(network(0)) for p in reversed(layer.params)]


def compressor(name, steps):
    """Of a training of so many steps: with DGC's momentum and warm-up, and SparseLoCo's decay."""
    if name.startswith("dgc"):
        return volume.dgc(Packed(TopK(0.001)), steps, exclude_1d=False)
    if name == SPARSE_LOCO:
        return ErrorFeedback(Packed(Chunks(64, 4096), value="2bit"), decay=0.95)
    return mode(name).compressor


def every(name):
    """H: steps from one exchange to the next."""
    return mode(name).windows.every


def virtual(run):
    """Virtual ranks, a step of theirs, and a function that returns the parameters that local steps leave to all.

    Local steps exchange means, as there are too few exchanges for an outer momentum.
    """
    opt, sent = volume.optimizer(run), compressor(run.mode, run.steps)
    if every(run.mode) > 1:
        sim = distopt.simulate_local(run.ranks, opt, every=every(run.mode), outer=SGD(1.0), compressor=sent)
        return sim, sim, lambda: sim.global_parameters
    sim = distopt.simulate(run.ranks, opt)
    return sim, functools.partial(sim.step, compressor=sent), dict


def real(run, comm):
    """A step of a real rank, as ``virtual`` has it; but DGC's warm-up ends with the fifth one."""
    opt, sent = volume.optimizer(run), compressor(run.mode, steps=1)
    if every(run.mode) > 1:
        return distopt.LocalSteps(opt, comm, every=every(run.mode), outer=SGD(1.0), compressor=sent)
    return functools.partial(distopt.DistOpt(opt, comm).step, compressor=sent)


def window_of(name, comm):
    """A function that makes a rank's steps up to the next exchange, each with the next samples."""
    run = volume.Run(name, RANKS, seed=1, epochs=EPOCHS)
    layers, step = network(run.seed), real(run, comm)
    (images, labels), _ = digits(np)
    order = np.random.default_rng(distopt.world().rank).permutation(len(labels))
    batches = itertools.cycle(order[: len(order) // SHARE * SHARE].reshape(-1, SHARE))

    def window():
        for mine in itertools.islice(batches, every(name)):
            step(volume.gradients(layers, images[mine], labels[mine], []))

    return window
