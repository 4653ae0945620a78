"""What is worth sending.  Adding a compressor is one file here, one test file, and one line below."""

from distopt.compress.compressor import At, Compressor
from distopt.compress.dense import Dense

__all__ = ["At", "Compressor", "Dense"]
