"""Gradient compression: what to send.  Adding a compressor is one file here, one test file, and one line below."""

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
from distopt.compress.quantize import OneBit, TwoBit
from distopt.compress.top_k import Threshold, TopK

__all__ = [
    "DCT",
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
    "TwoBit",
    "check",
]
