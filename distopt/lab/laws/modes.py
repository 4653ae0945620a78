"""What the laws are tried with: every optimizer, every wrapper, and a step of every kind, as a user would write it."""

from collections.abc import Callable
from typing import Any

from distopt.compress import (
    DCT,
    Chunks,
    Compressor,
    DeepGradientCompression,
    Dense,
    ErrorFeedback,
    Half,
    Int4,
    Int8,
    OneBit,
    Packed,
    Threshold,
    TopK,
    TwoBit,
)
from distopt.optim import (
    LAMB,
    LANS,
    LARS,
    LBSGD,
    SGD,
    AdaGrad,
    Adam,
    AdamW,
    BatchGradients,
    ExponentialDecay,
    LarsWrapper,
    Muon,
    RMSProp,
)

Make = Callable[[], Any]  # makes an optimizer
Step = Callable[[Any, Any], Any]  # of a DistOpt, and a loss


def sgd() -> SGD:
    """All of SGD's state, and a learning rate that falls on the way."""
    return SGD(ExponentialDecay(0.1, 2, 0.5, staircase=True), momentum=0.9, weight_decay=1e-3)


def sgd_without_momentum() -> SGD:
    """``sgd`` without momentum, for compressors that have one themselves."""
    return SGD(ExponentialDecay(0.1, 2, 0.5, staircase=True), weight_decay=1e-3)


def maker_for(mode: str, make: Make) -> Make:
    """The function that makes the optimizer which a mode is tried with."""
    return sgd_without_momentum if mode.startswith("dgc") else make


OPTIMIZERS: dict[str, Make] = {
    "sgd": sgd,
    "plain sgd": lambda: SGD(0.1),
    "nesterov": lambda: SGD(0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda: RMSProp(0.01, epsilon=1e-3),
    "adagrad": lambda: AdaGrad(0.1, epsilon=1e-3),
    "adam": lambda: Adam(0.01, epsilon=1e-3, weight_decay=1e-3),
    "adamw": lambda: AdamW(0.01, epsilon=1e-3, weight_decay=1e-3),
    "lars": lambda: LARS(1.0, momentum=0.9, eta=0.01, weight_decay=1e-3, exclude=["3", "6"]),
    "lamb": lambda: LAMB(0.01, epsilon=1e-3, weight_decay=1e-3, upper_bound=10.0, exclude=["3", "6"]),
    "lans": lambda: LANS(0.01, epsilon=1e-3, weight_decay=1e-3, exclude=["3", "6"]),
    "lbsgd": lambda: LBSGD(0.1, momentum=0.9, batch_scale=2, warmup_strategy="sqrt"),
    "lbsgd lars": lambda: LBSGD(0.01, momentum=0.9, weight_decay=1e-3, warmup_strategy="lars"),
    "muon": lambda: Muon(0.05, weight_decay=1e-3, exclude=["6"]),
}
OF_BLAS = ("muon",)  # whose bits are those of the BLAS that numpy or cupy calls: other machines may have others


def layer_wise(opt: Any = None) -> LarsWrapper:
    """LARS around an optimizer, with numbers that show."""
    return LarsWrapper(SGD(ExponentialDecay(0.1, 2, 0.5, staircase=True), 0.9) if opt is None else opt, 0.02, 0.1)


WRAPPERS: dict[str, Make] = {
    "lars": layer_wise,
    "lars with epsilon": lambda: LarsWrapper(Adam(0.01, epsilon=1e-3), epsilon=0.1, exclude=["1", "3"]),
    "batch gradients": lambda: BatchGradients(sgd(), 2),
    "three batches": lambda: BatchGradients(Adam(0.01, epsilon=1e-3), 3),
    "lars of two batches": lambda: BatchGradients(layer_wise(), 2),
    "batches of lars": lambda: layer_wise(BatchGradients(SGD(0.1, 0.9), 2)),
}

DGC = DeepGradientCompression(Packed(TopK(0.1)), weight_decay=1e-2, warmup=[0.5, 0.0, 0.9], steps_per_epoch=1)
DGC_NOW = DeepGradientCompression(Packed(TopK(0.1), value="int8"), weight_decay=1e-2, decay_in_gradient=True)
NESTEROV_DGC = DeepGradientCompression(
    TopK(0.1), 0.8, nesterov=True, clip_norm=2.0, weight_decay=1e-2, exclude_1d=False, min_numel=8
)


def two_phase(compressor: Compressor) -> Step:
    """A step whose sums are formed by the owners of shards, and compressed again."""
    return lambda opt, loss: opt.step(loss, compressor, exchange="two_phase")


# One step of every kind, as a user would write it.
MODES: dict[str, Step] = {
    "dense": lambda opt, loss: opt(loss),
    "half": lambda opt, loss: opt.backward_and_update_half(loss),
    "clipped half": lambda opt, loss: opt.backward_and_update_half(loss, clipping=True, clip_Value=0.5),
    "bfloat16": lambda opt, loss: opt.step(loss, Half("bfloat16")),
    "half with memory": lambda opt, loss: opt.step(loss, ErrorFeedback(Half())),
    "partial": lambda opt, loss: opt.backward_and_partial_update(loss),
    "topk": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=0.1, topK=True),
    "threshold": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=0.7),
    "topk without memory": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=0.1, topK=True, corr=False),
    "topk per tensor": lambda opt, loss: opt.step(loss, ErrorFeedback(TopK(0.1, per_tensor=True))),
    "threshold without memory": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=0.7, corr=False),
    "topk beyond break even": lambda opt, loss: opt.step(loss, ErrorFeedback(TopK(0.9))),
    "2bit": lambda opt, loss: opt.step(loss, ErrorFeedback(TwoBit(0.5))),
    "1bit": lambda opt, loss: opt.step(loss, ErrorFeedback(OneBit())),
    "int8": lambda opt, loss: opt.step(loss, ErrorFeedback(Int8())),
    "packed": lambda opt, loss: opt.step(loss, ErrorFeedback(Packed(TopK(0.1)))),
    "packed threshold": lambda opt, loss: opt.step(loss, ErrorFeedback(Packed(Threshold(0.7), value="bfloat16"))),
    "dgc": lambda opt, loss: opt.step(loss, DGC),
    "dgc by gather": lambda opt, loss: opt.step(loss, NESTEROV_DGC, break_even=False),
    "dgc in int8": lambda opt, loss: opt.step(loss, DGC_NOW),
    "dgc of all": lambda opt, loss: opt.step(loss, DeepGradientCompression(TopK(1.0))),
    "topk in two phases": two_phase(ErrorFeedback(TopK(0.1))),
    "topk in two phases without memory": two_phase(TopK(0.1, per_tensor=True)),
    "all that was sent in two phases": two_phase(ErrorFeedback(TopK(0.1, reselect=False))),
    "threshold in two phases": two_phase(ErrorFeedback(Threshold(0.7))),
    "packed in two phases": two_phase(ErrorFeedback(Packed(TopK(0.1)))),
    "packed threshold in two phases": two_phase(ErrorFeedback(Packed(Threshold(0.7), value="int8"))),
    "2bit in two phases": two_phase(ErrorFeedback(TwoBit(0.5))),
    "1bit in two phases": two_phase(ErrorFeedback(OneBit())),
    "1bit units in two phases": two_phase(ErrorFeedback(OneBit(scale="unit"))),
    "int8 in two phases": two_phase(ErrorFeedback(Int8(32))),
    "int4 in two phases": two_phase(ErrorFeedback(Int4(32))),
    "int4 at random in two phases without memory": two_phase(Int4(32, "stochastic", seed=1)),
    "dgc in two phases": two_phase(DGC),
    "dgc of Nesterov in two phases": two_phase(NESTEROV_DGC),
    "packed 2bit": lambda opt, loss: opt.step(loss, ErrorFeedback(Packed(TopK(0.1), value="2bit"))),
    "chunks": lambda opt, loss: opt.step(loss, ErrorFeedback(Packed(Chunks(8, 64), value="2bit"))),
    "chunks in two phases": two_phase(ErrorFeedback(Chunks(8, 64))),
    "a memory that decays": two_phase(ErrorFeedback(Packed(Chunks(8, 64), value="2bit"), decay=0.9)),
    "frequencies": lambda opt, loss: opt.step(loss, DCT(ErrorFeedback(Packed(Chunks(8, 64)), decay=0.9))),
    "frequencies by owners": two_phase(DCT(ErrorFeedback(Chunks(8, 64)), tile=8)),
    "packed 2bit in two phases": two_phase(ErrorFeedback(Packed(TopK(0.1), value="2bit"))),
    "partial by seed": lambda opt, loss: opt.backward_and_partial_update(loss, share=0.3, seed=5),
}
EXACT: tuple[Compressor, ...] = (  # what they send and what they keep add up to the bit
    Dense(),
    Half(),
    Half("bfloat16"),
    TopK(0.01),
    TopK(0.5),
    Threshold(0.7),
    Chunks(8, 64),
    Packed(TopK(0.5)),
    Packed(TopK(0.5), value="float16"),
    Packed(Chunks(8, 64), value="bfloat16"),
    Int8(),
    Int4(),
    TwoBit(0.5),
    ErrorFeedback(TopK(0.01)),
    ErrorFeedback(Half()),
    ErrorFeedback(Int4()),
    DCT(ErrorFeedback(Packed(Chunks(8, 64)))),
    DeepGradientCompression(TopK(0.01), exclude_1d=False),
)
ROUNDED: tuple[Compressor, ...] = (  # within one unit in the last place
    TwoBit(0.3),
    OneBit(),
    OneBit(0.3),
    Int8(rounding="stochastic"),
    Packed(TopK(0.5), value="int8"),
    Packed(TopK(0.5), value="2bit"),
    ErrorFeedback(OneBit()),
)
APART = ("partial", "partial by seed")  # ranks have parameters of their own
WITH_MEMORY = tuple(map(ErrorFeedback, (Half(), TopK(0.1), TwoBit(), OneBit(), Int8(), Int4(32), Packed(TopK(0.1)))))
CAPTURED = (Dense(), Half(), Half("bfloat16"), TopK(0.1), *WITH_MEMORY, DGC_NOW, NESTEROV_DGC)
LOSE_NOTHING = "dense,threshold,topk,topk per tensor,topk beyond break even,half with memory,2bit,1bit".split(",")
LOSE_NOTHING += ["int8", "packed", "packed threshold", "packed 2bit", "chunks"]
LOSE_NOTHING += [mode for mode in MODES if mode.endswith("in two phases") and "dgc" not in mode]
ELEMENTWISE = (
    "dense",
    "half",
    "bfloat16",
    "half with memory",
    "threshold",
    "topk per tensor",
    "2bit",
    "packed threshold",
    "dgc by gather",
    "partial by seed",
)
SHARDED: tuple[
    dict[str, Any], ...
] = (  # who updates what does not depend on what was sent: most modes are tried with one of these
    {},
    {"nonfinite": "propagate"},
    {"overlap": True, "clip_norm": 2.0},
    {"dtype": "float64", "num_batches": 2, "deterministic": True},
    {"nonfinite": "propagate", "clip_norm": 2.0},
)
