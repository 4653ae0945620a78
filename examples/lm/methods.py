"""What is compared: by name, how ranks train together, and the rates among which the trials choose."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from model import OF_BYTES, TOKENS, parameters
from text import CONTEXT

import distopt
from distopt.compress import DCT, ARCTopK, Chunks, Dense, ErrorFeedback, Half, Int4, Int8, Packed, TopK
from distopt.optim import SGD, AdamW, Cosine, Muon, Signum

BATCH = 32  # windows of a step, shared out over the ranks, so that every number of ranks sees the same text
WHOLE = 300  # steps: a multiple of every H, so that each training ends with an exchange
ADAM = 4e-3  # of what Muon leaves to AdamW


class Run(NamedTuple):
    """A training.

    Attributes:
        method: of ``METHODS``.
        size: of ``model.SIZES``.
        ranks: how many share each batch, or train on their own.
        seed: of the parameters and the order of the text.
        rate: the largest learning rate; it rises for a tenth of the steps, and falls as a cosine.
        outer: the outer rate of local steps.
        steps: 0 for those of TOKENS bytes a parameter, in whole windows.
    """

    method: str
    size: str
    ranks: int
    seed: int
    rate: float
    outer: float = 1.0
    steps: int = 0

    def length(self):
        return self.steps or WHOLE * -(-TOKENS * parameters(self.size) // (BATCH * CONTEXT * WHOLE))


class Ranks(NamedTuple):
    """Ranks that train.

    Attributes:
        opt: a ``DistOpt`` or ``LocalSteps``, or virtual ranks.
        step: makes a step; it is given gradients, or with virtual ranks a function of the rank that returns them.
        common: of the parameters of this rank, returns those that all have in their place, by name.
    """

    opt: object
    step: Callable
    common: Callable = lambda params: {}


class Method(NamedTuple):
    """How ranks train together.

    Attributes:
        title: in tables and pictures.
        begin: of a ``Run`` and a communicator, or None for virtual ranks, makes ``Ranks``.
        rates: that the trials try.
        outers: outer rates that they try.
    """

    title: str
    begin: Callable
    rates: tuple
    outers: tuple = (1.0,)


def declining(run):
    return Cosine(run.rate, run.length(), final_lr=0.1 * run.rate, warmup_steps=run.length() // 10)


def adamw(run):
    return AdamW(declining(run), beta_2=0.95, weight_decay=0.1)


def muon(run):
    rest = Cosine(ADAM, run.length(), final_lr=0.1 * ADAM, warmup_steps=run.length() // 10)
    return Muon(declining(run), exclude=list(OF_BYTES), otherwise=AdamW(rest, beta_2=0.95))


def momentum(run):
    return SGD(declining(run), momentum=0.9)


def signs(run):
    return Signum(declining(run))


def each_step(optimizer, compressor=Dense):
    """Exchange gradients at every step."""

    def begin(run, comm):
        opt = distopt.DistOpt(optimizer(run), comm) if comm else distopt.simulate(run.ranks, optimizer(run))
        return Ranks(opt, functools.partial(opt.step, compressor=compressor()))

    return begin


def sparta(run, comm):
    """Average a share of the parameters after every step."""
    opt = distopt.DistOpt(adamw(run), comm)

    def means(params):
        found = {p.name: p.data.copy() for p in params}
        for x in found.values():
            comm.all_reduce(x)
            x /= comm.size
        return found

    return Ranks(opt, functools.partial(opt.backward_and_partial_update, share=0.005, seed=run.seed), means)


def local(optimizer, every, momentum=0.9, compressor=Dense, **options):
    """Train alone for ``every`` steps, then exchange how far each rank has come."""

    def begin(run, comm):
        outer = SGD(run.outer, momentum=momentum, nesterov=bool(momentum))
        settings = {"every": every, "outer": outer, "compressor": compressor(), **options}
        if comm:
            opt = distopt.LocalSteps(optimizer(run), comm, **settings)
        else:
            opt = distopt.simulate_local(run.ranks, optimizer(run), **settings)
        return Ranks(opt, opt, lambda params: opt.global_parameters)

    return begin


def sparse_loco():
    return ErrorFeedback(Packed(Chunks(64, 4096), value="2bit"), decay=0.95)


def two_bits():
    """All entries, four levels each."""
    return ErrorFeedback(Packed(Chunks(4096, 4096), value="2bit"))


def demo():
    return DCT(ErrorFeedback(Packed(Chunks(32, 4096)), decay=0.999))


OF_ADAM, OF_MUON, OF_SIGNS = (4e-3, 8e-3, 16e-3, 32e-3), (0.01, 0.02, 0.04), (1e-3, 3e-3, 1e-2, 3e-2)
OF_SGD = 0.1, 0.3, 0.6, 1.0
OUTER = 0.2, 0.4, 0.7

METHODS = {
    "dense": Method("dense", each_step(adamw), OF_ADAM),
    "muon": Method("dense, Muon", each_step(muon), (*OF_MUON, 0.08)),
    "half": Method("float16", each_step(adamw, Half), OF_ADAM),
    "int8": Method("int8", each_step(adamw, lambda: ErrorFeedback(Int8())), OF_ADAM),
    "int4": Method("int4", each_step(adamw, lambda: ErrorFeedback(Int4())), OF_ADAM),
    "topk": Method("top-K 1 %, packed", each_step(adamw, lambda: ErrorFeedback(Packed(TopK(0.01)))), OF_ADAM),
    "arc": Method("ARC-Top-K, 1 % of rows", each_step(adamw, ARCTopK), OF_ADAM),
    "sgd": Method("dense, SGD", each_step(momentum), OF_SGD),
    "demo": Method("DeMo", each_step(signs, demo), OF_SIGNS),
    "sparta": Method("SPARTA 0.5 %", sparta, OF_ADAM),
    "diloco-10": Method("DiLoCo, H = 10", local(adamw, 10), OF_ADAM, OUTER),
    "diloco-30": Method("DiLoCo, H = 30", local(adamw, 30), OF_ADAM, OUTER),
    "diloco-100": Method("DiLoCo, H = 100", local(adamw, 100), OF_ADAM, OUTER),
    "streaming": Method(
        "streaming, H = 30, delay 5", local(adamw, 30, fragments=3, delay=5, alpha=0.5), OF_ADAM, OUTER
    ),
    "sparseloco": Method("SparseLoCo, H = 30", local(adamw, 30, 0.0, sparse_loco), OF_ADAM),
    "muloco": Method("MuLoCo, H = 30", local(muon, 30), OF_MUON, OUTER),
    "muloco-2bit": Method("MuLoCo in two bits, H = 30", local(muon, 30, compressor=two_bits), OF_MUON, OUTER),
    "sparse-muloco": Method("SparseLoCo with Muon, H = 30", local(muon, 30, 0.0, sparse_loco), OF_MUON),
}
