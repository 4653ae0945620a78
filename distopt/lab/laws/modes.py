"""What the laws are tried with: every optimizer, every wrapper, and a step of every kind, as a user would write it."""

from collections.abc import Callable
from typing import Any

from distopt import compress, optim
from distopt.compress import Compressor, ErrorFeedback
from distopt.compress.part import Try
from distopt.optim import SGD, ExponentialDecay

Make = Callable[[], Any]  # makes an optimizer
Step = Callable[[Any, Any], Any]  # of a DistOpt, and a loss

COMPRESSORS = [about() for about in compress.ALL.values()]
EXACT: tuple[Compressor, ...] = sum((part.exact for part in COMPRESSORS), ())  # sent and kept add up to the bit
ROUNDED: tuple[Compressor, ...] = sum((part.rounded for part in COMPRESSORS), ())  # within one unit in the last place
CAPTURED: tuple[Compressor, ...] = sum((part.captured for part in COMPRESSORS), ())  # in a step that is a CUDA graph
TRIES: dict[str, Try] = {name: step for part in COMPRESSORS for name, step in part.laws.items()}


def _step_of(tried: Try) -> Step:
    return lambda opt, loss: opt.step(loss, tried.compressor, tried.break_even, tried.exchange)


# One step of every kind, as a user would write it.
MODES: dict[str, Step] = {
    "dense": lambda opt, loss: opt(loss),
    "half": lambda opt, loss: opt.backward_and_update_half(loss),
    "clipped half": lambda opt, loss: opt.backward_and_update_half(loss, clipping=True, clip_Value=0.5),
    "partial": lambda opt, loss: opt.backward_and_partial_update(loss),
    "partial by seed": lambda opt, loss: opt.backward_and_partial_update(loss, share=0.3, seed=5),
    "topk": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=0.1, topK=True),
    "threshold": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=0.7),
    "topk without memory": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=0.1, topK=True, corr=False),
    "threshold without memory": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=0.7, corr=False),
} | {name: _step_of(tried) for name, tried in TRIES.items()}
APART = ("partial", "partial by seed")  # ranks have parameters of their own
WITH_MOMENTUM = [name for name, tried in TRIES.items() if tried.compressor.traits.corrects_momentum]
LOSE_NOTHING = ["dense", "threshold", "topk"]
LOSE_NOTHING += [
    name
    for name, (compressor, *_) in TRIES.items()
    if isinstance(compressor, ErrorFeedback) and compressor.decay == 1  # the residual has all that was not sent
]
ELEMENTWISE = ["dense", "half", "threshold", "partial by seed"]  # buckets do not change their bits
ELEMENTWISE += [name for name, tried in TRIES.items() if tried.any_buckets]

OPTIMIZERS: dict[str, Make] = {}
WRAPPERS: dict[str, Make] = {}
OF_BLAS: list[str] = []
for _kind, _about in optim.ALL.items():
    _part = _about()
    (WRAPPERS if issubclass(_kind, optim.OptimizerWrapper) else OPTIMIZERS).update(_part.laws)
    OF_BLAS += _part.laws if _part.of_blas else ()
sgd, layer_wise = OPTIMIZERS["sgd"], WRAPPERS["lars"]


def sgd_without_momentum() -> SGD:
    """``sgd`` without momentum, for compressors that have one themselves."""
    return SGD(ExponentialDecay(0.1, 2, 0.5, staircase=True), weight_decay=1e-3)


def maker_for(mode: str, make: Make) -> Make:
    """The function that makes the optimizer which a mode is tried with."""
    return sgd_without_momentum if mode in WITH_MOMENTUM else make


# Who updates what does not depend on what was sent: most modes are tried with one of these.
SHARDED: tuple[dict[str, Any], ...] = (
    {},
    {"nonfinite": "propagate"},
    {"overlap": True, "clip_norm": 2.0},
    {"dtype": "float64", "num_batches": 2, "deterministic": True},
    {"nonfinite": "propagate", "clip_norm": 2.0},
)
