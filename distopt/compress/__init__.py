"""What is worth sending.  Adding a compressor is one file here, one test file, and one line below."""

from distopt.compress.codec import OneBit, TwoBit
from distopt.compress.compressor import At, Compressor
from distopt.compress.dense import Dense
from distopt.compress.dgc import DeepGradientCompression
from distopt.compress.half import Half
from distopt.compress.memory import ErrorFeedback
from distopt.compress.packed import Packed
from distopt.compress.sparse import Threshold, TopK

__all__ = [
    "At",
    "Compressor",
    "DeepGradientCompression",
    "Dense",
    "ErrorFeedback",
    "Half",
    "OneBit",
    "Packed",
    "Threshold",
    "TopK",
    "TwoBit",
]
