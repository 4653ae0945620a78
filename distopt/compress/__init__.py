"""Gradient compression: what to send.

A new compressor is one file here, its entry in ``ALL`` below, and its line of docs/guides/modes.md: laws, benchmarks,
``distopt prove`` and mode strings have what ``ALL`` has.
"""

from collections.abc import Callable

from distopt.compress.arc import ARCTopK
from distopt.compress.base import Compressor
from distopt.compress.blocks import Int4, Int8
from distopt.compress.cast import Half
from distopt.compress.checking import check
from distopt.compress.chunks import Chunks
from distopt.compress.context import BucketContext, DeviceContext, ExchangeContext
from distopt.compress.dct import DCT
from distopt.compress.dense import Dense
from distopt.compress.dgc import DeepGradientCompression
from distopt.compress.elias_fano import Packed
from distopt.compress.error_feedback import ErrorFeedback
from distopt.compress.part import Part, Timed, Try, Word, both
from distopt.compress.quantize import OneBit, TwoBit
from distopt.compress.top_k import Sparse, Threshold, TopK
from distopt.compress.traits import Traits

__all__ = [
    "DCT",
    "ARCTopK",
    "BucketContext",
    "Chunks",
    "Compressor",
    "DeepGradientCompression",
    "Dense",
    "DeviceContext",
    "ErrorFeedback",
    "ExchangeContext",
    "Half",
    "Int4",
    "Int8",
    "OneBit",
    "Packed",
    "Threshold",
    "TopK",
    "Traits",
    "TwoBit",
    "check",
]


def _packed(selector: Sparse, options: dict[str, str | None]) -> Sparse:
    """Return the selector of a mode string, packed if that says so."""
    if "packed" not in options:
        return selector
    value = options["packed"]
    return Packed(selector) if value is None else Packed(selector, value=value)


def _dgc() -> Part:
    """Deep gradient compression, some steps of which share a compressor."""
    warming = DeepGradientCompression(Packed(TopK(0.1)), weight_decay=1e-2, warmup=[0.5, 0.0, 0.9], steps_per_epoch=1)
    in_int8 = DeepGradientCompression(Packed(TopK(0.1), value="int8"), weight_decay=1e-2, decay_in_gradient=True)
    nesterov = DeepGradientCompression(
        TopK(0.1), 0.8, nesterov=True, clip_norm=2.0, weight_decay=1e-2, exclude_1d=False, min_numel=8
    )
    return Part(
        words={
            "dgc": Word(
                lambda density, options: DeepGradientCompression(
                    _packed(TopK(density), options), exclude_1d="1d" not in options
                ),
                (0.001,),
                ("packed", "1d"),
                sparse=True,
            )
        },
        laws=both("dgc", warming)
        | {
            "dgc by gather": Try(nesterov, break_even=False, any_buckets=True),
            "dgc in int8": Try(in_int8),
            "dgc of all": Try(DeepGradientCompression(TopK(1.0))),
            "dgc of Nesterov in two phases": Try(nesterov, "two_phase"),
        },
        exact=(DeepGradientCompression(TopK(0.01), exclude_1d=False),),
        captured=(in_int8, nesterov),
        # without momentum, by which gradients would grow that are the same array at every call
        timed={
            "DGC 0.1 %": Timed(lambda _: DeepGradientCompression(Packed(TopK(0.001)), momentum=0.0), 0.001, moved=20)
        },
    )


# By class, a function that says all that the rest of the library is to know of it; a training asks nothing.
ALL: dict[type[Compressor], Callable[[], Part]] = {
    Dense: lambda: Part(words={"dense": Word(lambda options: Dense())}, exact=(Dense(),), captured=(Dense(),)),
    Half: lambda: Part(
        words={"half": Word(lambda options: Half()), "bfloat16": Word(lambda options: Half("bfloat16"))},
        laws={
            "bfloat16": Try(Half("bfloat16"), any_buckets=True),
            "half with memory": Try(ErrorFeedback(Half()), any_buckets=True),
        },
        exact=(Half(), Half("bfloat16")),
        captured=(Half(), Half("bfloat16"), ErrorFeedback(Half())),
        timed={"half with memory": Timed(lambda _: ErrorFeedback(Half()), sent=2.0)},
    ),
    Int8: lambda: Part(
        words={"int8": Word(lambda options: ErrorFeedback(Int8()))},
        laws={"int8": Try(ErrorFeedback(Int8())), "int8 in two phases": Try(ErrorFeedback(Int8(32)), "two_phase")},
        exact=(Int8(),),
        rounded=(Int8(rounding="stochastic"),),
        captured=(ErrorFeedback(Int8()),),
        timed={"int8": Timed(lambda _: ErrorFeedback(Int8()), sent=1.0)},
    ),
    Int4: lambda: Part(
        words={"int4": Word(lambda options: ErrorFeedback(Int4()))},
        laws={
            "int4 in two phases": Try(ErrorFeedback(Int4(32)), "two_phase"),
            "int4 at random in two phases without memory": Try(Int4(32, "stochastic", seed=1), "two_phase"),
        },
        exact=(Int4(),),
        captured=(ErrorFeedback(Int4(32)),),
        timed={"int4": Timed(lambda _: ErrorFeedback(Int4()), sent=0.5)},
    ),
    OneBit: lambda: Part(
        words={"1bit": Word(lambda options: ErrorFeedback(OneBit()))},
        laws=both("1bit", ErrorFeedback(OneBit()))
        | {"1bit units in two phases": Try(ErrorFeedback(OneBit(scale="unit")), "two_phase")},
        rounded=(OneBit(), OneBit(0.3)),
        captured=(ErrorFeedback(OneBit()),),
        # the mean is a pass of its own
        timed={"one bit": Timed(lambda _: ErrorFeedback(OneBit()), moved=20, sent=0.125)},
    ),
    TwoBit: lambda: Part(
        words={"2bit": Word(lambda threshold, options: ErrorFeedback(TwoBit(threshold)), (0.5,))},
        laws=both("2bit", ErrorFeedback(TwoBit(0.5)), any_buckets=True),
        exact=(TwoBit(0.5),),
        rounded=(TwoBit(0.3),),
        captured=(ErrorFeedback(TwoBit()),),
        timed={"two bits": Timed(lambda magnitude: ErrorFeedback(TwoBit(magnitude)), sent=0.25)},
    ),
    TopK: lambda: Part(
        words={
            "topk": Word(
                lambda density, options: ErrorFeedback(_packed(TopK(density, "per-tensor" in options), options)),
                (0.01,),
                ("packed", "per-tensor"),
                sparse=True,
            )
        },
        laws={
            "topk per tensor": Try(ErrorFeedback(TopK(0.1, per_tensor=True)), any_buckets=True),
            "topk beyond break even": Try(ErrorFeedback(TopK(0.9))),
            "topk in two phases": Try(ErrorFeedback(TopK(0.1)), "two_phase"),
            "topk in two phases without memory": Try(TopK(0.1, per_tensor=True), "two_phase"),
            "all that was sent in two phases": Try(ErrorFeedback(TopK(0.1, reselect=False)), "two_phase"),
        },
        exact=(TopK(0.01), TopK(0.5)),
        captured=(TopK(0.1), ErrorFeedback(TopK(0.1))),
        timed={
            "top-K 0.1 %": Timed(lambda _: ErrorFeedback(TopK(0.001)), 0.001),
            "top-K 1 %": Timed(lambda _: ErrorFeedback(TopK(0.01)), 0.01),
        },
    ),
    Threshold: lambda: Part(
        words={
            "threshold": Word(
                lambda magnitude, options: ErrorFeedback(_packed(Threshold(magnitude), options)), (0.05,), ("packed",)
            )
        },
        laws={"threshold in two phases": Try(ErrorFeedback(Threshold(0.7)), "two_phase")},
        exact=(Threshold(0.7),),
        timed={
            "threshold 0.1 %": Timed(lambda magnitude: ErrorFeedback(Threshold(magnitude)), 0.001),
            "threshold 1 %": Timed(lambda magnitude: ErrorFeedback(Threshold(magnitude)), 0.01),
        },
    ),
    Chunks: lambda: Part(
        words={
            "chunks": Word(
                lambda k, of, options: ErrorFeedback(_packed(Chunks(k, of), options)),
                (64, 4096),
                ("packed",),
                sparse=True,
            )
        },
        laws={
            "chunks": Try(ErrorFeedback(Packed(Chunks(8, 64), value="2bit"))),
            "chunks in two phases": Try(ErrorFeedback(Chunks(8, 64)), "two_phase"),
        },
        exact=(Chunks(8, 64),),
        timed={"chunks 64 of 4,096": Timed(lambda _: ErrorFeedback(Chunks()), 64 / 4096)},
    ),
    Packed: lambda: Part(
        laws=both("packed", ErrorFeedback(Packed(TopK(0.1))))
        | both("packed 2bit", ErrorFeedback(Packed(TopK(0.1), value="2bit")))
        | {
            "packed threshold": Try(ErrorFeedback(Packed(Threshold(0.7), value="bfloat16")), any_buckets=True),
            "packed threshold in two phases": Try(ErrorFeedback(Packed(Threshold(0.7), value="int8")), "two_phase"),
        },
        exact=(Packed(TopK(0.5)), Packed(TopK(0.5), value="float16"), Packed(Chunks(8, 64), value="bfloat16")),
        rounded=(Packed(TopK(0.5), value="int8"), Packed(TopK(0.5), value="2bit")),
        captured=(ErrorFeedback(Packed(TopK(0.1))),),
        timed={
            "packed top-K 0.1 %": Timed(lambda _: ErrorFeedback(Packed(TopK(0.001))), 0.001),
            "packed top-K 1 %": Timed(lambda _: ErrorFeedback(Packed(TopK(0.01))), 0.01),
        },
    ),
    ErrorFeedback: lambda: Part(
        laws={"a memory that decays": Try(ErrorFeedback(Packed(Chunks(8, 64), value="2bit"), decay=0.9), "two_phase")},
        exact=(ErrorFeedback(TopK(0.01)), ErrorFeedback(Half()), ErrorFeedback(Int4())),
        rounded=(ErrorFeedback(OneBit()),),
    ),
    DCT: lambda: Part(
        laws={
            "frequencies": Try(DCT(ErrorFeedback(Packed(Chunks(8, 64)), decay=0.9))),
            "frequencies by owners": Try(DCT(ErrorFeedback(Chunks(8, 64)), tile=8), "two_phase"),
        },
        exact=(DCT(ErrorFeedback(Packed(Chunks(8, 64)))),),
    ),
    DeepGradientCompression: _dgc,
    ARCTopK: lambda: Part(
        words={"arc": Word(lambda density, options: ARCTopK(density), (0.01,), sparse=True)},
        laws={"arc": Try(ARCTopK(0.2, of=8, decay=0.9, seed=7))},
        exact=(ARCTopK(0.2, of=8),),
        timed={"ARC top-K 1 %": Timed(lambda _: ARCTopK(0.01), 0.01, moved=16)},
    ),
}
